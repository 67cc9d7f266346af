"""Trains a model from a Hydra configuration: the command ``axosparse-train``."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args, get_type_hints

import hydra
import lightning as L
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue
from rich.console import Console
from typing_extensions import override

from axosparse_commands.overrides import config_folder
from lightning_axosparse.callbacks.report.facts import RunResult
from lightning_axosparse.callbacks.report.report import TrainingReport
from lightning_axosparse.callbacks.report.tables import sections, terminal
from lightning_axosparse.cli.job import (
    RESULT,
    earlier_result,
    error_message,
    recording_errors,
    settings_of,
)
from lightning_axosparse.distributed.grid import divisors
from lightning_axosparse.strategy.compat.internals import callbacks_of, overrides
from lightning_axosparse.support.arguments import INDEX, NOT_NEGATIVE, SEED, TEXT, check, short_repr
from lightning_axosparse.support.troubleshooting import see

_KINDS = {
    "seed": SEED,
    "sample.prompt": TEXT,
    "sample.length": INDEX,
    "sample.temperature": NOT_NEGATIVE,
}
"""Values that the command itself uses; classes validate their arguments."""


USER_ERRORS = (
    InstantiationException,
    MisconfigurationException,
    MissingMandatoryValue,
    FileNotFoundError,
    ValueError,
)
"""Errors that end a command with one line."""

_log = logging.getLogger(__name__)


def per_replica(batch: int, ranks: int, stages: int) -> int:
    """Return the batch size of a replica: 8 for a global batch of 32, 8 ranks and 2 stages."""
    replicas = ranks // stages
    if batch % replicas:
        raise ValueError(
            f"global_batch={batch} cannot be divided by {replicas} replicas." + see("commands")
        )
    return batch // replicas


def heads(width: Any) -> int:
    """Return the default heads of a GPT: at most 6, and a divisor of ``width``.

    A width of the wrong type is refused by the GPT.
    """
    return 6 if type(width) is not int else max(n for n in range(1, 7) if width % n == 0)


OmegaConf.register_new_resolver("heads", heads, replace=True)
OmegaConf.register_new_resolver(
    "grids", lambda ranks: ",".join(map(str, divisors(ranks))), replace=True
)
OmegaConf.register_new_resolver("per_replica", per_replica, replace=True)


class RunFolder(Callback):
    """A callback of Hydra that creates the folder of a run, or ends the command with one line.

    Hydra would create the folder itself, but prints a traceback if it cannot.
    """

    @override
    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        _make_folder(config, "run")

    @override
    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        _make_folder(config, "sweep")


def _make_folder(config: DictConfig, mode: str) -> None:
    """Create the folder ``hydra.MODE.dir``.

    Raises:
        SystemExit: if that fails; Hydra would turn an ``Exception`` into a warning.
    """
    folder = Path(config.hydra[mode].dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(
            f"hydra.{mode}.dir={folder} cannot be made: {error.strerror}. Name a folder in which "
            "you may write." + see("commands")
        )


def train(config: DictConfig) -> float | None:
    """Fit and test the model, save its final numbers, print the report and a sample of text.

    Values are validated before any rank starts.

    Returns:
        The last validation loss, which sweepers minimize; None if there is none, or it is not
        finite.
    """
    check(ValueError, {name: OmegaConf.select(config, name) for name in _KINDS}, _KINDS)
    validate_trainer(config.trainer)
    settings = settings_of(config)  # Before `instantiate` resolves parts of it in place.
    L.seed_everything(config.seed)
    # Lists and dicts, not OmegaConf's, which checkpoints would hold as hyperparameters.
    data = instantiate(config.data, _convert_="all")
    model = instantiate(config.model, _convert_="all")
    callbacks = dict(config.callbacks.items())
    if not config.trainer.enable_progress_bar:  # Lightning refuses the callback then.
        callbacks.pop("progress", None)
    trainer: L.Trainer = instantiate(
        config.trainer,
        callbacks=[
            instantiate(each) for each in (*callbacks.values(), config.pruning.callback) if each
        ],
        logger=[instantiate(logger) for logger in config.logger.values()],
    )
    trainer.fit(model, datamodule=data)
    loss = trainer.callback_metrics.get(monitored(config))
    if overrides(model, "test_step") and overrides(data, "test_dataloader"):
        trainer.test(model, datamodule=data, verbose=False)
    if trainer.is_global_zero:
        save_and_print_results(config, settings, trainer, model)
    return None if loss is None or not loss.isfinite() else float(loss)


def monitored(config: DictConfig) -> str:
    """Return the name of the validation loss, by which the jobs of a sweep are compared."""
    return OmegaConf.select(config, "callbacks.report.val_loss") or "val_loss"


def validate_trainer(options: DictConfig) -> None:
    """Validate the types of numbers and bools among the Trainer's arguments, which checks few."""
    for name, hint in get_type_hints(L.Trainer.__init__).items():
        kinds = [kind for kind in get_args(hint) or [hint] if kind is not type(None)]
        value: Any = options.get(name)
        is_plain = {int, float, bool}.issuperset(kinds)
        if is_plain and value is not None and not isinstance(value, tuple(kinds)):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(
                f"trainer.{name}={short_repr(value)} must be {wanted}." + see("arguments")
            )


def save_and_print_results(
    config: DictConfig, settings: dict[str, Any], trainer: L.Trainer, model: L.LightningModule
) -> None:
    """Save the final numbers; print the report and a sample of generated text."""
    console = Console()
    for report in callbacks_of(trainer):
        if isinstance(report, TrainingReport) and report.facts is not None:
            RunResult.of(report.facts, settings).save(Path(config.folder) / RESULT)
            console.print(terminal(sections(report.facts)))
    write_sample(console, config, model, config.sample.prompt, "The model writes")
    console.print(f"Report, plots, checkpoints: {config.folder}", soft_wrap=True)


def write_sample(
    console: Console, config: DictConfig, model: L.LightningModule, prompt: str, title: str
) -> None:
    """Print the text that a model generates after a prompt, if it can and a length is given."""
    sample = config.sample
    if sample.length and callable(generate := getattr(model, "generate", None)):
        console.rule(title)
        text = generate(prompt, sample.length, sample.temperature, seed=config.seed)
        console.print(printable(text), markup=False, highlight=False)
        console.rule()


def printable(text: str) -> str:
    """Replace characters that would move a terminal's cursor or change its colours."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def main() -> None:
    """Run the command."""
    prepare_process()
    _main()


def prepare_process() -> None:
    """Ignore a warning in this process and its ranks, and find modules of the working folder."""
    # Lightning 2.6 uses a function of torch's pytrees that torch 2.13 deprecates.
    os.environ.setdefault(
        "PYTHONWARNINGS", "ignore::FutureWarning:lightning.pytorch.utilities._pytree"
    )
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module=r"lightning\.pytorch\..*_pytree"
    )
    # So that `_target_` may name them; ranks do the same.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)


@hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="config")
def _main(config: DictConfig) -> float | None:
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return _job_of_sweep(config)
    with one_line_errors("axosparse-train"), recording_errors(Path(config.folder)):
        return train(config)


@contextmanager
def one_line_errors(command: str) -> Iterator[None]:
    """End a command with one line for an error of the user; HYDRA_FULL_ERROR=1 raises the error."""
    try:
        yield
    except USER_ERRORS as error:
        if os.environ.get("HYDRA_FULL_ERROR"):
            raise
        raise SystemExit(f"{command}: {error_message(error)}") from error


def _job_of_sweep(config: DictConfig) -> float | None:
    """Train, unless there is a result already; log an error, so that the next job runs."""
    with one_line_errors("axosparse-train"):
        result = earlier_result(config)
    if result is not None:
        _log.info("Finished before: %s", config.folder)
        return result.validation_loss
    try:
        with recording_errors(Path(config.folder)):
            return train(config)
    except Exception as error:
        _log.error("Failed: %s", error_message(error))
        return None


if __name__ == "__main__":
    main()
