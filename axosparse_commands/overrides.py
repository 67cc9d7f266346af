"""Finds overrides of Hydra that name nothing, and what was meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


def configuration() -> Path:
    """Return the folder ``conf``: inside an installed package, beside the package in a checkout."""
    found = find_spec("lightning_axosparse")
    assert found is not None
    assert found.origin is not None
    package = Path(found.origin).parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def problem(config: str, arguments: Sequence[str]) -> str | None:
    """Return what is wrong with a command's overrides, in words; None if Hydra takes them.

    Options of Hydra that change or print the configuration are left to Hydra.
    """
    if any(a.startswith("-") and a not in ("-m", "--multirun") for a in arguments):
        return None
    try:
        from hydra import compose, initialize_config_dir
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException
        from omegaconf import OmegaConf
    except ModuleNotFoundError:  # The command itself names the extra that is missing.
        return None
    try:
        given = OverridesParser.create().parse_overrides(
            [argument for argument in arguments if not argument.startswith("-")]
        )
        choices = [_first(override) for override in given if _chooses(override)]
        with initialize_config_dir(str(configuration()), version_base="1.3"):
            composed = compose(config, choices, return_hydra_config=True)
    except HydraException as error:
        return str(error)
    settings: Any = OmegaConf.to_container(composed, resolve=False)
    values = [override for override in given if not _chooses(override) and not _adds(override)]
    problems = (_unknown(settings, override) for override in values)
    return next((text for text in problems if text is not None), None)


def _chooses(override: Override) -> bool:
    """Whether it chooses a file of a group, and sets no value."""
    name = override.key_or_group
    return "/" in name or (configuration() / name).is_dir()


def _adds(override: Override) -> bool:
    """Whether it adds what there need not be."""
    return bool(override.is_add() or override.is_force_add())


def _first(override: Override) -> str:
    """Return the override as text; in a sweep, that of the first job."""
    if not override.is_sweep_override():
        return str(override.input_line)
    return f"{override.get_key_element()}={next(override.sweep_string_iterator())}"


def _unknown(settings: Mapping[str, Any], override: Override) -> str | None:
    """Return which part of the name there is not, and what there is; None if there is all."""
    parts = override.key_or_group.split(".")
    place: Any = settings
    for depth, part in enumerate(parts):
        name = ".".join(parts[: depth + 1])
        if place is None or isinstance(place, list) or (isinstance(place, str) and "${" in place):
            return None  # Hydra says what it can do here.
        if not isinstance(place, Mapping):
            return f"there is no {name}: {'.'.join(parts[:depth])} is {place!r}."
        if part not in place:
            return f"there is no {name}. {_meant(settings, place, name)}"
        place = place[part]
    return None


def _meant(settings: Mapping[str, Any], place: Mapping[str, Any], name: str) -> str:
    """Return the name that was meant, or what there is in ``place``, where the name is not."""
    inside, _, part = name.rpartition(".")
    start = f"{inside}." if inside else ""
    close = [f"{start}{other}" for other in get_close_matches(part, map(str, place), 1)]
    close += [other for other in _names(settings) if other.endswith(f".{part}")]
    if close:
        return f"Did you mean {close[0]}?"
    listed = ", ".join(str(other) for other in place if not str(other).startswith("_"))
    return (
        f"{inside or 'The configuration'} has: {listed}. "
        f"Add what a class takes beside these with a plus: +{name}=VALUE"
    )


def _names(settings: Mapping[str, Any], inside: str = "") -> Iterator[str]:
    for name, value in settings.items():
        yield f"{inside}{name}"
        if isinstance(value, Mapping) and name != "hydra":
            yield from _names(value, f"{inside}{name}.")
