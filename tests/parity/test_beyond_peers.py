"""What pipelines commonly refuse or get wrong: shapes that change, short batches, ties, evaluation.

All rows of one number of ranks run in one job, in float64.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import Record, difference, recorded, trainer
from tests.ranks import run_ranks

WORDS, WIDTH = 11, 8
# Samples and words of each batch: the length changes, the last batches are short.
TRAINING = [(6, 7), (6, 4), (6, 9), (5, 7), (2, 5), (1, 3)]
VALIDATION = [(4, 6), (3, 8), (1, 2)]
# Row: stages, strategy.
ROWS: dict[str, tuple[int, dict[str, Any]]] = {
    "fewer samples than micro-batches": (2, {"microbatches": 4}),
    "recomputed": (2, {"microbatches": 3, "recompute": "sqrt"}),
    "one micro-batch": (2, {"microbatches": 1}),
    "fewer micro-batches than stages": (3, {"microbatches": 2}),
    "more micro-batches than samples": (3, {"microbatches": 7, "balance": [1, 3, 1]}),
    "1f1b": (3, {"microbatches": 3, "schedule": "1f1b"}),
}


class Block(nn.Module):
    """Attention over the words that a mask leaves; hands on how sure it was, too."""

    def __init__(self) -> None:
        super().__init__()
        # A bias of the keys has no gradient but rounding errors, which Adam would make steps of.
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, scale: Tensor, *, mask: Tensor, causal: bool = False
    ) -> dict[str, Tensor]:
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        scores = query @ key.mT / WIDTH**0.5
        allowed = mask[:, None, :]
        if causal:
            allowed = allowed & torch.ones_like(scores, dtype=torch.bool).tril()
        weights = scores.masked_fill(~allowed, -1e9).softmax(-1)
        return {"x": x + self.out(weights @ value), "scale": scale * (1 + weights.amax(-1).mean(1))}


class Tagger(L.LightningModule):
    """Blocks in a list, embedding tied to the head, the first block's weight to the last one's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.blocks[4].out.weight = self.blocks[0].out.weight

    def forward(self, words: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        state = {"x": self.embed(words), "scale": torch.ones(len(words), dtype=torch.float64)}
        for index, block in enumerate(self.blocks):
            state = block(state["x"], state["scale"], mask=mask, causal=index == 2)
        return self.head(state["x"]), state["scale"]

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        logits, scale = self(batch["words"], batch["mask"])
        losses = nn.functional.cross_entropy(logits.mT, batch["tags"], reduction="none").mean(1)
        self.log("train", losses.mean(), on_step=True, on_epoch=True, batch_size=len(scale))
        extras = {"scale": scale.mean().detach(), "tags": logits.argmax(-1).flatten(1).sum(1)}
        return {"loss": (losses * scale).mean(), "extras": extras, "names": batch["names"]}

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        logits, scale = self(batch["words"], batch["mask"])
        loss = nn.functional.cross_entropy(logits.mT, batch["tags"])
        self.log("val", loss, batch_size=len(scale))
        return {"val": loss, "scale": scale, "names": batch["names"]}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def batches(shapes: list[tuple[int, int]]) -> DataLoader:
    """Dict batches with names of the samples besides tensors."""
    generator = torch.Generator().manual_seed(len(shapes))
    made = []
    for samples, length in shapes:
        words = torch.randint(WORDS, (samples, length), generator=generator)
        mask = torch.rand(samples, length, generator=generator) > 0.3
        mask[:, 0] = True
        names = [f"text {samples} {index}" for index in range(samples)]
        made.append({"words": words, "tags": words.flip(1), "mask": mask, "names": names})
    return DataLoader(made, batch_size=None)


class Outputs(L.Callback):
    """Keeps what the steps returned."""

    def __init__(self) -> None:
        self.trained: list[Any] = []
        self.validated: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.trained.append(outputs)

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.validated.append(outputs)


def train(strategy: Any, ranks: int = 1) -> tuple[Record, list[Any], list[Any]]:
    """Validate, train two epochs with validation in between, and validate again."""
    L.seed_everything(0, verbose=False)
    module, outputs = Tagger(), Outputs()
    run = trainer(
        strategy,
        ranks,
        precision="64-true",
        max_epochs=2,
        val_check_interval=2,
        gradient_clip_val=0.5,
        callbacks=[outputs],
    )
    run.validate(module, batches(VALIDATION), verbose=False)
    run.fit(module, batches(TRAINING), batches(VALIDATION))
    run.validate(module, batches(VALIDATION), verbose=False)
    return recorded(run, module), outputs.trained, outputs.validated


def train_rows(ranks: int) -> dict[str, Any]:
    return {
        row: train(AxoSparseStrategy(g_inter=ranks, **options), ranks)
        for row, (stages, options) in ROWS.items()
        if stages == ranks
    }


@pytest.fixture(scope="module")
def runs() -> dict[int, list[dict[str, Any]]]:
    """What every row gave on every rank, by number of ranks."""
    return {ranks: run_ranks(ranks, train_rows, ranks) for ranks in (2, 3)}


@pytest.fixture(scope="module")
def expected() -> Any:
    """What one process gives."""
    return train("auto")


def assert_same(actual: Any, expected: Any) -> None:
    leaves, structure = pytree.tree_flatten(actual)
    other_leaves, other_structure = pytree.tree_flatten(expected)
    assert structure == other_structure
    for leaf, other in zip(leaves, other_leaves, strict=True):
        if isinstance(leaf, str):
            assert leaf == other
        else:
            torch.testing.assert_close(leaf, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("row", ROWS)
def test_a_pipeline_does_what_one_process_does(row: str, runs: Any, expected: Any) -> None:
    record, trained, validated = expected
    assert len(trained) == 2 * len(TRAINING)
    assert len(validated) == (1 + 6 + 1) * len(VALIDATION) + 2, "two batches before fit"
    ranks = [rank[row] for rank in runs[ROWS[row][0]]]
    for actual, *_ in ranks:
        assert difference(record, actual) <= 1e-12
    # The last stage, which is the first rank, returns all of the step's output.
    assert_same(ranks[0][1:], (trained, validated))
