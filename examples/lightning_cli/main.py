"""Lightning's own command line: ``python main.py fit --config config.yaml``.

It needs ``pip install '.[cli]'``.
"""

from lightning.pytorch.cli import LightningCLI

import lightning_axosparse  # noqa: F401  makes the names of its classes known
from lightning_axosparse.examples.data import TextDataModule
from lightning_axosparse.examples.gpt import GPT

if __name__ == "__main__":
    LightningCLI(GPT, TextDataModule, save_config_kwargs={"overwrite": True})
