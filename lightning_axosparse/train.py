"""Train a model from a Hydra configuration: the command ``axosparse-train``."""

from __future__ import annotations

from pathlib import Path

import hydra
import lightning as L
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console

from lightning_axosparse.callbacks.context import callbacks_of
from lightning_axosparse.callbacks.report import TrainingReport
from lightning_axosparse.callbacks.tables import terminal


def configuration() -> Path:
    """The folder ``conf``: inside an installed package, beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def train(config: DictConfig) -> float | None:
    """Fit, test, report, and write a sample, as ``config`` says.

    Returns:
        The last validation loss, the objective of a sweep; None without validation.
    """
    L.seed_everything(config.seed)
    data = instantiate(config.data)
    model = instantiate(config.model)
    callbacks = [
        *(callback for name, callback in config.callbacks.items() if _wanted(config, name)),
        config.pruning.callback,
    ]
    trainer: L.Trainer = instantiate(
        config.trainer,
        callbacks=[instantiate(callback) for callback in callbacks if callback],
        logger=[instantiate(logger) for logger in config.logger.values()],
    )
    trainer.fit(model, datamodule=data)
    loss = trainer.callback_metrics.get("val_loss")
    trainer.test(model, datamodule=data, verbose=False)
    if trainer.is_global_zero:
        show(config, trainer, model)
    return None if loss is None else float(loss)


def _wanted(config: DictConfig, callback: str) -> bool:
    """Lightning refuses a progress bar beside ``enable_progress_bar=false``."""
    return callback != "progress" or bool(config.trainer.enable_progress_bar)


def show(config: DictConfig, trainer: L.Trainer, model: L.LightningModule) -> None:
    """Print the report and a sample of what the model writes."""
    console = Console()
    for report in callbacks_of(trainer, TrainingReport):
        if report.facts is not None:
            console.print(terminal(report.facts))
    if config.sample.length and callable(generate := getattr(model, "generate", None)):
        sample = config.sample
        console.rule("The model writes")
        text = generate(sample.prompt, sample.length, sample.temperature, seed=config.seed)
        console.print(printable(text), markup=False, highlight=False)
        console.rule()
    console.print(f"Report, pictures, checkpoints: {config.folder}", soft_wrap=True)


def printable(text: str) -> str:
    """The text without what would move a terminal's cursor or change its colours."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


@hydra.main(version_base="1.3", config_path=str(configuration()), config_name="config")
def main(config: DictConfig) -> float | None:
    """The command."""
    return train(config)


if __name__ == "__main__":
    main()
