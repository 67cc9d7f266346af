"""The strategy: its arguments, and what users, callbacks and the launcher ask of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from torch import Tensor, nn

from lightning_axosparse.pipeline.shard.sharded_module import full_module
from lightning_axosparse.pruning.channel_ticket import ChannelTicket
from lightning_axosparse.pruning.rule import Stored
from lightning_axosparse.sparse import sparsify
from lightning_axosparse.sparse.backend import AUTO, Backend
from lightning_axosparse.sparse.module.optimizer_state import restore_masters
from lightning_axosparse.sparse.module.parameters import layouts, sparse_parameters
from lightning_axosparse.strategy.config import Config, with_arguments
from lightning_axosparse.strategy.pipeline_strategy import PipelineStrategy
from lightning_axosparse.strategy.states import AtRest, LeftSharded, Running
from lightning_axosparse.support.troubleshooting import see


class AxoSparseStrategy(PipelineStrategy):
    """Inter-layer pipeline x data parallelism over MPI, with message-driven scheduling.

    The LightningModule does not change: every stage runs its ``training_step``, micro-batch by
    micro-batch, and computes only its own layers of one ``nn.Sequential`` or ``nn.ModuleList``. A
    stage runs whatever message has arrived (AxoNN, Singh & Bhatele, IPDPS 2022). Gradients are
    averaged over replicas as soon as they are final. Weights can go over to sparse storage while
    training (SAMO, Singh & Bhatele, IPDPS 2023): see ``GradualPruning``.

    ``python train.py`` with ``devices=N`` starts N ranks itself; under ``mpiexec`` or ``srun`` the
    script's own processes are the ranks. With one rank no MPI is started.

    Args:
        g_inter: stages per replica. The number of replicas follows: ``world_size // g_inter``.
        microbatches: micro-batches per batch and replica; None takes ``4 * g_inter`` (one without a
            pipeline), or so many that each has two samples, if the module has BatchNorms. A batch
            that they do not divide is split unevenly, with the right weights; a batch with fewer
            samples is split into one micro-batch per sample. Evaluation takes the closest number
            that divides the batch.
        pipeline: attribute path of the ``nn.Sequential`` or ``nn.ModuleList`` whose layers are
            partitioned over the stages, such as ``"model.transformer.h"``; or several of them, and
            of other modules that are a layer each, in the order in which a step calls them, such as
            ``["stem", "layer1", "layer2"]``. A list of lists counts as one list of all their
            layers. None takes the only candidate, or the layers of several in the order in which
            ``forward`` calls them with the module's ``example_input_array``, or else the step with
            a batch of the loader; neither computes or consumes anything.
        balance: "parameters" partitions the layers so that the largest stage is as small as
            possible, "time" so that the slowest stage is as fast as possible, timing the layers on
            the module's ``example_input_array``, which should be like a micro-batch; a sequence
            gives the number of layers of each stage. Where "parameters" leaves a stage that
            computes much longer than the others, the first batches say so.
        in_flight: most micro-batches that a stage may hold between forward and backward. None takes
            what memory allows after the first step, and again after a ticket was drawn: from
            ``g_inter``, which is what 1F1B holds, to ``2 * g_inter``, which hides jitter and
            latency. Losses and weights do not depend on it.
        schedule: what a stage runs next: "message-driven" whatever has arrived, "1f1b" the static
            order of PipeDream-flush, for comparison.
        transport: "mpi" gives each stage a rank; "loopback" runs all stages of a replica in one
            process, through the same schedule, for notebooks, debuggers and tests.
        split_batch: splits a batch into micro-batches, ``(batch, microbatches) -> list``, such as
            ``lambda batch, n: list(zip(batch[0].chunk(n, 1), batch[1].chunk(n)))``. None splits
            along the first dimension, and gives to every micro-batch whole what has none; the first
            batch prints which. Where the loader does not collate as torch's does, all first
            dimensions must agree.
        loss: how the loss is differentiated. "whole": once a batch, behind all forward passes, so
            that a stage holds all micro-batches. "parts": micro-batch by micro-batch, so that
            a stage holds ``in_flight``; a loss that is no known mean or sum over samples counts as
            a mean over samples then. "auto" goes by parts where a comparison with the whole batch
            has shown that this gives the same loss and gradient, and says so where it does not.
        save_distributed_checkpoint: checkpoints are folders to which all stages write their own
            tensors at once, as those of Lightning's ``ModelParallelStrategy``. Every grid resumes
            from them, and ``python -m lightning_axosparse.checkpoint.consolidate`` makes the one
            file of them that is written otherwise, one tensor at a time.
        recompute: activation checkpointing: every so many layers of a stage keep only their first
            input, and are computed again in the backward pass; "sqrt" takes the square root of the
            stage's layers (AxoNN). Gradients are the same to the bit.
        shard_optimizer: divides the optimizer's state of a stage among its replicas (ZeRO stage 1):
            each keeps and steps its part of every parameter, and they give each other the new
            values. Weights are the same to the bit. Of gradients that nothing reads before the
            step, each keeps its part alone, too.
        regrid: continues, from the epoch after the ticket was drawn, with shorter pipelines and
            more replicas: with this number of stages, a divisor of ``g_inter``; with "auto" as few
            as memory allows. Batches and their order stay the same: each new replica trains on a
            part of the batch, and gradients are weighted by samples.
        tensor_parallel: ranks of a stage that share its layers; or with a plan,
            ``TensorParallel(2, {"layers.*.up": ColwiseParallel(), ...})``, which says which weights
            they share. The number of replicas is then ``world_size // (g_inter * ranks)``. A number
            alone takes what ``configure_model`` parallelizes, or the plan of a Hugging Face module.
        expert_parallel: replicas over which the experts of a stage are spread; or with the names of
            these experts, ``ExpertParallel(2, "model.layers.*.mlp.experts")``. A number alone takes
            the plan of a Hugging Face module.
        timeout: seconds, or a ``timedelta``, for which a rank waits for others at a time; after
            that every rank that can be reached prints where it is, and the job ends with the names
            of those that do not answer. It should be longer than what one rank may do while others
            wait for it: its first batch, a batch that comes late, a checkpoint.
        restarts: how many times at most ``fit`` begins again from the newest whole checkpoint that
            it has saved, or from its start, after a rank was killed, as when memory runs out. Only
            where the call starts the ranks; an exception of your code is never repeated.
        accelerator: as for Lightning's strategies, like the rest.
        parallel_devices: the devices of the ranks of this node.
        cluster_environment: says how the cluster works, such as how Slurm requeues jobs.
        checkpoint_io: writes and reads the files of checkpoints.
        precision_plugin: the precision, in place of the Trainer's ``precision``.

    Raises:
        MisconfigurationException: for arguments out of range, here; for a grid, a module or an MPI
            that does not fit, before any rank is started.
    """

    strategy_name = "axosparse"

    @with_arguments(Config.__init__)
    def __init__(self, *args: Any, **arguments: Any) -> None:
        for name in arguments.keys() - {field.name for field in fields(Config)}:
            raise TypeError(f"AxoSparseStrategy() has no argument {name!r}." + see("arguments"))
        super().__init__(Config(*args, **arguments))

    def __repr__(self) -> str:
        """What Fabric shows where it refuses the object."""
        name = type(self).__name__
        return f"{name}(g_inter={self.config.g_inter!r}), which is for a Trainer: Fabric has none"

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the strategy known by its name."""
        strategy_registry.register(
            cls.strategy_name,
            cls,
            description="message-driven pipeline x data parallelism over MPI",
            override=True,
        )

    @property
    def g_inter(self) -> int:
        """Stages per replica, when the run begins."""
        return self.config.g_inter

    @property
    def microbatches(self) -> int:
        """Micro-batches per batch and replica."""
        return self.config.parts

    @property
    def has_step_outputs(self) -> bool:
        """Whether this rank gets what the steps return, and not their loss alone."""
        return self._state.run.stage_module.runs_last_stage

    @property
    def reduced_bytes(self) -> int:
        """Bytes of gradients that this rank all-reduced in its last step."""
        reducer = self._state.run.stage_module.shared.reducer
        return 0 if reducer is None else reducer.reduced_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of tokens and their gradients that this rank has sent to others in this run."""
        experts = self._state.run.stage_module.experts
        return 0 if experts is None else experts.sent_bytes

    @property
    def replayed_bytes(self) -> int:
        """Bytes of collectives inside layers whose recorded results ``recompute`` has used."""
        recompute = self._state.run.stage_module.recompute
        return 0 if recompute is None else recompute.replayed_bytes

    @property
    def in_flight(self) -> int:
        """Most micro-batches that a stage may hold, as of the last training batch."""
        return self._state.run.runner.limit.value

    @property
    def peak_in_flight(self) -> dict[int, int]:
        """Most micro-batches that each stage of this rank held in its last training batch."""
        return self._state.run.runner.peak_in_flight

    def held_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank keeps, by name, in the module's order."""
        return self._state.stage_module.sharding.held()

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter of the whole model, by name, one at a time, for hooks.

        Use it in place of ``named_parameters()`` where values of all stages are needed, as for
        histograms. Every rank of a pipeline has to iterate, to the end.

        Yields:
            The name and the parameter, or a copy of that of another stage, with its ``grad``. A
            weight that is stored sparse is the vector of its unpruned values.
        """
        yield from self._state.run.stage_module.whole_parameters()

    def optimizer_state_of(self, parameter: Tensor) -> dict[str, Any]:
        """The whole optimizer state of a parameter that this rank keeps, also where it is sharded.

        Collective over the replicas of the stage with ``shard_optimizer``. It is to be read only.
        """
        found = (o.state[parameter] for o in self.optimizers if parameter in o.state)
        state: dict[str, Any] = next(found, {})
        shards = self._state.run.shards
        return state if shards is None else shards.whole(parameter, state)

    def stored_weights(self) -> Callable[[str], Stored]:
        """What returns a weight of this rank, with its optimizer state, as one process has them.

        Calls are collective over ranks that share the weight or its state. What is returned is to
        be read only.
        """
        held, sparse = self.held_parameters(), layouts(self._module)
        parts = self._state.stage_module.parts.parameters

        def read(name: str) -> Stored:
            weight = held[name]
            stored = Stored(weight, self.optimizer_state_of(weight), sparse.get(name))
            return parts[name].stored(stored.state) if name in parts else stored

        return read

    def counted_parameters(self) -> set[str]:
        """The names of those that this rank counts: each is counted once over a pipeline."""
        return self._state.stage_module.sharding.counted()

    def parameter_stages(self) -> dict[str, frozenset[int]]:
        """The stages that keep each parameter of the whole model, by name."""
        return dict(self._state.stage_module.sharding.holders)

    def sparsify(self, masks: Mapping[str, Tensor], backend: Backend = AUTO) -> None:
        """Store the masked parameters of this rank, and their optimizer state, sparse.

        Args:
            masks: name of a parameter of this rank -> bool tensor of its whole shape, True where
                an entry is unpruned. Read one at a time.
            backend: how their products run, the same on all ranks.
        """
        optimizer = self.optimizers[0] if self.optimizers else None
        for part in self._state.run.with_whole_state(masks):
            sparsify(self._module, part, optimizer, compute=backend.compute)
        stored = sparse_parameters(self._module).values()
        for entry in stored:
            assert entry.form is not None
            entry.form.compute_by(backend)
        if optimizer is not None:
            restore_masters(optimizer, stored)

    def shrink(self, ticket: ChannelTicket) -> None:
        """Remove pruned channels from the layers of this rank, and from their optimizer state.

        Args:
            ticket: the same on all ranks; layers that it has shrunk already do not change.
        """
        with self._state.run.whole_state():
            ticket.apply(self._module, self.optimizers)
        self._state.run.stage_module.remote_gradients.follow()
        self.use_freed_memory()

    def use_freed_memory(self) -> None:
        """Choose in-flight limit and grid again, as the last pruning has freed memory."""
        self._state.run.after_draw()

    @contextmanager
    def summon_full_params(self, rank0_only: bool = True) -> Iterator[None]:
        """Bring the module together that a run under ``mpiexec`` or ``srun`` has left sharded.

        Inside the context ``state_dict`` and the parameters are those of the whole module; what is
        stored sparse stays so. Changes of other ranks' layers are lost when it ends. Collective
        over all ranks, a tensor at a time. Where the module is whole it does nothing.

        Args:
            rank0_only: only the first rank gets the module; else every rank does.

        Raises:
            RuntimeError: during a run; use ``trainer.save_checkpoint`` there.
        """
        if isinstance(self._state, Running):
            raise RuntimeError(
                "summon_full_params() was called during a run. Call it when `fit`, `validate`, "
                "`test` or `predict` has returned; in hooks save with `trainer.save_checkpoint`."
                + see("values-between-layers")
            )
        with full_module(self._module, self.is_global_zero or not rank0_only):
            yield

    def keep_sharded(self) -> None:
        """Leave the module sharded when a run ends; the launcher calls this on each rank."""
        self._keeps_sharded = True

    def release_shard(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what this rank returns to the caller of the launcher, and free it."""
        if isinstance(self._state, LeftSharded):
            yield from self._state.stage_module.release()
            self._state = AtRest()
