"""The arguments of the strategy: their types, defaults and checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision

from lightning_axosparse.distributed.grid import divisors
from lightning_axosparse.pipeline.by_parts import Reduction
from lightning_axosparse.pipeline.schedule import SCHEDULES
from lightning_axosparse.support.arguments import (
    BOOL,
    COUNT,
    FUNCTION,
    LAYERS,
    NAMES,
    NONE,
    TEXT,
    Kind,
    check_fields,
    instance_of,
    number,
    one_of,
    short_repr,
)
from lightning_axosparse.support.troubleshooting import see

if TYPE_CHECKING:  # It loads DTensor, which only tensor parallelism needs.
    from torch.distributed.tensor.parallel import ParallelStyle

P = ParamSpec("P")
S = TypeVar("S")

TensorPlan = Literal["auto"] | Mapping[str, "ParallelStyle"]
Experts = Literal["auto"] | str | Sequence[str]

_BALANCE = one_of("parameters") | Kind(
    f"{LAYERS.wanted}. The first batches of a run log the time of each stage if one computes much "
    "longer than the others",
    LAYERS.fits,
)
_TIMEOUT = number("a number of seconds above 0", lambda value: value > 0) | Kind(
    "a datetime.timedelta above 0",
    lambda value: isinstance(value, timedelta) and value > timedelta(0),
)


@dataclass(frozen=True)
class TensorParallel:
    """Tensor parallelism: the ranks of a group have each a part of the weights of a stage.

    Args:
        ranks: number of ranks that share the layers of a stage. All run the same passes in the
            same order.
        plan: the weights that they share, and how. A dict has torch's ``ColwiseParallel``,
            ``RowwiseParallel`` and the like by names of modules, such as
            ``{"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}``. "auto" takes
            the layers that the module's ``configure_model`` has parallelized on
            ``self.device_mesh["tensor_parallel"]``, as for Lightning's ``ModelParallelStrategy``;
            if there are none, the plan of a Hugging Face module.

    Raises:
        MisconfigurationException: for arguments out of range.
    """

    ranks: int
    plan: TensorPlan = "auto"

    def __post_init__(self) -> None:
        """Check the arguments."""
        styles = instance_of("a dict of torch's styles by names of modules", Mapping)
        check_fields(MisconfigurationException, self, ranks=COUNT, plan=one_of("auto") | styles)
        if not isinstance(self.plan, str):
            _validate_styles(self.plan)


@dataclass(frozen=True)
class ExpertParallel:
    """Expert parallelism: replicas have each a part of the experts of a stage.

    Args:
        ranks: number of ranks over which the experts of a stage are spread. They are consecutive
            replicas, which send each other their tokens, and run the same passes in the same order.
            It divides the number of replicas.
        experts: the modules with the experts. "auto" takes the plan of a Hugging Face module; else
            a pattern such as ``"model.layers.*.mlp.experts"``, or several, of names of modules
            whose ``forward`` takes ``hidden_states``, ``top_k_index`` and ``top_k_weights``.

    Raises:
        MisconfigurationException: for arguments out of range.
    """

    ranks: int
    experts: Experts = "auto"

    def __post_init__(self) -> None:
        """Check the arguments."""
        check_fields(MisconfigurationException, self, ranks=COUNT, experts=TEXT | NAMES)


@dataclass(frozen=True)
class Config:
    """The arguments of ``AxoSparseStrategy``, whose docstring explains them."""

    g_inter: int = 1
    microbatches: int | None = None
    pipeline: str | Sequence[str] | None = None
    balance: Literal["parameters"] | Sequence[int] = "parameters"
    in_flight: int | None = None
    schedule: Literal["message-driven", "1f1b"] = "message-driven"
    transport: Literal["mpi", "loopback"] = "mpi"
    split_batch: Callable[[Any, int], list[Any]] | None = None
    loss: Reduction | Literal["whole"] = "whole"
    save_distributed_checkpoint: bool = False
    recompute: int | Literal["sqrt"] | None = None
    shard_optimizer: bool = False
    regrid: int | Literal["auto"] | None = None
    tensor_parallel: TensorParallel | int = 1
    expert_parallel: ExpertParallel | int = 1
    timeout: float | timedelta = timedelta(minutes=30)
    _: KW_ONLY
    accelerator: Accelerator | None = None
    parallel_devices: list[torch.device] | None = None
    cluster_environment: ClusterEnvironment | None = None
    checkpoint_io: CheckpointIO | None = None
    precision_plugin: Precision | None = None

    def __post_init__(self) -> None:
        """Check each argument, then their combinations."""
        check_fields(
            MisconfigurationException,
            self,
            g_inter=COUNT,
            microbatches=COUNT | NONE,
            pipeline=TEXT | NAMES | NONE,
            balance=_BALANCE,
            in_flight=COUNT | NONE,
            schedule=one_of(*SCHEDULES),
            transport=one_of("mpi", "loopback"),
            split_batch=FUNCTION | NONE,
            loss=one_of("whole", "mean", "sum") | FUNCTION,
            save_distributed_checkpoint=BOOL,
            recompute=COUNT | one_of("sqrt") | NONE,
            shard_optimizer=BOOL,
            regrid=COUNT | one_of("auto") | NONE,
            tensor_parallel=COUNT | instance_of("a TensorParallel", TensorParallel),
            expert_parallel=COUNT | instance_of("an ExpertParallel", ExpertParallel),
            timeout=_TIMEOUT,
            accelerator=instance_of("a Lightning Accelerator", Accelerator) | NONE,
            parallel_devices=instance_of("a list of devices", list) | NONE,
            cluster_environment=instance_of("a ClusterEnvironment", ClusterEnvironment) | NONE,
            checkpoint_io=instance_of("a CheckpointIO", CheckpointIO) | NONE,
            precision_plugin=instance_of("a Precision plugin", Precision) | NONE,
        )
        self._check_grid()
        self._check_schedule()
        self._check_regrid()
        self._check_shared_layers()

    @property
    def microbatch_count(self) -> int:
        """Micro-batches per batch and replica; 1 if no stage or loss needs them."""
        if self.g_inter == 1 and self.reduction is None:
            return 1
        return self.microbatches or (4 * self.g_inter if self.g_inter > 1 else 1)

    @property
    def reduction(self) -> Reduction | None:
        """How the loss of a batch follows from its samples; None to differentiate it whole."""
        return None if self.loss == "whole" else self.loss

    @property
    def ranks_per_pipeline(self) -> int:
        """Number of ranks that compute the stages of a replica."""
        return self.g_inter if self.transport == "mpi" else 1

    @property
    def timeout_seconds(self) -> float:
        """Seconds for which a rank waits for others before it ends the job."""
        timeout = self.timeout
        return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)

    @property
    def runs_pipeline(self) -> bool:
        """Whether there are several stages or micro-batches, shared layers or recomputed ones."""
        split = self.g_inter > 1 or self.microbatch_count > 1 or self.shares_layers
        return split or self.recompute is not None

    @property
    def tensors(self) -> TensorParallel:
        """The arguments of tensor parallelism."""
        given = self.tensor_parallel
        return given if isinstance(given, TensorParallel) else TensorParallel(given)

    @property
    def experts(self) -> ExpertParallel:
        """The arguments of expert parallelism."""
        given = self.expert_parallel
        return given if isinstance(given, ExpertParallel) else ExpertParallel(given)

    @property
    def shares_layers(self) -> bool:
        """Whether several ranks share layers."""
        return self.tensors.ranks > 1 or self.experts.ranks > 1

    def _check_grid(self) -> None:
        g_inter, balance = self.g_inter, self.balance
        if not isinstance(balance, str) and len(balance) != g_inter:
            raise MisconfigurationException(
                f"balance={list(balance)} gives the layers of {len(balance)} stages, but there "
                f"are g_inter={g_inter}. Give one number of layers a stage." + see("grid")
            )

    def _check_schedule(self) -> None:
        schedule = self.schedule
        if self.in_flight is not None and schedule != "message-driven":
            raise MisconfigurationException(
                f"in_flight={self.in_flight} belongs to schedule='message-driven'; {schedule!r} "
                "has its own fixed limit. Leave one of them out." + see("grid")
            )
        if self.in_flight is not None and self.reduction is None:
            raise MisconfigurationException(
                f"in_flight={self.in_flight} has no effect with loss='whole', for which stages hold"
                " all micro-batches. Leave it out, or say that the loss is a mean over samples: "
                "loss='mean'." + see("losses")
            )

    def _check_shared_layers(self) -> None:
        if not self.shares_layers:
            return
        ranks, name = self.tensors.ranks, "tensor_parallel"
        if ranks == 1:
            ranks, name = self.experts.ranks, "expert_parallel"
        unsupported = {
            "transport": self.transport == "loopback",
            "regrid": self.regrid is not None,
        }
        for other in (each for each, is_given in unsupported.items() if is_given):
            raise MisconfigurationException(
                f"{other}={getattr(self, other)!r} does not work with {name}={ranks}, "
                f"which splits weights over several ranks. Leave {other} or {name} out."
                + see("tensor-parallel")
            )

    def _check_regrid(self) -> None:
        regrid, g_inter = self.regrid, self.g_inter
        if regrid is not None and self.transport == "loopback":
            raise MisconfigurationException(
                f"regrid={regrid!r} moves layers between ranks, but transport='loopback' runs all "
                "stages in one process. Leave regrid out." + see("grid")
            )
        if regrid == "auto" and (self.in_flight is not None or self.schedule != "message-driven"):
            raise MisconfigurationException(
                "regrid='auto' needs the bytes of a micro-batch, which are measured with "
                "schedule='message-driven' and in_flight=None alone. Leave these two as they are "
                "by default, or give regrid a number of stages." + see("grid")
            )
        if isinstance(regrid, int) and regrid not in (shorter := divisors(g_inter)[:-1]):
            choice = f"Choose from {shorter}, or 'auto'" if shorter else "Leave regrid out"
            raise MisconfigurationException(
                f"regrid={regrid} is no proper divisor of g_inter={g_inter}, so the ranks of a "
                f"pipeline cannot form pipelines of so many stages. {choice}." + see("grid")
            )


def _validate_styles(plan: Mapping[str, Any]) -> None:
    """Check that the values of a plan are styles, not their names."""
    # Code that has made a style has loaded DTensor.
    from torch.distributed.tensor.parallel import ParallelStyle

    for name, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise MisconfigurationException(
                f"The plan gives {name!r} the style {short_repr(style)}, which is none of "
                "torch.distributed.tensor.parallel, such as ColwiseParallel() and "
                "RowwiseParallel()." + see("tensor-parallel")
            )


def with_arguments(
    other: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[Concatenate[S, ...], None]], Callable[Concatenate[S, P], None]]:
    """Give a constructor the arguments of another one, for ``help`` and for editors."""
    return wraps(other, assigned=["__annotations__"])
