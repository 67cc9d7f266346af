"""Experts that are spread over ranks give the same numbers as on one process.

All rows of one number of ranks run in one job, because starting ranks takes longer than a row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.utilities import grad_norm
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.experts.traffic import Traffic
from lightning_axosparse import AxoSparseStrategy, ExpertParallel, TensorParallel
from tests.parity.cases import (
    Record,
    difference,
    loaded,
    mean_losses,
    own_attributes,
    recorded,
    trainer,
)
from tests.parity.test_tensor_parallel import (
    FIXED,
    VOCABULARY,
    WIDTH,
    Language,
    Saves,
    Tokens,
    loaders,
    plan,
)
from tests.parity.test_tensor_parallel import Block as SplitBlock
from tests.ranks import PATIENCE, run_ranks

# Jobs of four and eight ranks take minutes where two cores run several.
pytestmark = pytest.mark.timeout(PATIENCE)

EXPERTS, LAYERS = 4, 2


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Experts(nn.Module):
    """A module of one's own, which calls the experts that have tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden_states)
        for number in top_k_index.unique().tolist():
            token, place = torch.where(top_k_index == number)
            computed = self.experts[number](hidden_states[token])
            result = result.index_add(0, token, computed * top_k_weights[token, place, None])
        return result


class All(Experts):
    """Calls every expert, also one without tokens."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(top_k_index == number)
            computed = expert(hidden_states[token])
            result = result.index_add(0, token, computed * top_k_weights[token, place, None])
        return result


class Block(nn.Module):
    """Attention is left out: what a token is does not depend on others."""

    def __init__(self, make: type[Experts], route: str) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts, self.route = make(), route

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        if self.route == "first":  # all tokens to the experts of one rank
            chosen = torch.arange(2).expand_as(chosen)
        elif self.route == "none":  # not a token for any expert
            tokens, chosen, weights = tokens[:0], chosen[:0], weights[:0]
        computed = self.experts(tokens, chosen, weights)
        return x + (computed.view_as(x) if len(tokens) else x * computed.sum())


class Own(Language):
    def __init__(
        self, make: type[Experts] = Experts, route: str = "best", slow: bool = False
    ) -> None:
        super().__init__((Block(make, route) for _ in range(LAYERS)), slow)

    def configure_optimizers(self) -> Any:
        if self.dtype == torch.float64:
            return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Both(Own):
    """Blocks of attention that is split, and of experts."""

    def __init__(self) -> None:
        blocks = (nn.Sequential(SplitBlock(), Block(Experts, "best")) for _ in range(LAYERS))
        Language.__init__(self, blocks)


class Norms(Own):
    """Logs norms of gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict({name: float(norm) for name, norm in grad_norm(self, 2).items()})


class Padded(Own):
    """Tokens that do not count: in some micro-batches all of them, in others a few."""

    def loss(self, ids: Tensor) -> Tensor:
        targets = ids[:, 1:].masked_fill(ids[:, 1:] % 3 == 0, -100)
        targets = targets.masked_fill(ids[:, :1] < VOCABULARY // 2, -100)
        return nn.functional.cross_entropy(self(ids[:, :-1]).flatten(0, 1), targets.flatten())


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "use_cache": False,
}


class Mixtral(Own):
    def __init__(self, balanced: bool = False, implementation: str = "eager") -> None:
        L.LightningModule.__init__(self)
        from transformers import MixtralConfig, MixtralForCausalLM

        sizes = {**SIZES, "intermediate_size": 2 * WIDTH, "num_local_experts": EXPERTS}
        how = {"output_router_logits": balanced, "experts_implementation": implementation}
        self.network = MixtralForCausalLM(MixtralConfig(**sizes, **how))

        self.balanced = balanced

    def forward(self, ids: Tensor) -> Tensor:
        return self.network(ids).logits

    def loss(self, ids: Tensor) -> Tensor:
        return self.network(ids, labels=ids).loss if self.balanced else super().loss(ids)


class Adapted(Mixtral):
    """LoRA of PEFT on experts that are slices of a parameter, and on nothing else."""

    def __init__(self) -> None:
        super().__init__()
        targets = ["experts.gate_up_proj", "experts.down_proj"]
        lora = LoraConfig(r=2, target_parameters=targets, init_lora_weights=False)
        self.network = get_peft_model(self.network, lora)


class Qwen(Mixtral):
    """Its layers have an expert for all tokens besides."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

        widths = {"moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": WIDTH}
        sizes = {**SIZES, **widths, "num_experts": EXPERTS, "intermediate_size": WIDTH}
        config = Qwen2MoeConfig(**sizes, experts_implementation="eager")
        self.network, self.balanced = Qwen2MoeForCausalLM(config), False


OWN: dict[str, Any] = {"pipeline": "blocks", "experts": "blocks.*.experts"}
ADAPTED: dict[str, Any] = {
    "pipeline": "network.base_model.model.model.layers",
    "experts": "auto",
}
SPLIT: dict[str, Any] = {
    "experts": "blocks.*.1.experts",
    "tensor_parallel": TensorParallel(2, {f"blocks.*.0.{n}": p for n, p in plan(False).items()}),
}
HUGGING_FACE: dict[str, Any] = {"pipeline": "network.model.layers", "experts": "auto"}
F64: dict[str, Any] = {"precision": "64-true"}


def spread(ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    """The strategy's arguments where the experts of ``options`` are spread over so many ranks."""
    others = {name: value for name, value in options.items() if name != "experts"}
    return {**others, "expert_parallel": ExpertParallel(ranks, options["experts"])}


# Row: module, strategy, trainer.
ROWS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "own": (Own, OWN, F64),
    "own, float32": (Own, OWN, {}),
    "every expert is called": (lambda: Own(All), OWN, F64),
    "all to one rank": (lambda: Own(route="first"), OWN, F64),
    "no token at all": (lambda: Own(route="none"), OWN, F64),
    "norms of gradients": (Norms, OWN, {**F64, "gradient_clip_val": 0.05}),
    "recomputed": (Own, {**OWN, "recompute": 1}, F64),
    "slow ranks": (lambda: Own(slow=True), OWN, {**F64, "max_epochs": 3}),
    "averaged": (Own, OWN, {**F64, "callbacks": [lambda: EMAWeightAveraging(decay=0.8)]}),
    "accumulated": (Own, OWN, {**F64, "accumulate_grad_batches": 2}),
    "padded": (Padded, OWN, F64),
    "split": (Both, SPLIT, F64),
    "Mixtral": (Mixtral, HUGGING_FACE, F64),
    # torch's grouped_mm takes no float64.
    "grouped": (lambda: Mixtral(implementation="grouped_mm"), HUGGING_FACE, {}),
    "batched": (lambda: Mixtral(implementation="batched_mm"), HUGGING_FACE, {}),
    "balanced": (lambda: Mixtral(True), HUGGING_FACE, F64),
    "Qwen": (Qwen, HUGGING_FACE, F64),
    "LoRA": (Adapted, ADAPTED, F64),
    "uneven": (Own, OWN, F64),
    "uneven, cut by hand": (Own, {**OWN, "split_batch": Tensor.chunk}, F64),
}
UNEVEN = {"uneven", "uneven, cut by hand"}
# A replica's loss is a mean over its own tokens, or a function of several means; transformers adds
# up what balances experts in float32, so that it depends on the micro-batches.
REPLICATED = {"padded", "balanced", *UNEVEN}


def uneven(seed: int, sizes: list[int], replica: int) -> DataLoader:
    """Batches of these sizes, with other samples for each replica."""
    numbers = torch.arange(sum(sizes)) + 16 * replica
    batches = [part.tolist() for part in numbers.split(sizes)]
    return DataLoader(Tokens(seed, 32), batch_sampler=batches)


def run(row: str, strategy: Any, ranks: int, resumes: Path | None = None, **options: Any) -> Record:
    make, _, settings = ROWS[row]
    L.seed_everything(0, verbose=False)
    module = make()
    callbacks = [each() for each in settings.get("callbacks", ())]
    callbacks += options.pop("callbacks", [])
    fit = trainer(strategy, ranks, **{**FIXED, **settings, **options, "callbacks": callbacks})
    data = loaders(fit)
    if row in UNEVEN:  # The last batches of one replica make fewer micro-batches.
        replica = fit.strategy.distributed_sampler_kwargs["rank"]
        sizes = ([4, 4, 3], [4, 3]) if replica == 0 else ([4, 4, 1], [4, 2])
        data = uneven(1, sizes[0], replica), uneven(2, sizes[1], replica)
    fit.fit(module, *data, ckpt_path=resumes)
    return recorded(fit, module)


def half_way(folder: Path, strategy: Any, ranks: int) -> None:
    """Train the first of two epochs, and save."""
    run("averaged", strategy, ranks, max_epochs=1, callbacks=[Saves(folder)])


def resumed(folder: Path, strategy: Any, ranks: int) -> Record:
    """The second epoch, from a checkpoint."""
    return run("averaged", strategy, ranks, folder / "half.ckpt")


class Looks(L.Callback):
    """Notes what a rank keeps and what hooks see."""

    def on_train_batch_end(self, run: L.Trainer, module: Any, *_: Any) -> None:
        held = run.strategy.local_parameters()
        self.kept = {name: tuple(p.shape) for name, p in held.items()}
        states = run.optimizers[0].state
        self.bytes = sum(value.nbytes for p in held.values() for value in (p, *states[p].values()))
        self.whole = {n: tuple(p.shape) for n, p in run.strategy.whole_parameters()}


def facts(row: str, experts: int, **others: Any) -> dict[str, Any]:
    looks, options = Looks(), {**spread(experts, ROWS[row][1]), **others}
    with Traffic.counted() as traffic:
        run(row, AxoSparseStrategy(2, 2, **options), 4, callbacks=[looks], max_steps=2)
    return {**own_attributes(looks), "sent": traffic.tokens, "not sent": traffic.kept}


def beside_steps(folder: Path) -> dict[str, Any]:
    """What two stages of two replicas do besides training."""
    found: dict[str, Any] = {"facts": facts("own", 2)}
    found["slices"] = facts("Mixtral", 2)
    found["not spread"] = facts("Mixtral", 1)
    found["recomputed"] = facts("own", 2, recompute=1)
    half_way(folder, AxoSparseStrategy(2, 2, **spread(2, OWN)), 4)
    ways = {
        "here": (2, spread(2, OWN)),
        "not spread": (2, {"pipeline": "blocks"}),
        "over four": (1, spread(4, OWN)),
    }
    for way, (g_inter, options) in ways.items():
        strategy = AxoSparseStrategy(g_inter, 2, **options)
        found[f"resumed, {way}"] = resumed(folder, strategy, 4)
    found["through a folder"] = through_a_folder(folder / "folder.ckpt")
    return found


def rows_of(g_tensor: int) -> list[str]:
    """With a tensor group, those whose module has a plan for it."""
    if g_tensor == 1:
        return [row for row in ROWS if row != "split"]
    planned = [row for row, (_, options, _) in ROWS.items() if options in (HUGGING_FACE, SPLIT)]
    return [row for row in planned if row not in REPLICATED]


def on_grid(g_inter: int, g_tensor: int) -> dict[str, tuple[Record, Record | None]]:
    ranks, found = 2 * g_inter * g_tensor, {}
    for row in rows_of(g_tensor):
        options = {"g_inter": g_inter, "microbatches": 2, "tensor_parallel": g_tensor}
        options.update(spread(2, ROWS[row][1]))
        over_two = run(row, AxoSparseStrategy(**options), ranks)
        whole = None
        if row in REPLICATED:
            del options["expert_parallel"]
            whole = run(row, AxoSparseStrategy(**options), ranks)
        found[row] = over_two, whole
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Record]:
    return {row: run(row, "auto", 1) for row in ROWS.keys() - REPLICATED}


@pytest.mark.slow
@pytest.mark.parametrize(("g_inter", "g_tensor", "nodes"), [(2, 1, 1), (1, 2, 1), (1, 2, 2)])
def test_two_replicas_share_experts_and_train_as_one_process(
    g_inter: int, g_tensor: int, nodes: int, alone: dict[str, Record], monkeypatch: Any
) -> None:
    monkeypatch.setenv("MPIR_CVAR_NUM_CLIQUES", str(nodes))  # The nodes that MPICH believes in.
    ranks = run_ranks(2 * g_inter * g_tensor, on_grid, g_inter, g_tensor)
    wrong = {}
    for row in rows_of(g_tensor):
        tolerance = 1e-10 if "precision" in ROWS[row][2] else 1e-5
        losses = mean_losses(found[row][0] for found in ranks)
        for found in ranks:
            spread, whole = found[row]
            if whole is None:
                whole, spread.losses = alone[row], losses
            if not difference(spread, whole) <= tolerance:
                wrong[row] = difference(spread, whole)
    assert not wrong


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("checkpoints")
    return run_ranks(4, beside_steps, folder), folder


@pytest.mark.slow
def test_a_checkpoint_is_that_of_one_process_and_resumes_on_other_grids(
    four: Any, tmp_path: Path
) -> None:
    ranks, folder = four
    half_way(tmp_path, "auto", 1)
    expected = resumed(tmp_path, "auto", 1)
    ours, theirs = loaded(folder / "half.ckpt", tmp_path / "half.ckpt")
    for state in ("state_dict", "current_model_state"):
        torch.testing.assert_close(ours[state], theirs[state], atol=1e-12, rtol=0)
    mine, other = (saved["optimizer_states"][0] for saved in (ours, theirs))
    torch.testing.assert_close(mine["state"], other["state"], atol=1e-12, rtol=0)
    again = Own.load_from_checkpoint(folder / "half.ckpt", weights_only=False)
    torch.testing.assert_close(again.state_dict(), theirs["state_dict"], atol=1e-6, rtol=0)
    records = [resumed(folder, "auto", 1)]
    for found in ranks:
        records += [found[f"resumed, {way}"] for way in ("here", "not spread", "over four")]
    for record in records:
        torch.testing.assert_close(record.weights, expected.weights, rtol=0, atol=1e-10)


class SavesFirst(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, run: L.Trainer, *_: Any) -> None:
        if run.current_epoch == 0:
            run.save_checkpoint(self.path)


def through_a_folder(path: Path) -> Record:
    """Two epochs, the second on another grid, from a folder to which each stage has written."""
    options = {**spread(2, HUGGING_FACE), "tensor_parallel": 2}
    strategy = AxoSparseStrategy(1, 2, save_distributed_checkpoint=True, **options)
    run("Mixtral", strategy, 4, max_epochs=1, callbacks=[SavesFirst(path)])
    strategy = AxoSparseStrategy(2, 2, pipeline="network.model.layers")
    return run("Mixtral", strategy, 4, path)


@pytest.mark.slow
def test_a_checkpoint_may_be_a_folder(four: Any, tmp_path: Path) -> None:
    # From a file, as loading into a module of float32 rounds.
    run("Mixtral", "auto", 1, max_epochs=1, callbacks=[SavesFirst(tmp_path / "alone.ckpt")])
    expected = run("Mixtral", "auto", 1, tmp_path / "alone.ckpt")
    ranks, folder = four
    for found in ranks:
        actual = found["through a folder"].weights
        torch.testing.assert_close(actual, expected.weights, atol=1e-10, rtol=0)
    assert (folder / "folder.ckpt").is_dir()


@pytest.mark.slow
def test_layers_that_are_recomputed_send_no_token_twice(four: Any) -> None:
    for found in four[0]:
        assert found["recomputed"]["sent"] == found["facts"]["sent"] > 0
        assert found["facts"]["not sent"] == 0
        assert found["recomputed"]["not sent"] > 0


@pytest.mark.slow
def test_a_rank_keeps_its_experts_and_hooks_get_all(four: Any) -> None:
    whole, slices = (
        {name: tuple(p.shape) for name, p in make().named_parameters()} for make in (Own, Mixtral)
    )
    for rank, found in enumerate(four[0]):
        stage, replica = 1 - rank % 2, rank // 2
        assert found["facts"]["whole"] == whole
        assert found["slices"]["whole"] == slices
        for expert in range(EXPERTS):
            name = f"blocks.{stage}.experts.experts.{expert}.up.weight"
            rows = 2 * WIDTH if expert // 2 == replica else 0
            assert found["facts"]["kept"][name] == (rows, WIDTH)
        layer = f"network.model.layers.{stage}.mlp"
        kept = found["slices"]["kept"]
        assert kept[f"{layer}.experts.down_proj"] == (EXPERTS // 2, WIDTH, 2 * WIDTH)
        assert kept[f"{layer}.gate.weight"] == (EXPERTS, WIDTH)
        spread = sum(torch.Size(shape).numel() for name, shape in kept.items() if "experts" in name)
        saved = found["not spread"]["bytes"] - found["slices"]["bytes"]
        assert saved == 2 * 8 * spread  # values and momentum of the other half, float64
