"""Spreads the experts of a mixture over the ranks of a group, and sends them their tokens.

Modules are spread whose ``forward`` takes ``hidden_states``, ``top_k_index`` and
``top_k_weights``, as those of transformers from version 5 (GPT-OSS has other names). Their experts
lie along the first dimension of each of their parameters, or are the modules of an
``nn.ModuleList``. Each rank keeps some of them, calls the module's own ``forward`` with the tokens
of these, from all ranks, and sends the results back.

PEFT (``LoraConfig(target_parameters=...)``) wraps such a module in one with the same ``forward``.
Each rank stores the adapters of its experts, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_axosparse.distributed.token_exchange import TokenExchange
from lightning_axosparse.sparse.module.parameters import OwnedParameter, owned_parameters
from lightning_axosparse.strategy.config import Experts
from lightning_axosparse.strategy.weight_parts import SplitParameter, hugging_face_plans, matches
from lightning_axosparse.support.patched import Forward, patched, replaced_forward
from lightning_axosparse.support.torch_internals import with_gradient_hooks
from lightning_axosparse.support.troubleshooting import see

_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]
_OF_GPT_OSS = ["hidden_states", "router_indices", "routing_weights"]


@dataclass(frozen=True)
class ExpertLayer:
    """A module with experts.

    Attributes:
        path: its name.
        module: the module, with PEFT's wrappers.
        expert_list: the list of its experts; None if they are slices of its parameters.
    """

    path: str
    module: nn.Module
    expert_list: nn.ModuleList | None

    @property
    def nested_modules(self) -> list[nn.Module]:
        """PEFT's wrappers, the outermost first, and the module that has the experts."""
        modules = [self.module]
        while isinstance(inner := getattr(modules[-1], "base_layer", None), nn.Module):
            modules.append(inner)
        return modules

    @property
    def expert_count(self) -> int:
        """The number of experts."""
        if self.expert_list is not None:
            return len(self.expert_list)
        own = (e for e in owned_parameters(self.nested_modules[-1]) if "." not in e.names[0])
        return next((entry.shape[0] for entry in own if entry.shape), 0)

    def split_sizes(self, ranks: int) -> Iterator[tuple[str, int, list[int]]]:
        """Yield how a number of ranks split the experts' parameters.

        For example, for 4 experts on 2 ranks, a parameter with slices of 3 rows has sizes (6, 6).
        With experts in a list, one with 3 rows has sizes (3, 0) if it belongs to expert 0 or 1.

        Yields:
            The name of a parameter, and the dimension and sizes for :class:`SplitParameter`.
        """
        per_rank = self.expert_count // ranks
        if self.expert_list is None:
            for entry in owned_parameters(self.module):
                dimension, length = _slice(entry, self.expert_count) or (0, 0)
                yield f"{self.path}.{entry.names[0]}", dimension, [per_rank * length] * ranks
            return
        names = {part: name for name, part in self.module.named_modules()}
        where = names[self.expert_list]
        for number, expert in enumerate(self.expert_list):
            path = ".".join(filter(None, (self.path, where, str(number))))
            for entry in owned_parameters(expert):
                rows = sum(entry.shape[:1])
                sizes = [rows if rank == number // per_rank else 0 for rank in range(ranks)]
                yield f"{path}.{entry.names[0]}", 0, sizes

    @property
    def count_attributes(self) -> list[tuple[nn.Module, str]]:
        """The modules and attributes that have the number of experts."""
        return [
            (module, name)
            for module in self.nested_modules
            for name, value in vars(module).items()
            if "expert" in name and type(value) is int and value == self.expert_count
        ]

    def forward(
        self,
        exchange: TokenExchange,
        own: Forward,
        *arguments: Tensor,
        **named: Tensor,
    ) -> Tensor:
        """Compute tokens by the experts of all ranks, in place of the module's ``own`` forward."""
        order = _ARGUMENTS if "top_k_index" in named or "top_k_weights" in named else _OF_GPT_OSS
        arguments += tuple(named[name] for name in order if name in named)
        tokens, chosen, weights = (each.flatten(0, -2) for each in arguments)
        result = exchange(tokens, chosen, weights, partial(self._compute, exchange.own, own))
        return result.view_as(arguments[0])

    def _compute(
        self,
        experts: range,
        own: Forward,
        rows: Tensor,
        numbers: Tensor,
        weights: Tensor,
        any_tokens: bool,
    ) -> Tensor:
        """Compute rows by the experts of this rank, whose numbers begin at 0."""
        if self.expert_list is not None:
            # The list has all experts, but those of other ranks get no tokens.
            numbers = numbers + experts.start
            return own(rows, numbers[:, None], weights[:, None])  # type: ignore[no-any-return]
        if any_tokens and not len(rows):
            # Of a parameter whose other experts have tokens the gradient is zero, and not None.
            trained = [p for p in self.module.parameters() if p.requires_grad]
            return rows + sum(p[:0].sum() for p in trained)
        with ExitStack() as stack:
            for owner, name in self.count_attributes:
                stack.enter_context(patched(owner, name, len(experts)))
            return own(rows, numbers[:, None], weights[:, None])  # type: ignore[no-any-return]


def expert_layers(module: nn.Module, experts: Experts, ranks: int) -> list[ExpertLayer]:
    """Find the modules with experts that are spread over a number of ranks.

    Raises:
        MisconfigurationException: if there is none, or one cannot be spread over them.
    """
    patterns = [experts] if isinstance(experts, str) else list(experts)
    if experts == "auto":
        patterns = [
            f"{path}.{name}".lstrip(".")
            for path, _, plan in hugging_face_plans(module, "ep_plan")
            for name, style in plan.items()
            if style == "ep_dispatch_experts"
        ]
    layers = [
        _expert_layer(path, part)
        for path, part in module.named_modules()
        if any(matches(path, pattern) for pattern in patterns)
    ]
    if not layers:
        reason = (
            "no Hugging Face module in it has a plan for experts"
            if experts == "auto"
            else f"it has no module {', '.join(map(repr, patterns))}"
        )
        raise MisconfigurationException(
            f"expert_parallel spreads the experts of {type(module).__name__}, but {reason}. Give "
            f"ExpertParallel({ranks}, 'model.layers.*.mlp.experts'), a pattern of the names of the "
            f"modules whose `forward` takes {', '.join(_ARGUMENTS)}." + see("expert-parallel")
        )
    for layer in layers:
        if layer.expert_count % ranks:
            raise MisconfigurationException(
                f"{layer.path!r} has {layer.expert_count} experts, which expert_parallel={ranks} "
                "does not divide. Choose another number of ranks." + see("expert-parallel")
            )
        if layer.expert_count == ranks and len(layer.nested_modules) > 1:
            raise MisconfigurationException(
                f"With expert_parallel={ranks} each rank has one of {layer.expert_count} experts "
                f"of {layer.path!r}, but PEFT adapts parameters of several in another way than "
                "those of one. Choose fewer ranks." + see("expert-parallel")
            )
    return layers


def _expert_layer(path: str, module: nn.Module) -> ExpertLayer:
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    layer = ExpertLayer(path, module, lists[0] if lists else None)
    arguments = list(signature(layer.nested_modules[-1].forward).parameters)
    reason = None
    if arguments not in (_ARGUMENTS, _OF_GPT_OSS):
        reason = f"its `forward` takes {', '.join(arguments) or 'nothing'}"
    elif layer.expert_count == 0:
        reason = "it has neither parameters of its own nor an nn.ModuleList of experts"
    elif layer.expert_list is None:
        others = [
            e.names[0] for e in owned_parameters(module) if _slice(e, layer.expert_count) is None
        ]
        if others:
            reason = f"{others[0]!r} has no slice for each of {layer.expert_count} experts"
    if reason is not None:
        raise MisconfigurationException(
            f"The experts of {path!r} ({type(module).__name__}) cannot be spread: {reason}. Its "
            f"`forward` has to take {', '.join(_ARGUMENTS)}, and its experts have to be slices of "
            "all of its parameters along dimension 0, or modules of one nn.ModuleList."
            + see("expert-parallel")
        )
    return layer


def _slice(entry: OwnedParameter, experts: int) -> tuple[int, int] | None:
    """Return the dimension along which experts have slices of a parameter, and their length.

    PEFT's first factor, ``lora_A``, has the rows of one expert after those of another. Its second
    factor, ``lora_B``, has a block of columns for each rank of the adapter, with one column for
    each expert. For two experts and rank 2 the columns belong to experts 0, 1, 0 and 1.
    """
    words, shape = entry.names[0].split("."), entry.shape
    if "lora_B" in words:
        return (1, 1) if shape[1] % experts == 0 else None
    is_own = all(word == "base_layer" for word in words[:-1])
    if "lora_A" in words or (is_own and shape[:1] == (experts,)):
        return 0, shape[0] // experts
    return None


class SpreadExperts:
    """The experts of a module that are spread over the ranks of a group.

    The ranks of ``tensor_group`` have the same tokens and experts as this one.
    """

    def __init__(
        self,
        module: nn.Module,
        experts: Experts,
        group: dist.ProcessGroup,
        tensor_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.group = group
        self._layers = [
            (layer, TokenExchange(group, layer.expert_count, tensor_group))
            for layer in expert_layers(module, experts, group.size())
        ]

    def split_parameters(self, local: Mapping[str, OwnedParameter]) -> dict[str, SplitParameter]:
        """Return the parameters of this stage's experts; forget the experts of other stages."""
        splits: dict[str, SplitParameter] = {}
        own_layers = []
        for layer, exchange in self._layers:
            parameters = [each for each in layer.split_sizes(self.group.size()) if each[0] in local]
            for name, dimension, sizes in parameters:
                _validate(local[name])
                splits[name] = SplitParameter(local[name], dimension, sizes, self.group)
            if parameters:
                own_layers.append((layer, exchange))
        self._layers = own_layers
        return splits

    @contextmanager
    def reading_parts(self) -> Iterator[None]:
        """Let modules compute, with this rank's experts, the tokens of all ranks."""
        with ExitStack() as undo:
            for layer, exchange in self._layers:
                make = partial(partial, layer.forward, exchange)
                undo.enter_context(replaced_forward(layer.module, make))
                for number, expert in enumerate(layer.expert_list or ()):
                    if number not in exchange.own:
                        undo.enter_context(replaced_forward(expert, lambda _: _no_tokens))
            yield


def _no_tokens(tokens: Tensor, *_: Any, **__: Any) -> Tensor:
    """Replaces the ``forward`` of an expert of another rank, which gets no tokens here."""
    assert not len(tokens)
    return tokens


def _validate(entry: OwnedParameter) -> None:
    name = entry.names[0]
    reason = None
    if len(entry.names) > 1:
        reason = f"it is tied to {entry.names[1]!r}"
    elif not entry.shape:
        reason = "it is a scalar"
    elif with_gradient_hooks([entry.parameter]):
        reason = "it has a gradient hook, which would not see the gradient of all experts"
    if reason is not None:
        raise MisconfigurationException(
            f"{name!r} belongs to experts that expert_parallel spreads, but {reason}. Change "
            "that, or leave these experts out of ExpertParallel." + see("expert-parallel")
        )
