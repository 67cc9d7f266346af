"""A network pretrained on code and fine-tuned on English, dense and pruned: ``python finetune.py``.

Python comes with both: the sources of its standard library, and the text of ``help()``.
"""

import argparse
import tempfile
from copy import deepcopy
from pathlib import Path
from pydoc_data.topics import topics

import lightning as L

from lightning_axosparse import AxoSparseStrategy, GradualPruning, Ticket
from lightning_axosparse.examples.data import TextDataModule
from lightning_axosparse.examples.gpt import GPT


def train(model: GPT, data: L.LightningDataModule, steps: int, *callbacks: L.Callback) -> float:
    """Train for so many steps, and return the perplexity of the text held out."""
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,  # or two stages: devices=2, strategy=AxoSparseStrategy(g_inter=2)
        max_steps=steps,
        strategy=AxoSparseStrategy(),
        callbacks=[*callbacks],
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, datamodule=data)
    tester = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    [result] = tester.validate(model, datamodule=data, verbose=False)
    return result["val_perplexity"]


def weights_left(model: GPT) -> float:
    """Return the fraction of the matrices' entries that are not zero."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    return sum(int(m.count_nonzero()) for m in matrices) / sum(m.numel() for m in matrices)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--pretrain", type=int, default=600, help="steps on code")
    parser.add_argument("--steps", type=int, default=200, help="steps on English")
    parser.add_argument("--pruned", type=float, default=0.8)
    options = parser.parse_args()

    L.seed_everything(0)
    new = GPT(width=options.width, depth=4, heads=4, context=64, learning_rate=2e-3)
    sizes = {"context": 64, "batch_size": 16, "max_held_out": 256}
    code = TextDataModule(max_bytes=2_000_000, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "help.txt"
        file.write_text("\n\n".join(topics.values()), encoding="utf-8")
        english = TextDataModule(file, **sizes)

        pretrained = deepcopy(new)
        train(pretrained, code, options.pretrain)
        largest = Ticket.magnitude(pretrained, options.pruned)  # of what pretraining has learned
        rows = {
            "not pretrained, dense": (new, []),
            "pretrained, dense": (pretrained, []),
            "pretrained, pruned at once": (pretrained, [GradualPruning(ticket=largest)]),
            "pretrained, pruned gradually": (pretrained, [GradualPruning(options.pruned)]),
        }
        print("| fine-tuned on English | weights left | perplexity of a byte |")
        print("| --- | --: | --: |")
        for name, (start, callbacks) in rows.items():
            model = deepcopy(start)
            perplexity = train(model, english, options.steps, *callbacks)
            print(f"| {name} | {weights_left(model):.0%} | {perplexity:.2f} |", flush=True)
