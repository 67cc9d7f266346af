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
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_axosparse.support.torch_internals import fake_mode, tree_map_only
from lightning_axosparse.support.troubleshooting import see

_log = logging.getLogger(__name__)

CallOrder = Callable[[nn.Module, Mapping[str, str]], "list[str]"]
"""A function that finds the order in which layers are called, such as :func:`order_of_example`."""


class ExampleCall(NamedTuple):
    """A call of a method that calls the layers, to find their order.

    Attributes:
        method: name of a method of the module.
        args: its arguments.
        kwargs: its keyword arguments.
        context: returns the context in which it runs.
    """

    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def order_of_example(module: nn.Module, layers: Mapping[str, str]) -> list[str]:
    """Find the order in which ``forward`` calls layers with the module's ``example_input_array``.

    Returns:
        As :func:`called_in_order`.
    """
    example = getattr(module, "example_input_array", None)
    if example is None:
        return []
    if isinstance(example, Mapping):
        return called_in_order(module, layers, ExampleCall("__call__", (), example))
    args = example if isinstance(example, tuple) else (example,)
    return called_in_order(module, layers, ExampleCall("__call__", args))


def called_in_order(
    module: nn.Module, layers: Mapping[str, str], example: ExampleCall
) -> list[str]:
    """Find the order in which an example calls layers.

    A copy of the module with fake tensors is called. An error does not matter if all containers
    have been called before it, as where a loss needs values. If some have not, as where torch
    checks for a causal mask, a copy with values is called.

    Args:
        module: the module.
        layers: the names of the layers, and the container of each.
        example: the call.

    Returns:
        All layers of the containers that are called at all, without those that have no tensors and
        are not called exactly once. A container with another layer that is not called exactly once
        is left out, if a larger one is not. An empty list if none is left, or if it is not known
        whether a container is called.
    """
    calls = list[str]()
    for with_values in (False, True):
        with isolate_rng():
            succeeded, calls = _record_calls(module, layers, example, with_values)
        containers = {layers[name] for name in calls}
        if succeeded or containers == {*layers.values()}:
            break
    else:
        return []
    times = Counter(calls)
    counted = {
        name for name in layers if times[name] == 1 or _has_tensors(module.get_submodule(name))
    }
    others = {layers[name] for name in counted if times[name] != 1} & containers

    def size(container: str) -> int:
        names = [name for name, other in layers.items() if other == container]
        return sum(count_parameters([module.get_submodule(name) for name in names]))

    kept = containers - others
    if max(map(size, others), default=-1) >= max(map(size, kept), default=0):
        return []
    if others:
        rank_zero_info(
            f"The layers of {', '.join(map(repr, sorted(others)))} are not called once each, so "
            "they are no part of the stages. pipeline= names the containers that are."
        )
    return [name for name in calls if name in counted and layers[name] in kept]


def _record_calls(
    module: nn.Module, layers: Mapping[str, str], example: ExampleCall, with_values: bool
) -> tuple[bool, list[str]]:
    """Return whether the example raises no error, and the layers that it calls, in order."""
    calls: list[str] = []
    tensors = list(chain(module.parameters(), module.buffers()))
    if with_values and any(tensor.is_meta for tensor in tensors):
        return False, calls
    mode = None if with_values else fake_mode()
    arguments: Any = example.args, dict(example.kwargs)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # The module will warn again.
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
            # Compiled layers would be compiled for fake tensors. `set_stance` is entered first, as
            # the modules that it imports must not see the mode.
            with torch.compiler.set_stance("force_eager"), mode or nullcontext(), example.context():
                getattr(copied, example.method)(*arguments[0], **arguments[1])
    except Exception:  # The user's code may raise anything.
        _log.debug("A call ended after %d layers", len(calls), exc_info=True)
        return False, calls
    return True, calls


def _has_tensors(layer: nn.Module) -> bool:
    return any(True for _ in chain(layer.parameters(), layer.buffers()))


def _has_state(layer: nn.Module) -> bool:
    """Whether a layer has tensors or hooks, so that it cannot be on several stages."""
    hooks = (part._forward_hooks or part._forward_pre_hooks for part in layer.modules())
    return any(hooks) or _has_tensors(layer)


class Partition(NamedTuple):
    """The assignment of the layers of a module to stages.

    Attributes:
        names: the layers' names in the module.
        layers: the layers, in order.
        parts: the layer indices of each stage.
        costs: the number of parameters of each layer.
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
        """Return the number of layers of each stage, and the ratio of largest to mean cost."""
        sizes = " + ".join(str(len(part)) for part in self.parts)
        worst = imbalance(self.costs, self.parts)
        return (
            f"layers {self.names[0]!r} to {self.names[-1]!r} in {sizes}, "
            f"the largest stage with {worst:.2f} times the mean stage's parameters"
        )


class UnknownOrderError(MisconfigurationException):
    """The order in which a step calls several containers or modules is not known."""


UNPARTITIONED = Partition([], [], [range(0)], [])
"""One stage, which computes the whole module."""


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
    layers = find_layers(module, pipeline, stages, call_order)
    counts = count_parameters([*layers.values()])
    parts = balance(counts, stages) if sizes is None else parts_of_sizes(sizes, len(layers), stages)
    given = sizes is not None
    return Partition([*layers], [*layers.values()], parts, counts, given)


def find_layers(
    module: nn.Module,
    pipeline: str | Sequence[str] | None,
    stages: int,
    call_order: CallOrder = order_of_example,
) -> dict[str, nn.Module]:
    """Find the layers that are partitioned into stages.

    Args:
        module: the user's module.
        pipeline: attribute path of the ``nn.Sequential`` or ``nn.ModuleList`` that has the layers,
            or lists of layers; or a list of paths, of containers and of modules that are one layer
            each, in the order in which a step calls them. None takes the only candidate: an
            outermost container with parameters in at least two layers; or the layers of several
            candidates, in the order of their calls.
        stages: number of stages, each with at least one layer.
        call_order: finds the order in which layers are called.

    Returns:
        The layers by name, in order.

    Raises:
        UnknownOrderError: if there are several candidates, or only several modules, in an unknown
            order.
        MisconfigurationException: if a path names no module, if there is no candidate, if a layer
            occurs twice, or if there are fewer layers than stages.
    """
    given = [pipeline] if isinstance(pipeline, str) else pipeline
    paths = list(_candidates(module) if given is None else given)
    if not paths:
        raise _no_candidate(module, call_order)
    named = [(name, path, layer) for path in paths for name, layer in _layers_at(module, path)]
    if isinstance(pipeline, str) and [name for name, _, _ in named] == paths:
        raise MisconfigurationException(
            _no_container(module, pipeline, type(named[0][2]).__name__) + see("layers")
        )
    _validate_distinct(paths, named)
    layers = {name: layer for name, _, layer in named}
    must_order = given is None and len(paths) > 1
    if must_order or any(name.count(".") > path.count(".") + 1 for name, path, _ in named):
        order = call_order(module, {name: path for name, path, _ in named})
        called = {path for name, path, _ in named if name in order}
        if called == set(paths) or (called and must_order):
            layers = {name: layers[name] for name in order}
        elif must_order:
            raise UnknownOrderError(_ambiguous(module, _candidates(module), stages) + see("layers"))
    if len(layers) < stages:
        found = dict.fromkeys(path for name, path, _ in named if name in layers)
        where = ", ".join(map(repr, found or paths))
        which = ", which the step calls," if len(found) < len(paths) else ""
        raise MisconfigurationException(
            f"g_inter={stages} stages need at least as many layers, but {where}{which} has "
            f"{len(layers)}. Choose g_inter <= {len(layers)}." + see("layers")
        )
    return layers


def _validate_distinct(paths: Sequence[str], layers: Sequence[tuple[str, str, nn.Module]]) -> None:
    """Check that no layer (name, path, layer) occurs twice, except one without tensors or hooks."""
    where = ", ".join(map(repr, paths))
    if any(a != b and a.startswith(f"{b}.") for a in paths for b in paths):
        raise MisconfigurationException(
            f"pipeline=[{where}] names a module and a part of it. Name the parts alone."
            + see("layers")
        )
    names = {name for name, _, _ in layers}
    times = Counter(layer for _, _, layer in layers)
    if len(names) < len(layers) or any(n > 1 and _has_state(each) for each, n in times.items()):
        raise MisconfigurationException(
            f"{where} holds one layer object several times, with parameters, buffers or hooks. "
            "Stages own whole layers, so give each position its own layer; parameters may be "
            "shared between them." + see("layers")
        )


def _layers_at(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """Return the layers of the container at a path; if it is another module, the module itself."""
    submodule = dict(module.named_modules()).get(path)
    if submodule is None or not path:
        raise MisconfigurationException(_no_container(module, path, "nothing") + see("layers"))
    if isinstance(submodule, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return list(_layers_in(path, submodule))
    return [(path, submodule)]


def _layers_in(path: str, container: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of a container; those of lists in it, which cannot be called, one by one."""
    for key, layer in container.named_modules(remove_duplicate=False):
        if not key or "." in key:
            continue
        if isinstance(layer, (nn.ModuleList, nn.ModuleDict)):
            yield from _layers_in(f"{path}.{key}", layer)
        else:
            yield f"{path}.{key}", layer


def _no_container(module: nn.Module, path: str, actual: str) -> str:
    return (
        f"pipeline={path!r} must name an nn.Sequential or nn.ModuleList of the module, but there "
        f"is {actual}. Candidates: {_listed(_candidates(module))}. A list may name other modules, "
        "too: pipeline=['stem', 'layers']."
    )


def _candidates(module: nn.Module) -> dict[str, nn.Module]:
    candidates: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        inside_other = any(name.startswith(f"{outer}.") for outer in candidates)
        if isinstance(child, (nn.Sequential, nn.ModuleList)) and name and not inside_other:
            layers = (layer for _, layer in _layers_in(name, child))
            if sum(any(True for _ in layer.parameters()) for layer in layers) >= 2:
                candidates[name] = child
    return candidates


def _listed(candidates: dict[str, nn.Module]) -> str:
    rows = [f"{name!r} ({len(list(_layers_in(name, c)))} layers)" for name, c in candidates.items()]
    return ", ".join(rows) or "none"


def _no_candidate(module: nn.Module, call_order: CallOrder) -> MisconfigurationException:
    children = _children_with_parameters(module)
    order = call_order(module, {name: name for name in children}) if len(children) > 1 else []
    # If the order is not known before the ranks start, they find it with a batch of the loader.
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
    """Return the names of a module's children with parameters; of an only child, its children."""
    children = [
        (f"{path}{name}", child)
        for name, child in module.named_children()
        if any(True for _ in child.parameters())
    ]
    if len(children) == 1:
        only, child = children[0]
        return _children_with_parameters(child, f"{only}.")
    parts = (
        _layers_in(name, child) if isinstance(child, nn.ModuleDict) else [(name, child)]
        for name, child in children  # A dict cannot be called.
    )
    return [name for each in parts for name, _ in each]


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
        f"pipeline={list(candidates)}. The order is found where a step calls each layer of the "
        "largest once, with a batch of the loader or, by `forward`, with the module's "
        "`example_input_array`."
    )


def _is_lazy(part: nn.Module) -> bool:
    return any(map(is_lazy, part.parameters(recurse=False)))


def count_parameters(layers: Sequence[nn.Module]) -> list[int]:
    """Count the parameters of each layer; a shared one counts in the first layer that has it.

    Raises:
        MisconfigurationException: if a parameter has no shape yet.
    """
    lazy = next((part for layer in layers for part in layer.modules() if _is_lazy(part)), None)
    if lazy is not None:
        raise MisconfigurationException(
            f"A {type(lazy).__name__} of the layers has no shape before it is called, so they "
            "cannot be dealt to stages: give it its sizes, or call the module once before fit."
            + see("layers")
        )
    seen: set[nn.Parameter] = set()
    counts = []
    for layer in layers:
        unseen = [p for p in layer.parameters() if p not in seen]
        seen.update(unseen)
        counts.append(sum(p.numel() for p in unseen))
    return counts


def balance(costs: Sequence[float], stages: int) -> list[range]:
    """Partition layers so that the largest cost of a stage is as small as possible.

    The result is exact, by dynamic programming over the boundaries. Among the best partitions it is
    the one with the smallest sum of squared costs, so that equal layers are distributed evenly:
    costs 1, 1, 1, 3 over three stages give 1 + 2 + 1 layers, with costs 1, 2 and 3. Every stage
    gets at least one layer.

    Returns:
        The layer indices of each stage.
    """
    sums = list(accumulate(map(float, costs), initial=0.0))

    @cache
    def best(part: int, end: int) -> tuple[float, float, int]:
        """Return the largest cost, the sum of squares and the last boundary of the first layers."""
        if part == 0:
            return (inf, inf, 0) if end else (0.0, 0.0, 0)
        least = inf, inf, 0
        for start in reversed(range(part - 1, end)):
            cost = sums[end] - sums[start]
            if cost > least[0]:
                break  # A stage with more layers costs at least as much.
            largest, squares, _ = best(part - 1, start)
            least = min(least, (max(largest, cost), squares + cost**2, start))
        return least

    ends = [len(costs)]
    for part in range(stages, 0, -1):
        ends.append(best(part, ends[-1])[2])
    return [range(first, end) for end, first in pairwise(ends)][::-1]


def imbalance(costs: Sequence[float], parts: Sequence[range]) -> float:
    """Return the largest cost of a stage over the mean cost: 1.0 if all are equal."""
    totals = [sum(costs[layer] for layer in part) for part in parts]
    mean = sum(totals) / len(totals)
    return max(totals) / mean if mean else 1.0


def parts_of_sizes(sizes: Sequence[int], layers: int, stages: int) -> list[range]:
    """Return the layer indices of each stage, from the numbers of layers that a user gives.

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
