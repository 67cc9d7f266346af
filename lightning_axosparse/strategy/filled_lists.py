"""Notices the lists of a module that a step fills: only the last stage runs a step to its end."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_axosparse.support.troubleshooting import see


def list_lengths(module: nn.Module) -> dict[str, int]:
    """The lengths of the lists that are attributes of a module, by name."""
    return {name: len(value) for name, value in vars(module).items() if isinstance(value, list)}


def advise_on_lists(module: nn.Module, before: Mapping[str, int], loop: str) -> list[str]:
    """Say which lists of a module are not filled on every rank.

    Args:
        module: the user's module, on a rank that has run the step to its end.
        before: the lengths of its lists before the step.
        loop: the running loop, in words.

    Returns:
        What to warn of, if lists have grown.
    """
    grown = [name for name, size in list_lengths(module).items() if size > before.get(name, 0)]
    if not grown:
        return []
    step = {"sanity check": "validation"}.get(loop, loop)
    hook = {"training": "train"}.get(step, step)
    lists = " and ".join(f"`self.{name}`" for name in grown)
    return [
        f"`{step}_step` fills {lists}, but a rank runs the step only as far as the layers of its "
        "stage, so before the last stage hooks find lists empty. Log values or torchmetrics "
        f"objects, which every rank receives, or fill lists in `on_{hook}_batch_end` from what the "
        "step returns, with AxoSparseStrategy(step_outputs='all')." + see("steps")
    ]
