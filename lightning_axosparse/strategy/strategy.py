"""The strategy: its arguments, and its methods for users, callbacks and the launcher."""

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
    stage processes the messages in the order in which they arrive (AxoNN, Singh & Bhatele, IPDPS
    2022). Gradients are averaged over replicas as soon as they are final. Weights can be stored
    sparse in the middle of training (SAMO, Singh & Bhatele, IPDPS 2023): see ``GradualPruning``.

    ``python train.py`` with ``devices=N`` starts N ranks itself; under ``mpiexec`` or ``srun`` the
    script's own processes are the ranks. With one rank no MPI is started.

    Args:
        g_inter: stages per replica. The number of replicas follows: ``world_size // g_inter``.
        microbatches: micro-batches per batch and replica. None takes ``4 * g_inter`` (one without a
            pipeline), but so few that each has two samples if the module has BatchNorms. A batch
            that the number does not divide is split unevenly, and weighted by samples; a batch with
            fewer samples is split into one micro-batch per sample. One stage splits it only if
            ``loss`` is not "whole".
        pipeline: attribute path of the ``nn.Sequential`` or ``nn.ModuleList`` whose layers are
            partitioned over the stages, such as ``"model.transformer.h"``; or several of them, and
            of other modules that are a layer each, in the order in which a step calls them, such as
            ``["stem", "layer1", "layer2"]``. A list of lists counts as one list of all their
            layers. None takes the only candidate; if there are several, their layers in the order
            in which ``forward`` calls them with the module's ``example_input_array``, or else the
            step with a batch of the loader. These calls compute no values, and consume no batch.
        balance: "parameters" partitions the layers so that the largest stage is as small as
            possible; a sequence gives the number of layers of each stage. If a stage computes
            much longer than the others on CPU, the first batches log the time of each.
        in_flight: most micro-batches that a stage may hold between forward and backward, if
            ``loss`` is not "whole", for which it holds all. None takes as many as memory allows
            after the first step, and again after a ticket was drawn: from ``g_inter``, as in 1F1B,
            to ``2 * g_inter``, which hides jitter and latency. Losses and weights do not depend on
            it.
        schedule: the order in which a stage runs passes: "message-driven" in the order in which
            messages arrive, "1f1b" in the static order of PipeDream-flush, for comparison.
        transport: "mpi" gives each stage a rank; "loopback" runs all stages of a replica in one
            process, through the same schedule, for notebooks, debuggers and tests.
        split_batch: splits a batch into micro-batches, ``(batch, microbatches) -> list``, such as
            ``lambda batch, n: list(zip(batch[0].chunk(n, 1), batch[1].chunk(n)))``. None splits
            tensors along the first dimension, and passes anything else to every micro-batch; the
            debug log says which. If the loader does not collate as torch's does, all first
            dimensions must agree.
        loss: how the loss is differentiated. "whole", which is right for every loss: once a batch,
            after all forward passes, so that a stage holds all micro-batches. "mean" and "sum" say
            that the loss is a mean, or a sum, over samples: it is differentiated micro-batch by
            micro-batch, and a stage holds only ``in_flight``. A function says that it is a mean
            over something else, and returns its number for a micro-batch, such as
            ``lambda batch: (batch["labels"] != -100).sum()``. Batches 1, 2, 4, 8, ... and the first
            of epochs are compared with the whole, and raise an error if this is not right.
        save_distributed_checkpoint: write checkpoints as folders, to which all stages write their
            own tensors at once, as with Lightning's ``ModelParallelStrategy``. Every grid resumes
            from them, and ``python -m lightning_axosparse.checkpoint.consolidate`` converts a
            folder to the usual file, one tensor at a time.
        recompute: activation checkpointing: groups of this number of layers save only their first
            input, and are computed again in the backward pass. "sqrt" takes the square root of the
            number of the stage's layers (AxoNN). Gradients have the same bits.
        shard_optimizer: divide the optimizer's state of a stage among its replicas (ZeRO stage 1):
            each stores the state of a part of every parameter, steps it, and gathers the new values
            of the others. Weights have the same bits. Gradients that nothing reads before the step
            are divided, too (stage 2).
        regrid: continue, from the epoch after the ticket was drawn, with fewer stages and more
            replicas: with this number of stages, a divisor of ``g_inter``; with "auto", as few as
            memory allows. Batches and their order stay the same: each new replica trains on a part
            of the batch, in micro-batches as large as before. Gradients are weighted as ``loss``
            says, with "whole" by samples; logged values are those of the batch, if they are means
            over samples or ``reduce_fx`` says what else they are.
        tensor_parallel: number of ranks that share the layers of a stage; or with a plan,
            ``TensorParallel(2, {"layers.*.up": ColwiseParallel(), ...})``, which names the weights
            that they share. The number of replicas is then ``world_size // (g_inter * ranks)``. A
            number alone takes the layers that ``configure_model`` parallelizes, or the plan of a
            Hugging Face module.
        expert_parallel: number of replicas over which the experts of a stage are spread; or with
            the names of these experts, ``ExpertParallel(2, "model.layers.*.mlp.experts")``. A
            number alone takes the plan of a Hugging Face module.
        timeout: seconds, or a ``timedelta``, for which a rank waits for others. After that, every
            rank that can be reached prints where it is, and the job ends with the names of those
            that do not answer. It should be longer than anything that one rank may do while others
            wait for it: its first batch, a batch that comes late, a checkpoint.
        accelerator: as for Lightning's strategies, like the rest.
        parallel_devices: the devices of the ranks of this node.
        cluster_environment: says how the cluster works, such as how Slurm requeues jobs.
        checkpoint_io: writes and reads the files of checkpoints.
        precision_plugin: the precision, in place of the Trainer's ``precision``.

    Raises:
        MisconfigurationException: here, for arguments out of range; before any rank is started, for
            a grid, a module or an MPI that does not work.
    """

    strategy_name = "axosparse"

    @with_arguments(Config.__init__)
    def __init__(self, *args: Any, **arguments: Any) -> None:
        for name in arguments.keys() - {field.name for field in fields(Config)}:
            raise TypeError(f"AxoSparseStrategy() has no argument {name!r}." + see("arguments"))
        super().__init__(Config(*args, **arguments))

    def __repr__(self) -> str:
        """Return the text that Fabric shows when it refuses the strategy."""
        name = type(self).__name__
        return f"{name}(g_inter={self.config.g_inter!r}), which is for a Trainer: Fabric has none"

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the strategy by its name."""
        strategy_registry.register(
            cls.strategy_name,
            cls,
            description="message-driven pipeline x data parallelism over MPI",
            override=True,
        )

    @property
    def g_inter(self) -> int:
        """Stages per replica, before a regrid."""
        return self.config.g_inter

    @property
    def microbatches(self) -> int:
        """Micro-batches per batch and replica."""
        return self.config.microbatch_count

    @property
    def has_step_outputs(self) -> bool:
        """Whether this rank gets the full output of steps; other ranks get only the loss."""
        return self._state.run.stage_module.runs_last_stage

    @property
    def reduced_bytes(self) -> int:
        """Bytes of gradients that this rank all-reduced in its last step."""
        reducer = self._state.run.stage_module.shared.reducer
        return 0 if reducer is None else reducer.reduced_bytes

    @property
    def in_flight(self) -> int:
        """Most micro-batches that a stage was allowed to hold in the last training batch."""
        return self._state.run.runner.limit.value

    @property
    def peak_in_flight(self) -> dict[int, int]:
        """Most micro-batches that each stage of this rank held in its last training batch."""
        return self._state.run.runner.peak_in_flight

    def local_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that this rank stores, by name, in the module's order."""
        return self._state.stage_module.sharding.local_parameters()

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter of the full model, by name, one at a time, for hooks.

        Use it in place of ``named_parameters()`` for values of all stages, such as for histograms.
        Every rank of a pipeline has to iterate to the end.

        Yields:
            The name and the parameter, or a copy of that of another stage, with its ``grad``; of a
            sparse weight, a dense copy.
        """
        yield from self._state.run.stage_module.whole_parameters()

    def optimizer_state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return the whole optimizer state of a parameter of this rank, also if it is sharded.

        Collective over the replicas of the stage with ``shard_optimizer``. Do not modify it.
        """
        states = (o.state[parameter] for o in self.optimizers if parameter in o.state)
        state: dict[str, Any] = next(states, {})
        shards = self._state.run.shards
        return state if shards is None else shards.gather_state(parameter, state)

    def stored_weights(self) -> Callable[[str], Stored]:
        """Return a function that returns a weight and its optimizer state as one process has them.

        Its argument is the name of a weight of this rank. Calls are collective over ranks that
        share the weight or its state. Do not modify the results.
        """
        local, sparse = self.local_parameters(), layouts(self._module)
        parts = self._state.stage_module.weight_parts.parameters

        def read(name: str) -> Stored:
            weight = local[name]
            stored = Stored(weight, self.optimizer_state_of(weight), sparse.get(name))
            return parts[name].gather_stored(stored.state) if name in parts else stored

        return read

    def counted_parameters(self) -> set[str]:
        """Return the names of the parameters that this rank counts, each once in a pipeline."""
        return self._state.stage_module.sharding.counted_names()

    def parameter_stages(self) -> dict[str, frozenset[int]]:
        """Return the stages that store each parameter of the full model, by name."""
        return dict(self._state.stage_module.sharding.holders)

    def sparsify(self, masks: Mapping[str, Tensor], backend: Backend = AUTO) -> None:
        """Store the masked parameters of this rank, and their optimizer state, sparse.

        Args:
            masks: name of a parameter of this rank -> bool tensor of its whole shape, False where
                an entry is pruned. They are read one at a time.
            backend: how products of the weights are computed, the same on all ranks.
        """
        optimizer = self.optimizers[0] if self.optimizers else None
        for part in self._state.run.with_gathered_weights(masks):
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
            ticket: the same on all ranks; layers that it has already shrunk do not change.
        """
        with self._state.run.unsharded_state():
            ticket.apply(self._module, self.optimizers)
        self._state.run.stage_module.remote_gradients.update()
        self.use_freed_memory()

    def use_freed_memory(self) -> None:
        """Choose the in-flight limit and the grid again, as pruning has freed memory."""
        self._state.run.after_draw()

    @contextmanager
    def summon_full_params(self, rank0_only: bool = True) -> Iterator[None]:
        """Gather the module that a run under ``mpiexec`` or ``srun`` has left sharded.

        Inside the context, ``state_dict`` and the parameters are those of the full module; sparse
        weights stay sparse. Changes to other ranks' layers are lost when it ends. Collective over
        all ranks, one tensor at a time. If the module is not sharded, nothing happens.

        Args:
            rank0_only: whether only the first rank gets the full module; else every rank does.

        Raises:
            RuntimeError: during a run; use ``trainer.save_checkpoint`` there.
        """
        if isinstance(self._state, Running):
            raise RuntimeError(
                "summon_full_params() was called during a run. Call it when `fit`, `validate`, "
                "`test` or `predict` has returned; in hooks save with `trainer.save_checkpoint`."
                + see("values-between-layers")
            )
        if self.lightning_module is None:  # No run has begun.
            yield
            return
        with full_module(self.lightning_module, self.is_global_zero or not rank0_only):
            yield

    def keep_sharded(self) -> None:
        """Leave the module sharded when a run ends; the launcher calls this on each rank."""
        self._keeps_sharded = True

    def release_shard(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that this rank returns to the caller of the launcher, and free them."""
        if isinstance(self._state, LeftSharded):
            yield from self._state.stage_module.release()
            self._state = AtRest()
