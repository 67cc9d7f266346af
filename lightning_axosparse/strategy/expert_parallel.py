"""Spreads the experts of a mixture over the ranks of a group, and sends them their tokens.

What is spread are modules whose ``forward`` takes ``hidden_states``, ``top_k_index`` and
``top_k_weights``, as those of transformers from version 5. Their experts lie along the first
dimension of each of their parameters, or are the modules of an ``nn.ModuleList``. Each rank keeps
some of them, calls the module's own ``forward`` with the tokens of these, from all ranks, and sends
the results back.

What PEFT adds to parameters of such a module (``LoraConfig(target_parameters=...)``) is a module
around it, which has the same ``forward``. Each rank keeps the adapters of its experts, too.
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
from lightning_axosparse.strategy.parallelism import Experts
from lightning_axosparse.strategy.weight_parts import SplitParameter, hugging_face_plans, matches
from lightning_axosparse.support.patched import Forward, patched, replaced_forward
from lightning_axosparse.support.torch_internals import with_gradient_hooks
from lightning_axosparse.support.troubleshooting import see

_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]


@dataclass(frozen=True)
class ExpertLayer:
    """A module with experts.

    Attributes:
        path: its name.
        module: the module, with what PEFT has put around it.
        listed: the list of its experts; None where they are slices of its parameters.
    """

    path: str
    module: nn.Module
    listed: nn.ModuleList | None

    @property
    def nested(self) -> list[nn.Module]:
        """The module that has the experts, and before it what is around it, outermost first."""
        found = [self.module]
        while isinstance(inner := getattr(found[-1], "base_layer", None), nn.Module):
            found.append(inner)
        return found

    @property
    def experts(self) -> int:
        """The number of experts."""
        if self.listed is not None:
            return len(self.listed)
        own = (e for e in owned_parameters(self.nested[-1]) if "." not in e.names[0])
        return next((entry.shape[0] for entry in own if entry.shape), 0)

    def parameters(self, ranks: int) -> Iterator[tuple[str, int, list[int]]]:
        """How so many ranks divide the experts' parameters.

        Yields:
            The name of one, and the dimension and sizes as for :class:`SplitParameter`.
        """
        own = self.experts // ranks
        if self.listed is None:
            for entry in owned_parameters(self.module):
                dimension, length = _slice(entry, self.experts) or (0, 0)
                yield f"{self.path}.{entry.names[0]}", dimension, [own * length] * ranks
            return
        where = next(name for name, part in self.module.named_modules() if part is self.listed)
        for number, expert in enumerate(self.listed):
            path = ".".join(filter(None, (self.path, where, str(number))))
            for entry in owned_parameters(expert):
                rows = sum(entry.shape[:1])
                sizes = [rows if rank == number // own else 0 for rank in range(ranks)]
                yield f"{path}.{entry.names[0]}", 0, sizes

    @property
    def counts(self) -> list[tuple[nn.Module, str]]:
        """The attributes in which the module, and what is around it, keep the number of experts."""
        found = ((each, k, v) for each in self.nested for k, v in vars(each).items())
        return [
            (each, k)
            for each, k, v in found
            if "expert" in k and type(v) is int and v == self.experts
        ]

    def forward(
        self,
        exchange: TokenExchange,
        own: Forward,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
    ) -> Tensor:
        """Compute tokens by the experts of all ranks, in place of the module's ``own`` forward."""
        tokens, chosen = hidden_states.flatten(0, -2), top_k_index.flatten(0, -2)
        compute = partial(self._compute, exchange.own, own)
        result = exchange(tokens, chosen, top_k_weights.flatten(0, -2), compute)
        return result.view_as(hidden_states)

    def _compute(
        self,
        experts: range,
        own: Forward,
        rows: Tensor,
        numbers: Tensor,
        weights: Tensor,
        any_tokens: bool,
    ) -> Tensor:
        """Compute rows by the experts of this rank, to which their numbers refer."""
        if self.listed is not None:
            # The list has all experts, of which those of other ranks get no token.
            numbers = numbers + experts.start
            return own(rows, numbers[:, None], weights[:, None])  # type: ignore[no-any-return]
        if not len(rows):
            # Of a parameter whose other experts have tokens the gradient is zero, and not None.
            trained = [p for p in self.module.parameters() if p.requires_grad and any_tokens]
            return rows + sum(p[:0].sum() for p in trained)
        with ExitStack() as fewer:
            for owner, name in self.counts:
                fewer.enter_context(patched(owner, name, len(experts)))
            return own(rows, numbers[:, None], weights[:, None])  # type: ignore[no-any-return]


def expert_layers(module: nn.Module, experts: Experts, ranks: int) -> list[ExpertLayer]:
    """The modules with experts that are spread over so many ranks.

    Raises:
        MisconfigurationException: where there is none, or one cannot be spread over them.
    """
    patterns = [experts] if isinstance(experts, str) else list(experts)
    if experts == "auto":
        patterns = [
            f"{path}.{name}".lstrip(".")
            for path, _, plan in hugging_face_plans(module, "ep_plan")
            for name, style in plan.items()
            if style == "ep_dispatch_experts"
        ]
    found = [
        _layer(path, part)
        for path, part in module.named_modules()
        if any(matches(path, pattern) for pattern in patterns)
    ]
    if not found:
        how = (
            "no Hugging Face module in it has a plan for experts"
            if experts == "auto"
            else (f"it has no module {', '.join(map(repr, patterns))}")
        )
        raise MisconfigurationException(
            f"expert_parallel spreads the experts of {type(module).__name__}, but {how}. Give "
            f"ExpertParallel({ranks}, 'model.layers.*.mlp.experts'), a pattern of the names of the "
            f"modules whose `forward` takes {', '.join(_ARGUMENTS)}." + see("expert-parallel")
        )
    for layer in found:
        if layer.experts % ranks:
            raise MisconfigurationException(
                f"{layer.path!r} has {layer.experts} experts, which expert_parallel={ranks} does "
                "not divide. Choose another number of ranks." + see("expert-parallel")
            )
        if layer.experts == ranks and len(layer.nested) > 1:
            raise MisconfigurationException(
                f"With expert_parallel={ranks} each rank has one of {layer.experts} experts of "
                f"{layer.path!r}, but PEFT adapts parameters of several in another way than those "
                "of one. Choose fewer ranks." + see("expert-parallel")
            )
    return found


def _layer(path: str, module: nn.Module) -> ExpertLayer:
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    layer = ExpertLayer(path, module, lists[0] if lists else None)
    arguments = list(signature(layer.nested[-1].forward).parameters)
    reason = None
    if arguments != _ARGUMENTS:
        reason = f"its `forward` takes {', '.join(arguments) or 'nothing'}"
    elif layer.experts == 0:
        reason = "it has neither parameters of its own nor an nn.ModuleList of experts"
    elif layer.listed is None:
        others = [e.names[0] for e in owned_parameters(module) if _slice(e, layer.experts) is None]
        if others:
            reason = f"{others[0]!r} has no slice for each of {layer.experts} experts"
    if reason is not None:
        raise MisconfigurationException(
            f"The experts of {path!r} ({type(module).__name__}) cannot be spread: {reason}. Its "
            f"`forward` has to take {', '.join(_ARGUMENTS)}, and its experts have to be slices of "
            "all of its parameters along dimension 0, or modules of one nn.ModuleList."
            + see("expert-parallel")
        )
    return layer


def _slice(entry: OwnedParameter, experts: int) -> tuple[int, int] | None:
    """The dimension along which experts have slices of a parameter, and the length of one.

    PEFT's first factor has the rows of one expert after those of another; its second factor has
    columns of all experts in turn, for each of its rank.
    """
    words, shape = entry.names[0].split("."), entry.shape
    if "lora_B" in words:
        return (1, 1) if shape[1] % experts == 0 else None
    is_own = all(word == "base_layer" for word in words[:-1])
    if "lora_A" in words or (is_own and shape[:1] == (experts,)):
        return 0, shape[0] // experts
    return None


class SpreadExperts:
    """The experts of a module, of which each rank of a group has some.

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
            (layer, TokenExchange(group, layer.experts, tensor_group))
            for layer in expert_layers(module, experts, group.size())
        ]

    @property
    def sent_bytes(self) -> int:
        """Bytes of tokens and their gradients that this rank has sent to others."""
        return sum(exchange.sent_bytes for _, exchange in self._layers)

    def divided(self, held: Mapping[str, OwnedParameter]) -> dict[str, SplitParameter]:
        """The parameters of this stage's experts."""
        split: dict[str, SplitParameter] = {}
        here = []
        for layer, exchange in self._layers:
            parameters = [each for each in layer.parameters(self.group.size()) if each[0] in held]
            for name, dimension, sizes in parameters:
                _validate(held[name])
                split[name] = SplitParameter(held[name], dimension, sizes, self.group)
            if parameters:
                here.append((layer, exchange))
        self._layers = here
        return split

    @contextmanager
    def reading_parts(self) -> Iterator[None]:
        """Let modules compute the tokens of all ranks that belong to their experts here."""
        with ExitStack() as undo:
            for layer, exchange in self._layers:
                make = partial(partial, layer.forward, exchange)
                undo.enter_context(replaced_forward(layer.module, make))
                for number, expert in enumerate(layer.listed or ()):
                    if number not in exchange.own:
                        undo.enter_context(replaced_forward(expert, lambda _: _no_tokens))
            yield


def _no_tokens(tokens: Tensor, *_: Any, **__: Any) -> Tensor:
    """Stand in for the ``forward`` of an expert of another rank, which gets no tokens here."""
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
