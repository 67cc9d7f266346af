"""Computes metrics of saved weights, and prints samples of text: the command ``axosparse-eval``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import hydra
import lightning as L
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from axosparse_commands.overrides import config_folder, missing_file
from lightning_axosparse.callbacks.report.tables import Section, terminal
from lightning_axosparse.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_axosparse.checkpoint.load import load_sparse
from lightning_axosparse.checkpoint.safetensors import SafetensorsState, is_safetensors
from lightning_axosparse.cli.train import (
    one_line_errors,
    prepare_process,
    validate_trainer,
    write_sample,
)
from lightning_axosparse.support.arguments import (
    INDEX,
    NOT_NEGATIVE,
    SEED,
    TEXT,
    Kind,
    check,
    list_of,
    one_of,
    sequence_of,
    short_repr,
)
from lightning_axosparse.support.troubleshooting import see, without_link

METRICS = "metrics.json"
_HYDRA_KEYS = ("_target_", "_partial_", "_args_", "_recursive_", "_convert_")
"""Keys that Hydra's ``instantiate`` acts upon."""

_KINDS = {
    "checkpoint": Kind("a Lightning checkpoint or a .safetensors file of its weights", TEXT.fits),
    "loops": sequence_of(
        "a list of at least one of 'validate' and 'test'", one_of("validate", "test")
    ),
    "seed": SEED,
    "sample.prompts": list_of("a list of texts", TEXT),
    "sample.length": INDEX,
    "sample.temperature": NOT_NEGATIVE,
}


def evaluate(config: DictConfig) -> dict[str, float]:
    """Run the loops on the saved weights, print samples of text, and print and save the metrics.

    Returns:
        The metrics that the loops logged, which ``metrics.json`` has, too.
    """
    check(ValueError, {name: OmegaConf.select(config, name) for name in _KINDS}, _KINDS)
    validate_trainer(config.trainer)
    source = Path(config.checkpoint)
    missing = missing_file(source)
    if missing is not None:
        raise FileNotFoundError(missing + see("commands"))
    L.seed_everything(config.seed)
    data = instantiate(config.data, _convert_="all")
    model, unloaded = load_model(config.model, source)
    _validate_context(model, data)
    trainer: L.Trainer = instantiate(
        config.trainer, logger=[instantiate(logger) for logger in config.logger.values()]
    )
    metrics: dict[str, float] = {}
    for name in config.loops:
        loop = trainer.validate if name == "validate" else trainer.test
        loop(model, datamodule=data, ckpt_path=unloaded, weights_only=True, verbose=False)
        metrics |= {key: float(value) for key, value in trainer.callback_metrics.items()}
        unloaded = None  # The first loop has loaded it.
    if trainer.is_global_zero:
        folder = Path(config.folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / METRICS).write_text(json.dumps(metrics, indent=2) + "\n")
        print_results(config, metrics, model)
    return metrics


def with_data_of_run(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return the configuration with the data of the run in whose folder ``checkpoint`` lies.

    Only values are taken, and only those that the command line does not override. Which class is
    instantiated is never taken from the run. If ``data=`` names another class than the run's,
    nothing is taken.
    """
    overridden = {override.lstrip("+").partition("=")[0] for override in overrides}
    source = Path(OmegaConf.select(config, "checkpoint", default=""))
    files = [folder / ".hydra" / "config.yaml" for folder in source.absolute().parents[:2]]
    file = next((path for path in files if path.is_file()), None)
    if file is None:
        return config
    run = OmegaConf.load(file)
    assert isinstance(run, DictConfig)
    run.folder = str(file.parents[1])
    data = run.get("data", OmegaConf.create())
    target = data.pop("_target_", None)
    if target != config.data.get("_target_", target):
        if "data" in overridden:
            return config
        raise ValueError(
            f"The run in '{file.parents[1]}' had other data, {target}: give data=text, data=images "
            f"or data=own data._target_=NAME." + see("commands")
        )
    values: Any = OmegaConf.to_container(data, resolve=True)
    _validate_values(values, file, "data")
    merged = config.copy()
    for name, value in values.items():
        OmegaConf.update(merged, f"data.{name}", value, force_add=True)
    for name in overridden:
        if name.startswith("data."):
            value = OmegaConf.select(config, name)
            OmegaConf.update(merged, name, value, merge=False, force_add=True)
    return merged


def _validate_context(model: L.LightningModule, data: L.LightningDataModule) -> None:
    """Check that the windows of the data are not longer than the model's context, if it has one."""
    limit, context = getattr(model, "context", None), getattr(data, "context", None)
    if isinstance(limit, int) and isinstance(context, int) and context > limit:
        raise ValueError(
            f"The windows of data.context={context} are longer than the model's context, "
            f"{limit}: give data.context={limit}." + see("commands")
        )


def load_model(config: DictConfig, source: Path) -> tuple[L.LightningModule, Path | None]:
    """Instantiate the model of saved weights.

    The class is that of ``config``. Hyperparameters in a checkpoint replace the arguments there. A
    safetensors file has no hyperparameters; its weights are loaded here, pruned ones into sparse
    storage.

    Returns:
        The model, and the file whose weights the Trainer has to load; None if they are loaded.
    """
    if is_safetensors(source):
        model: L.LightningModule = instantiate(config, _convert_="all")
        state = SafetensorsState(source)
        if state.sparse:
            load_sparse(model, source)
            return model, None
        try:
            model.load_state_dict(dict(state))
        except RuntimeError as error:  # It lists names first; the last line has sizes, if any.
            problem = shorten(str(error).rpartition("\n")[2], 200, placeholder=" [...]").rstrip(".")
            raise ValueError(
                f"The weights in '{source}' do not fit to `model`, which is {config._target_}: "
                f"{problem}. Such a file has no hyperparameters: give `model` those of the run."
                + see("commands")
            ) from error
        return model, None
    files = AtomicCheckpointIO()
    files.verify(source)
    contents = files.load_mapped(source, weights_only=True)
    values = contents.get("hyper_parameters", {})
    _validate_values(values, source)
    make = instantiate(config, _partial_=True, _convert_="all")
    try:
        return make(**values), source
    except Exception as error:  # Classes may raise any exception for arguments they do not know.
        raise ValueError(
            f"The hyperparameters in '{source}' do not fit to `model`, which is "
            f"{config._target_}: {without_link(error)}. Give the class that the run has trained."
            + see("commands")
        ) from error


def _validate_values(value: Any, source: Path, path: str = "hyper_parameters") -> None:
    """Check that values from a file are no configuration, which a model might instantiate."""
    parts: Mapping[Any, Any] = {}
    found = "an interpolation" if isinstance(value, str) and "${" in value else None
    if isinstance(value, Mapping):
        parts = value
        found = next((f"the key `{key}`" for key in _HYDRA_KEYS if key in value), None)
    elif isinstance(value, list | tuple | set):
        parts = dict(enumerate(value))
    if found is not None:
        raise ValueError(
            f"'{source}' has {found} in {path}: {short_repr(value)}. Settings in a file must be "
            "plain values, as only the configuration may name classes and look up values. Evaluate "
            "a .safetensors file of the weights, which has no settings." + see("commands")
        )
    for key, part in parts.items():
        _validate_values(part, source, f"{path}.{key}")


def print_results(config: DictConfig, metrics: Mapping[str, float], model: Any) -> None:
    """Print the metrics, and the text that the model generates after each prompt, if it can."""
    console = Console()
    rows = [(name, f"{value:.6g}") for name, value in metrics.items()]
    console.print(terminal([Section(str(config.checkpoint), ("metric", "value"), rows)]))
    for prompt in config.sample.prompts:
        write_sample(console, config, model, prompt, f"After {prompt!r}")
    console.print(f"Metrics: {Path(config.folder) / METRICS}", soft_wrap=True)


def main() -> None:
    """Run the command."""
    prepare_process()
    _main()


@hydra.main(version_base="1.3", config_path=str(config_folder()), config_name="eval")
def _main(config: DictConfig) -> None:
    with one_line_errors("axosparse-eval"):
        evaluate(with_data_of_run(config, HydraConfig.get().overrides.task))


if __name__ == "__main__":
    main()
