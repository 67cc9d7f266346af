"""Splits weights over the ranks of a tensor group by torch's plans of tensor parallelism.

During a run, the parameter of a split weight is this rank's part. Its layer reads it as the
``DTensor`` of the plan, and torch computes and communicates as for any ``DTensor``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from lightning_axosparse.distributed.gradient_reducer import local_part
from lightning_axosparse.sparse.module.parameters import OwnedParameter
from lightning_axosparse.sparse.module.sparse_module import SparseModule
from lightning_axosparse.strategy.compat.internals import set_device_mesh
from lightning_axosparse.strategy.config import TensorPlan
from lightning_axosparse.strategy.weight_parts import SplitParameter, hugging_face_plans, matches
from lightning_axosparse.support.torch_internals import forget_parallelized, with_gradient_hooks
from lightning_axosparse.support.troubleshooting import see

_WHOLE_OUTPUT = partial(ColwiseParallel, output_layouts=Replicate())
_HUGGING_FACE: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": _WHOLE_OUTPUT,
    "colwise_gather_output": _WHOLE_OUTPUT,
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
    "embedding_rowwise": partial(RowwiseParallel, input_layouts=Replicate()),
    # Norms of the heads of queries and keys, which are split over the ranks.
    "replicated_with_grad_allreduce": partial(
        SequenceParallel, sequence_dim=-2, use_local_output=True
    ),
}


def styles_of(module: nn.Module, plan: TensorPlan, ranks: int) -> dict[str, ParallelStyle]:
    """Return a plan's styles, by names of modules.

    Raises:
        MisconfigurationException: if the ranks cannot share the module's layers by the plan.
    """
    if plan == "auto":
        styles = hugging_face_plan(module, ranks)
    else:
        styles = dict(plan)
        _validate_names(module, styles)
        _validate_pairs(styles)
    _validate_heads(module, styles, ranks)
    return styles


def _validate_names(module: nn.Module, styles: Mapping[str, ParallelStyle]) -> None:
    paths = [path for path, _ in module.named_modules()]
    for name in styles:
        if not any(matches(path, name) for path in paths):
            raise MisconfigurationException(
                f"The plan of TensorParallel names {name!r}, but {type(module).__name__} has no "
                "such module. Its names are those of `named_modules()`, in which * stands for one "
                "word: 'model.layers.*.up'." + see("tensor-parallel")
            )


def _validate_pairs(styles: Mapping[str, ParallelStyle]) -> None:
    """Check that a layer is split by rows if the outputs of others stay split by columns."""
    columns = [style for style in styles.values() if type(style) is ColwiseParallel]
    are_split = any(
        each.use_local_output and isinstance(each.output_layouts[0], Shard) for each in columns
    )
    if are_split and len(columns) == len(styles):
        raise MisconfigurationException(
            f"The plan of TensorParallel splits {', '.join(map(repr, styles))} by columns and no "
            "layer by rows: the layers behind would get a part of their input. Name these as "
            "RowwiseParallel(), or have whole outputs: ColwiseParallel(output_layouts=Replicate())."
            + see("tensor-parallel")
        )


def _validate_heads(module: nn.Module, styles: Mapping[str, ParallelStyle], ranks: int) -> None:
    """Check that each rank gets whole heads of the attention that a plan splits."""
    columns = [name for name, style in styles.items() if isinstance(style, ColwiseParallel)]
    for path, part in module.named_modules():
        uneven = [f"{heads} {kind}" for kind, heads in _heads(part).items() if heads % ranks]
        inside = (child for child, _ in part.named_modules(prefix=path) if uneven)
        if any(matches(child, name) for child in inside for name in columns):
            raise MisconfigurationException(
                f"{path!r} ({type(part).__name__}) has {' and '.join(uneven)}, which "
                f"tensor_parallel={ranks} does not divide: each rank has whole heads. Choose "
                "another number of ranks, or leave its layers out of the plan."
                + see("tensor-parallel")
            )


def _heads(part: nn.Module) -> dict[str, int]:
    """Return the numbers of heads of a Hugging Face attention layer; empty for other modules."""
    if not (hasattr(part, "head_dim") or hasattr(part, "attention_head_size")):
        return {}
    kinds = {"num_attention_heads": "attention heads", "num_key_value_heads": "key-value heads"}
    heads = {kind: getattr(getattr(part, "config", None), key, None) for key, kind in kinds.items()}
    return {kind: each for kind, each in heads.items() if isinstance(each, int)}


def hugging_face_plan(module: nn.Module, ranks: int) -> dict[str, ParallelStyle]:
    """Return the plans of the Hugging Face modules inside a module, by names in the module.

    Experts stay whole on each rank of the group, as torch has no style that splits them.

    Raises:
        MisconfigurationException: if there is none, or it has a style that torch does not have.
    """
    plan: dict[str, ParallelStyle] = {}
    for path, part, styles in hugging_face_plans(module, "tp_plan"):
        experts = tuple(name for name, style in styles.items() if style == "moe_tp_experts")
        for name, style in styles.items():
            if name.startswith(experts):
                continue
            if style not in _HUGGING_FACE:
                raise MisconfigurationException(
                    f"tensor_parallel={ranks} takes the styles {', '.join(_HUGGING_FACE)} of "
                    f"Hugging Face, but {type(part).__name__} wants {style!r} for {name!r}. Give "
                    f"TensorParallel({ranks}, plan) with a dict of torch's styles by names of "
                    "modules." + see("tensor-parallel")
                )
            plan[f"{path}.{name}".lstrip(".")] = _HUGGING_FACE[style]()
    if not plan:
        raise MisconfigurationException(
            f"tensor_parallel={ranks} ranks share layers, but there is no plan: no Hugging Face "
            f"module in {type(module).__name__} has one. Give TensorParallel({ranks}, plan) with a "
            "dict of torch's styles by names of modules, or call parallelize_module in "
            "`configure_model`, each time that it is called, on "
            "self.device_mesh['tensor_parallel']." + see("tensor-parallel")
        )
    return plan


class TensorShards:
    """The parameters of a module that a plan splits over a tensor group.

    The group is the dimension ``tensor_parallel`` of Lightning's mesh.
    """

    def __init__(self, module: LightningModule, mesh: DeviceMesh) -> None:
        self._module, self._all_dimensions = module, mesh
        self._mesh = mesh["tensor_parallel"]
        self.group = self._mesh.get_group()
        self._size = dist.get_world_size(self.group)
        self._placements: dict[str, Placement] = {}
        self._placement_of_parameter: dict[nn.Parameter, Placement] = {}
        self.gradients_are_compared = False

    @contextmanager
    def configuring(self) -> Iterator[None]:
        """Give the module its device mesh, and record the weights that it parallelizes inside."""
        set_device_mesh(self._module, self._all_dimensions)
        with self._recording_placements():
            yield

    @property
    def _are_split(self) -> bool:
        return any(isinstance(each, Shard) for each in self._placements.values())

    def parallelize(self, plan: TensorPlan) -> None:
        """Parallelize the module by a plan; with "auto" unless it has done so itself.

        Raises:
            MisconfigurationException: if a style does not support its layer, or no weight is split.
        """
        if not (plan == "auto" and self._are_split):
            styles = styles_of(self._module, plan, self._size)
            with self._recording_placements():
                for name, style in styles.items():
                    self._apply(name, style)
        if not self._are_split:
            raise MisconfigurationException(
                f"tensor_parallel={self._size} ranks share the layers of "
                f"{type(self._module).__name__}, but its plan splits no weight. Name layers in it "
                "that have ColwiseParallel() or RowwiseParallel()." + see("tensor-parallel")
            )

    def _apply(self, name: str, style: ParallelStyle) -> None:
        try:
            parallelize_module(self._module, self._mesh, {name: style})
        except NotImplementedError as error:
            raise MisconfigurationException(
                f"The plan of TensorParallel cannot split {name!r}, as torch says: {error} Layers "
                "that wrap a linear one, as PEFT's do, stay whole: give a dict of the other layers."
                + see("tensor-parallel")
            ) from error

    @contextmanager
    def _recording_placements(self) -> Iterator[None]:
        """Record the placements of weights in the context, and gather them until they are split."""
        tied, with_hooks = _tied(self._module), _hooked(self._module)
        yield
        with_hooks |= _hooked(self._module)
        self._record_placements()
        self._validate_split(tied, with_hooks)

    def _record_placements(self) -> None:
        """Replace each ``DTensor`` by a whole parameter, and record its placement."""
        whole: dict[Tensor, nn.Parameter] = {}
        for path, owner in self._module.named_modules():
            for key, parameter in owner._parameters.items():
                if isinstance(parameter, DTensor):
                    name = f"{path}.{key}".lstrip(".")
                    self._placements[name] = self._placement(name, parameter)
                    if parameter not in whole:
                        whole[parameter] = nn.Parameter(_whole(parameter), parameter.requires_grad)
                    owner._parameters[key] = whole[parameter]

    def _validate_split(self, tied: list[list[str]], with_hooks: set[str]) -> None:
        """Check that no weight is split that is tied to another, or has a gradient hook."""
        for names in tied:
            split = [name for name in names if name in self._placements]
            if split:
                raise MisconfigurationException(
                    f"The plan of TensorParallel splits {split[0]!r}, which is tied to "
                    f"{', '.join(repr(name) for name in names if name != split[0])}: torch's plans "
                    "would untie them. Leave it out of the plan, or untie the weights (in Hugging "
                    "Face's models with tie_word_embeddings=False)." + see("tensor-parallel")
                )
        for name in with_hooks & self._placements.keys():
            raise MisconfigurationException(
                f"{name!r} has a gradient hook, which would see a part of the gradient, as "
                "tensor_parallel splits it. Leave the hook out, and change gradients in "
                "`on_after_backward`, where they are whole." + see("tensor-parallel")
            )

    def _placement(self, name: str, parameter: DTensor) -> Placement:
        placement = parameter.placements[0]
        can_be_split = type(placement) in (Shard, Replicate) and parameter.device_mesh == self._mesh
        if not can_be_split:
            raise MisconfigurationException(
                f"{name!r} is placed as {parameter.placements} on {parameter.device_mesh}. Weights "
                "are Shard or Replicate on self.device_mesh['tensor_parallel'] alone; fully_shard "
                "is not needed, as the strategy averages gradients over replicas."
                + see("tensor-parallel")
            )
        if isinstance(placement, Shard) and parameter.shape[placement.dim] % self._size:
            raise MisconfigurationException(
                f"{name!r} of shape {tuple(parameter.shape)} is split along dimension "
                f"{placement.dim}, which tensor_parallel={self._size} does not divide. Choose "
                "another number of ranks, or leave it out of the plan." + see("tensor-parallel")
            )
        return placement

    # Reading parts

    def split_parameters(self, local: Mapping[str, OwnedParameter]) -> dict[str, SplitParameter]:
        """Return the parameters of this stage that the plan splits."""
        splits: dict[str, SplitParameter] = {}
        for name in (each for each in local if each in self._placements):
            entry, placement = local[name], self._placements[name]
            self._placement_of_parameter[entry.parameter] = placement
            if isinstance(placement, Shard):
                length = entry.shape[placement.dim] // self._size
                sizes = [length] * self._size
                splits[name] = SplitParameter(entry, placement.dim, sizes, self.group)
        return splits

    @contextmanager
    def reading_parts(self) -> Iterator[None]:
        """Let layers read their parts as ``DTensor`` inside the context."""
        with ExitStack() as undo:
            for owner in self._module.modules():
                reads = {
                    key: _as_dtensor(
                        owner, key, self._mesh, self._placement_of_parameter[parameter]
                    )
                    for key, parameter in owner._parameters.items()
                    if parameter in self._placement_of_parameter
                }
                if reads:
                    own = type(owner)
                    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
                    owner.__class__ = type(own.__name__, (own,), {**names, **reads})
                    undo.callback(setattr, owner, "__class__", own)
            yield

    def end(self) -> None:
        """Undo the parallelization of the layers, so that they can be parallelized again."""
        for owner in self._module.modules():
            forget_parallelized(owner)
        set_device_mesh(self._module, None)

    def validate_gradients(self, replicated: Mapping[str, nn.Parameter], tolerance: float) -> None:
        """Check that the gradients of replicated parameters are equal; collective.

        They differ if a layer gets another part of the activation on each rank, but its style does
        not sum its gradient over the ranks.
        """
        self.gradients_are_compared = True
        gradients = [parameter.grad for parameter in replicated.values()]
        own_norms = torch.tensor(
            [0.0 if g is None else float(local_part(g).double().norm()) for g in gradients]
        )
        norms = [torch.empty_like(own_norms) for _ in range(self._size)]
        dist.all_gather(norms, own_norms, group=self.group)
        for name, (first, *others) in zip(replicated, torch.stack(norms, 1).tolist(), strict=True):
            if any(abs(other - first) > tolerance * max(first, other) for other in others):
                raise MisconfigurationException(
                    f"The ranks that share layers have different gradients of {name!r}, of norms "
                    f"{first:.6g} and {', '.join(f'{other:.6g}' for other in others)}: its layer "
                    "gets another part of the activation on each. Name the layer in the plan, as "
                    "with SequenceParallel()." + see("tensor-parallel")
                )


def _as_dtensor(owner: nn.Module, key: str, mesh: DeviceMesh, placement: Placement) -> property:
    """Return a property that reads a parameter of a layer as the ``DTensor`` of its part."""
    own = type(owner)
    sparse = vars(own).get(key) if issubclass(own, SparseModule) else None

    def read(self: nn.Module) -> Tensor:
        # The part may be a sparse weight, which torch's operators read as a dense tensor.
        local = self._parameters[key] if sparse is None else sparse.fget(self)
        assert local is not None
        return DTensor.from_local(local, mesh, [placement], run_check=False)

    return property(read)


def _tied(module: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _hooked(module: nn.Module) -> set[str]:
    """Return the names of parameters that have gradient hooks."""
    with_hooks = set(with_gradient_hooks(module.parameters()))
    return {name for name, parameter in module.named_parameters() if parameter in with_hooks}


def _whole(parameter: DTensor) -> Tensor:
    if parameter.to_local().is_meta:
        return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    with torch.no_grad():
        whole: Tensor = parameter.full_tensor()
    return whole
