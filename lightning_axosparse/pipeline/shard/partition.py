"""Assigns consecutive layers of a module to pipeline stages, in the order of their calls."""

from __future__ import annotations

import copy
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import accumulate, chain, pairwise
from math import inf
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_axosparse.support.torch_internals import fake_mode, tree_map_only
from lightning_axosparse.support.troubleshooting import see

_log = logging.getLogger(__name__)

CallOrder = Callable[[nn.Module, Mapping[str, str]], "list[str]"]
"""What :func:`order_of_example` does."""


class Example(NamedTuple):
    """A call that calls the layers.

    Attributes:
        method: name of a method of the module.
        args: its arguments.
        kwargs: its keyword arguments.
        context: makes the context in which it runs.
    """

    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def order_of_example(module: nn.Module, layers: Mapping[str, str]) -> list[str]:
    """The order in which ``forward`` calls layers with the module's ``example_input_array``.

    Returns:
        As :func:`called_in_order`.
    """
    example = getattr(module, "example_input_array", None)
    if example is None:
        return []
    if isinstance(example, Mapping):
        return called_in_order(module, layers, Example("__call__", (), example))
    args = example if isinstance(example, tuple) else (example,)
    return called_in_order(module, layers, Example("__call__", args))


def called_in_order(module: nn.Module, layers: Mapping[str, str], example: Example) -> list[str]:
    """The order in which a call calls layers.

    A copy of the module, of fake tensors, is called. What it raises when it has called the layers,
    as a loss may that needs values, does not matter. Where it raises before it has called some
    container, as torch's check for a causal mask does, a copy with values is called.

    Returns:
        All layers of the containers that are called at all, but for those without tensors of which
        there is not one call; an empty list where another one is not called once, or where it is
        not known whether a container is called.
    """
    calls = list[str]()
    for with_values in (False, True):
        ended, calls = _calls(module, layers, example, with_values)
        containers = {layers[name] for name in calls}
        if ended or containers == {*layers.values()}:
            break
    else:
        return []
    times = Counter(calls)
    wanted = [
        name
        for name, container in layers.items()
        if container in containers and (times[name] == 1 or _has_tensors(module, name))
    ]
    called = [name for name in calls if times[name] == 1 or _has_tensors(module, name)]
    return called if sorted(called) == sorted(wanted) else []


def _calls(
    module: nn.Module, layers: Mapping[str, str], example: Example, with_values: bool
) -> tuple[bool, list[str]]:
    """Whether the example ends without an error, and the layers that it calls, in order."""
    calls: list[str] = []
    tensors = list(chain(module.parameters(), module.buffers()))
    if with_values and any(tensor.is_meta for tensor in tensors):
        return False, calls
    mode = None if with_values else fake_mode()
    arguments: Any = example.args, dict(example.kwargs)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng([]), torch.no_grad():
            warnings.simplefilter("ignore")  # What the copy warns of, the module will warn of.
            memo = {} if mode is None else {id(each): mode.from_tensor(each) for each in tensors}
            copied = copy.deepcopy(module, memo)
            for name in layers:
                copied.get_submodule(name).register_forward_pre_hook(
                    lambda *_, name=name: calls.append(name)
                )
            for name in ("log", "log_dict"):
                setattr(copied, name, lambda *_, **__: None)
            if mode is not None:
                arguments = tree_map_only(Tensor, mode.from_tensor, arguments)
            # Compiled layers would be compiled for fake tensors. What this imports must not see
            # the mode.
            with torch.compiler.set_stance("force_eager"), mode or nullcontext(), example.context():
                getattr(copied, example.method)(*arguments[0], **arguments[1])
    except Exception:  # The user's code may raise anything.
        _log.debug("A call ended after %d layers", len(calls), exc_info=True)
        return False, calls
    return True, calls


def _has_tensors(module: nn.Module, name: str) -> bool:
    layer = module.get_submodule(name)
    return any(True for _ in chain(layer.parameters(), layer.buffers()))


def _has_state(layer: nn.Module) -> bool:
    """Whether a layer has tensors or hooks, so that it cannot be on several stages."""
    parts = list(layer.modules())
    hooks = (part._forward_hooks or part._forward_pre_hooks for part in parts)
    return any(hooks) or any(True for _ in chain(layer.parameters(), layer.buffers()))


class Partition(NamedTuple):
    """Which layers of a module each stage computes.

    Attributes:
        names: the layers' names in the module.
        layers: the layers, in order.
        parts: the layer indices of each stage.
        costs: number of parameters of each layer.
        given: whether the user gave the number of layers of each stage.
    """

    names: list[str]
    layers: list[nn.Module]
    parts: list[range]
    costs: Sequence[int]
    given: bool = False

    def with_stages(self, stages: int) -> Partition:
        """Partition the same layers into fewer stages; parts that the user gave are joined.

        Args:
            stages: a divisor of the present number of stages.
        """
        joined = len(self.parts) // stages
        if self.given:
            firsts, lasts = self.parts[::joined], self.parts[joined - 1 :: joined]
            parts = [range(a.start, b.stop) for a, b in zip(firsts, lasts, strict=True)]
        else:
            parts = balance(self.costs, stages)
        return self._replace(parts=parts)

    def __str__(self) -> str:
        """The number of layers of each stage, and how unequal they are."""
        sizes = " + ".join(str(len(part)) for part in self.parts)
        worst = imbalance(self.costs, self.parts)
        return (
            f"layers {self.names[0]!r} to {self.names[-1]!r} in {sizes}, "
            f"the largest stage with {worst:.2f} times the mean stage's parameters"
        )


class UnknownOrderError(MisconfigurationException):
    """The order in which a step calls several containers, or modules, is not known."""


UNPARTITIONED = Partition([], [], [range(0)], [])
"""One stage, which computes the module as it is."""


def partition_layers(
    module: nn.Module,
    pipeline: str | Sequence[str] | None,
    sizes: Sequence[int] | None,
    stages: int,
    call_order: CallOrder = order_of_example,
) -> Partition:
    """Partition the layers of a module into stages.

    Raises:
        MisconfigurationException: if there are no such layers, or not enough.
    """
    found = find_layers(module, pipeline, stages, call_order)
    names, layers = list(found), list(found.values())
    counts = count_parameters(layers)
    parts = balance(counts, stages) if sizes is None else parts_of_sizes(sizes, len(layers), stages)
    return Partition(names, layers, parts, counts, given=sizes is not None)


def find_layers(
    module: nn.Module,
    pipeline: str | Sequence[str] | None,
    stages: int,
    call_order: CallOrder = order_of_example,
) -> dict[str, nn.Module]:
    """Find the layers that are partitioned into stages.

    Args:
        module: the user's module.
        pipeline: attribute path of the ``nn.Sequential`` or ``nn.ModuleList`` that holds the
            layers, or lists of layers; several of them, and of other modules, each of which is a
            layer, in the order in which a step calls them; or None for the only candidate, an
            outermost container that holds parameters in at least two layers, or for the layers of
            several in the order of their calls.
        stages: number of stages to fill, each with at least one layer.
        call_order: finds the order in which some layers, by the container of each, are called.

    Returns:
        The layers by name, in order.

    Raises:
        UnknownOrderError: if there are several candidates, or none but several modules, in an order
            that is not known.
        MisconfigurationException: if a path names nothing, if there is no candidate, if a layer
            stands there twice, or if there are fewer layers than stages.
    """
    given = [pipeline] if isinstance(pipeline, str) else pipeline
    paths = list(_candidates(module) if given is None else given)
    if not paths:
        raise _no_candidate(module, call_order)
    found = [(name, path, layer) for path in paths for name, layer in _layers_at(module, path)]
    if isinstance(pipeline, str) and [name for name, _, _ in found] == paths:
        raise MisconfigurationException(
            _no_container(module, pipeline, type(found[0][2]).__name__) + see("layers")
        )
    where = ", ".join(map(repr, paths))
    if any(a != b and a.startswith(f"{b}.") for a in paths for b in paths):
        raise MisconfigurationException(
            f"pipeline=[{where}] names a module and a part of it. Name the parts alone."
            + see("layers")
        )
    layers = {name: layer for name, _, layer in found}
    times = Counter(layer for _, _, layer in found)
    if len(layers) < len(found) or any(n > 1 and _has_state(each) for each, n in times.items()):
        raise MisconfigurationException(
            f"{where} holds one layer object several times, with parameters, buffers or hooks. "
            "Stages own whole layers, so give each position its own layer; parameters may be "
            "shared between them." + see("layers")
        )
    chooses = given is None and len(paths) > 1
    if chooses or any(name.count(".") > path.count(".") + 1 for name, path, _ in found):
        order = call_order(module, {name: path for name, path, _ in found})
        called = {path for name, path, _ in found if name in order}
        if called == set(paths) or (called and chooses):
            layers = {name: layers[name] for name in order}
        elif chooses:
            raise UnknownOrderError(_ambiguous(module, _candidates(module), stages) + see("layers"))
    if len(layers) < stages:
        raise MisconfigurationException(
            f"g_inter={stages} stages need at least as many layers, but {where} has {len(layers)}. "
            f"Choose g_inter <= {len(layers)}." + see("layers")
        )
    return layers


def _layers_at(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """The layers of the container at an attribute path, or the module there as the only one."""
    found = dict(module.named_modules()).get(path)
    if found is None or not path:
        raise MisconfigurationException(_no_container(module, path, "nothing") + see("layers"))
    if isinstance(found, (nn.Sequential, nn.ModuleList)):
        return list(_layers_in(path, found))
    return [(path, found)]


def _layers_in(path: str, container: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers of a container; those of lists in it, which cannot be called, one by one."""
    for key, layer in container.named_modules(remove_duplicate=False):
        if not key or "." in key:
            continue
        if isinstance(layer, (nn.ModuleList, nn.ModuleDict)):
            yield from _layers_in(f"{path}.{key}", layer)
        else:
            yield f"{path}.{key}", layer


def _no_container(module: nn.Module, path: str, found: str) -> str:
    return (
        f"pipeline={path!r} must name an nn.Sequential or nn.ModuleList of the module, but there "
        f"is {found}. Candidates: {_listed(_candidates(module))}. A list may name other modules, "
        "too: pipeline=['stem', 'layers']."
    )


def _candidates(module: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        inside_other = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(child, (nn.Sequential, nn.ModuleList)) and name and not inside_other:
            layers = (layer for _, layer in _layers_in(name, child))
            if sum(any(True for _ in layer.parameters()) for layer in layers) >= 2:
                found[name] = child
    return found


def _listed(candidates: dict[str, nn.Module]) -> str:
    rows = [f"{name!r} ({len(list(_layers_in(name, c)))} layers)" for name, c in candidates.items()]
    return ", ".join(rows) or "none"


def _no_candidate(module: nn.Module, call_order: CallOrder) -> MisconfigurationException:
    children = _children_with_parameters(module)
    order = call_order(module, {name: name for name in children}) if len(children) > 1 else []
    # Ranks find the order by their loaders, where it is not known before they start.
    kind = UnknownOrderError if len(children) > 1 and not order else MisconfigurationException
    remedy = (
        f"Name its modules in the order in which a step calls them: pipeline={order}"
        if order
        else "Put the layers of the network into one"
    )
    return kind(
        "No nn.Sequential or nn.ModuleList with at least two layers that hold parameters was "
        f"found, so there is nothing to partition into stages. {remedy}, or use g_inter=1."
        + see("layers")
    )


def _children_with_parameters(module: nn.Module, path: str = "") -> list[str]:
    """The names of a module's children that have parameters; of an only child, its children."""
    found = [
        (f"{path}{name}", child)
        for name, child in module.named_children()
        if any(True for _ in child.parameters())
    ]
    if len(found) == 1:
        only, child = found[0]
        return _children_with_parameters(child, f"{only}.")
    return [name for name, _ in found]


def _ambiguous(module: nn.Module, candidates: dict[str, nn.Module], stages: int) -> str:
    total = sum(count_parameters([module]))

    def most_on_a_stage(path: str) -> float:
        counts = count_parameters([layer for _, layer in _layers_in(path, candidates[path])])
        parts = balance(counts, min(stages, len(counts)))
        return total - sum(counts) + max(sum(counts[layer] for layer in part) for part in parts)

    return (
        f"Several containers could be pipelined: {_listed(candidates)}. Name one: "
        f"AxoSparseStrategy(pipeline={min(candidates, key=most_on_a_stage)!r}, ...) leaves the "
        "least parameters to a stage. Or name several, in the order in which a step calls them: "
        f"pipeline={list(candidates)}. The order is found where a step calls each layer once, with "
        "a batch of the loader or, by `forward`, with the module's `example_input_array`."
    )


def count_parameters(layers: Sequence[nn.Module]) -> list[int]:
    """Count the parameters of each layer; a shared one counts where it stands first."""
    seen: set[nn.Parameter] = set()
    counts = []
    for layer in layers:
        fresh = [p for p in layer.parameters() if p not in seen]
        seen.update(fresh)
        counts.append(sum(p.numel() for p in fresh))
    return counts


def balance(costs: Sequence[float], stages: int) -> list[range]:
    """Partition layers so that the largest cost of a stage is as small as possible.

    Exact, by dynamic programming over the boundaries; among the best partitions, the one with the
    smallest sum of squared costs, so that equal layers are distributed evenly. Every stage gets at
    least one layer.

    Returns:
        The layer indices of each stage.
    """
    sums = list(accumulate(map(float, costs), initial=0.0))

    @cache
    def best(part: int, end: int) -> tuple[float, float, int]:
        """The largest cost, the sum of squares and the last boundary for the first layers."""
        if part == 0:
            return (inf, inf, 0) if end else (0.0, 0.0, 0)
        least = inf, inf, 0
        for start in reversed(range(part - 1, end)):
            cost = sums[end] - sums[start]
            if cost > least[0]:
                break  # A stage of more layers costs no less.
            largest, squares, _ = best(part - 1, start)
            least = min(least, (max(largest, cost), squares + cost**2, start))
        return least

    ends = [len(costs)]
    for part in range(stages, 0, -1):
        ends.append(best(part, ends[-1])[2])
    return [range(first, end) for end, first in pairwise(ends)][::-1]


def imbalance(costs: Sequence[float], parts: Sequence[range]) -> float:
    """The largest cost of a stage over the mean cost: 1.0 where all are equal."""
    totals = [sum(costs[layer] for layer in part) for part in parts]
    mean = sum(totals) / len(totals)
    return max(totals) / mean if mean else 1.0


def parts_of_sizes(sizes: Sequence[int], layers: int, stages: int) -> list[range]:
    """The layer indices of each stage, from the numbers of layers that a user gives.

    Raises:
        MisconfigurationException: if there is not one positive size a stage or they do not add up.
    """
    if len(sizes) != stages or min(sizes) < 1 or sum(sizes) != layers:
        raise MisconfigurationException(
            f"balance={list(sizes)} must give each of the {stages} stages at least one of the "
            f"{layers} layers and use all of them; it has {len(sizes)} entries with sum "
            f"{sum(sizes)}." + see("layers")
        )
    return [range(first, end) for first, end in pairwise(accumulate(sizes, initial=0))]
