"""Finds overrides of Hydra that name no setting, and suggests the nearest name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


def config_folder() -> Path:
    """Return the folder ``conf``: inside an installed package, beside the package in a checkout."""
    spec = find_spec("lightning_axosparse")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def find_problem(config: str, arguments: Sequence[str]) -> str | None:
    """Return the error message for a command's overrides; None if they are valid.

    Nothing is checked if there are options of Hydra, such as ``--cfg``.
    """
    if any(a.startswith("-") and a not in ("-m", "--multirun") for a in arguments):
        return None
    try:
        from hydra import compose, initialize_config_dir
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException
        from omegaconf import OmegaConf
    except ModuleNotFoundError:  # The command itself raises an error that names the extra.
        return None
    try:
        overrides = OverridesParser.create().parse_overrides(
            [argument for argument in arguments if not argument.startswith("-")]
        )
        choices = [_first_job_override(each) for each in overrides if _selects_file(each)]
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            composed = compose(config, choices, return_hydra_config=True)
    except HydraException as error:
        return str(error)
    settings: Any = OmegaConf.to_container(composed, resolve=False)
    values = [each for each in overrides if not _selects_file(each) and not _adds(each)]
    problems = (_unknown_name(settings, each) or _missing_checkpoint(each) for each in values)
    return next((text for text in problems if text is not None), None)


def missing_file(path: Path) -> str | None:
    """Return an error message if there is no such checkpoint, else None."""
    if path.exists():
        return None
    return (
        f"There is no file or folder '{path}' (seen from '{Path.cwd()}'). Give `checkpoint` "
        "a Lightning checkpoint, or a .safetensors file of its weights."
    )


def _missing_checkpoint(override: Override) -> str | None:
    if override.key_or_group != "checkpoint" or override.is_sweep_override():
        return None
    return missing_file(Path(str(override.value())))


def _selects_file(override: Override) -> bool:
    """Whether an override selects a file of a group, such as ``model=vgg``, and sets no value."""
    name = override.key_or_group
    return "/" in name or (config_folder() / name).is_dir()


def _adds(override: Override) -> bool:
    """Whether an override adds a setting: ``+name=value`` or ``++name=value``."""
    return bool(override.is_add() or override.is_force_add())


def _first_job_override(override: Override) -> str:
    """Return an override as text; of ``model=gpt,vgg`` in a sweep, ``model=gpt``."""
    if not override.is_sweep_override():
        return str(override.input_line)
    return f"{override.get_key_element()}={next(override.sweep_string_iterator())}"


def _unknown_name(settings: Mapping[str, Any], override: Override) -> str | None:
    """Return an error message if the settings have no such name, else None."""
    parts = override.key_or_group.split(".")
    node: Any = settings
    for depth, part in enumerate(parts):
        name = ".".join(parts[: depth + 1])
        if node is None or isinstance(node, list) or (isinstance(node, str) and "${" in node):
            return None  # Left to Hydra.
        if not isinstance(node, Mapping):
            return f"there is no {name}: {'.'.join(parts[:depth])} is {node!r}."
        if part not in node:
            return f"there is no {name}. {_suggestion(settings, node, name)}"
        node = node[part]
    return None


def _suggestion(settings: Mapping[str, Any], node: Mapping[str, Any], name: str) -> str:
    """Return a sentence with a similar name, or else with the names in ``node``."""
    parent, _, part = name.rpartition(".")
    start = f"{parent}." if parent else ""
    similar = [f"{start}{other}" for other in get_close_matches(part, map(str, node), 1)]
    similar += [other for other in _names(settings) if other.endswith(f".{part}")]
    if similar:
        return f"Did you mean {similar[0]}?"
    listed = ", ".join(str(other) for other in node if not str(other).startswith("_"))
    more = f"{parent or 'The configuration'} has: {listed}. Add further" if listed else "Add"
    return f"{more} arguments of a class with a plus: +{name}=VALUE"


def _names(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in settings.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping) and name != "hydra":
            yield from _names(value, f"{prefix}{name}.")
