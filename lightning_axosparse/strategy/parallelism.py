"""The arguments of tensor and of expert parallelism, by which ranks share layers of a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_axosparse.support.arguments import (
    COUNT,
    NAMES,
    TEXT,
    check_fields,
    instance_of,
    one_of,
    short_repr,
)
from lightning_axosparse.support.troubleshooting import see

if TYPE_CHECKING:  # It loads DTensor, which only tensor parallelism needs.
    from torch.distributed.tensor.parallel import ParallelStyle

TensorPlan = Literal["auto"] | Mapping[str, "ParallelStyle"]
Experts = Literal["auto"] | str | Sequence[str]


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
