"""Defines a small byte-level GPT as an ordinary LightningModule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_axosparse.examples.data import VOCABULARY
from lightning_axosparse.support.arguments import (
    COUNT,
    FRACTION,
    INDEX,
    NONE,
    NOT_NEGATIVE,
    SEED,
    TEXT,
    Kind,
    checked,
)
from lightning_axosparse.support.troubleshooting import see


class KeyValueCache:
    """The keys and values that one attention layer has computed for a batch of sequences.

    Its memory, for ``capacity`` tokens per sequence, is allocated with the first tokens, in their
    dtype and on their device. ``length`` is the number of tokens per sequence so far.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._memory: tuple[Tensor, Tensor] | None = None

    @property
    def full(self) -> bool:
        """Whether there is no room for another token."""
        return self.length == self.capacity

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of the next tokens, and return views of those of all tokens.

        Both have the shape (batch, heads, time, size). ``time`` must be 1 unless the cache is
        empty, as the attention has no causal mask for several tokens that follow others.
        """
        start, end = self.length, self.length + keys.shape[2]
        if end > self.capacity or (start and end > start + 1):
            raise ValueError(
                f"{end - start} tokens after {start} do not fit: a cache takes up to "
                f"{self.capacity} tokens, at first any number and then one at a time."
                + see("examples")
            )
        if self._memory is None:
            batch, heads, _, size = keys.shape
            shape = (batch, heads, self.capacity, size)
            self._memory = keys.new_empty(shape), values.new_empty(shape)
        for memory, new in zip(self._memory, (keys, values), strict=True):
            memory[:, :, start:end] = new
        self.length = end
        all_keys, all_values = (memory[:, :, :end] for memory in self._memory)
        return all_keys, all_values


TextBatch = tuple[Tensor, Tensor]

TOKENS = Kind(
    "an int64 tensor (batch, time) that is not empty",
    lambda value: (
        isinstance(value, Tensor)
        and value.dtype == torch.int64
        and value.dim() == 2
        and value.numel() > 0
    ),
)


class Embedding(nn.Module):
    """Embeddings of tokens and positions: int64 (batch, time) -> (batch, time, width)."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Add the embeddings of tokens and positions; ``start`` is the first token's position."""
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        embedded: Tensor = self.dropout(self.tokens(tokens) + self.positions(positions))
        return embedded


class Attention(nn.Module):
    """Causal self-attention: (batch, time, width) -> the same shape."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Attend from every position to itself and to earlier positions, those of ``cache`` too."""
        split = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        if cache is not None:
            keys, values = cache.extend(keys, values)
        dropout = self.dropout if self.training else 0.0
        is_first = queries.shape[2] == keys.shape[2]  # Else one token follows, and sees all.
        attended = F.scaled_dot_product_attention(
            queries, keys, values, dropout_p=dropout, is_causal=is_first
        )
        output: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return output


class Block(nn.Module):
    """A pre-norm transformer block: attention, then a two-layer MLP, both residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Add the attention's output, then the MLP's."""
        x = x + self.dropout(self.attention(self.attention_norm(x), cache))
        output: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return output


@contextmanager
def _evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Set all parts of a module to evaluation mode inside the context."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


class GPT(L.LightningModule):
    """A decoder-only transformer over bytes, built like GPT-2 (Radford et al., 2019).

    As in GPT-2, the head and the embedding are tied.

    Logs ``train_loss``, ``val_loss``, ``val_perplexity``, ``val_bits_per_byte`` and ``test_loss``.
    Losses are means over the batch, in nats per byte.

    Args:
        width: size of the residual stream.
        depth: number of transformer blocks.
        heads: attention heads per block; must divide ``width``.
        context: largest number of bytes in a sequence.
        dropout: probability of dropping an activation.
        learning_rate: learning rate of AdamW after the warm-up.
        weight_decay: weight decay of the matrices; biases and norms have none.
        warmup: fraction of the training in which the learning rate rises linearly; after it the
            learning rate falls along a half cosine to a tenth.
        vocabulary: number of tokens.

    Raises:
        ValueError: if an argument is out of range, or ``heads`` does not divide ``width``.
    """

    @checked(
        ValueError,
        width=COUNT,
        depth=COUNT,
        heads=COUNT,
        context=COUNT,
        dropout=FRACTION,
        learning_rate=NOT_NEGATIVE,
        weight_decay=NOT_NEGATIVE,
        warmup=FRACTION,
        vocabulary=COUNT,
    )
    def __init__(
        self,
        width: int = 192,
        depth: int = 6,
        heads: int = 6,
        context: int = 128,
        dropout: float = 0.0,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        warmup: float = 0.1,
        vocabulary: int = VOCABULARY,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(
                f"heads={heads} must divide width={width}: heads are equally wide."
                + see("examples")
            )
        self.save_hyperparameters()
        self.context = context
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup = warmup
        embedding = Embedding(vocabulary, context, width, dropout)
        head = nn.Linear(width, vocabulary, bias=False)
        head.weight = embedding.tokens.weight
        self.model = nn.Sequential(
            embedding,
            *(Block(width, heads, dropout) for _ in range(depth)),
            nn.Sequential(nn.LayerNorm(width), head),
        )
        self.example_input_array = torch.zeros(4, context, dtype=torch.int64)
        self._initialize(depth)

    def _initialize(self, depth: int) -> None:
        """Initialize as GPT-2: normal with 0.02, and smaller before residual additions."""
        for name, parameter in self.model.named_parameters():
            if parameter.dim() < 2:
                continue
            adds_to_residual = name.endswith(("attention.output.weight", "mlp.2.weight"))
            nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * depth) if adds_to_residual else 1))
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits of next tokens: int64 (batch, time) -> (batch, time, vocabulary)."""
        logits: Tensor = self.model(tokens)
        return logits

    def loss(self, batch: TextBatch) -> Tensor:
        """Compute the mean cross-entropy of the next tokens, in nats: a scalar."""
        tokens, next_tokens = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), next_tokens.flatten())

    def training_step(self, batch: TextBatch, batch_idx: int) -> Tensor:
        """Compute and log the loss of a batch."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: TextBatch, batch_idx: int) -> None:
        """Log the mean loss over the validation text."""
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        """Log the loss of the whole text as perplexity and as bits per byte."""
        loss = self.trainer.callback_metrics["val_loss"]
        self.log("val_perplexity", loss.exp())
        self.log("val_bits_per_byte", loss / math.log(2))

    def test_step(self, batch: TextBatch, batch_idx: int) -> None:
        """Log the mean loss over the test text."""
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Configure AdamW with a linear warm-up and a cosine decay over the whole training."""
        matrices = [parameter for parameter in self.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in self.parameters() if parameter.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95))
        steps = int(self.trainer.estimated_stepping_batches)
        warmup = max(1, round(self.warmup * steps))

        def rate(step: int) -> float:
            done = min(1.0, max(0, step - warmup) / max(1, steps - warmup))
            return min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * done))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def empty_caches(self) -> list[KeyValueCache]:
        """Return a cache for each block, to decode with."""
        _, *blocks, _ = self.model
        return [KeyValueCache(self.context) for _ in blocks]

    @torch.no_grad()
    def decode(self, tokens: Tensor, caches: Sequence[KeyValueCache]) -> Tensor:
        """Compute the logits of the token that follows ``tokens``, and add these to the caches.

        Args:
            tokens: int64 (batch, time), the tokens that follow those in ``caches``; one per
                sequence, unless the caches are empty.
            caches: one for each block; the keys and values of ``tokens`` are added to them.

        Returns:
            A tensor (batch, vocabulary), equal to the last logits that ``forward`` computes for all
            tokens so far.

        Raises:
            ValueError: if several tokens per sequence follow earlier ones at once.
            IndexError: if there are more tokens than the context.
        """
        embedding, *blocks, head = self.model
        x = embedding(tokens, caches[0].length)
        for block, cache in zip(blocks, caches, strict=True):
            x = block(x, cache)
        logits: Tensor = head(x[:, -1])
        return logits

    @checked(ValueError, tokens=TOKENS, n=INDEX, temperature=NOT_NEGATIVE, seed=SEED | NONE)
    def generate_tokens(
        self, tokens: Tensor, n: int, temperature: float = 0.8, seed: int | None = None
    ) -> Tensor:
        """Continue sequences, int64 (batch, time), by ``n`` tokens each; see :meth:`generate`.

        Keys and values of earlier tokens are cached, so each token is computed once, as long as all
        fit into the context. Beyond it the context slides: every token gets another position at
        every step, so all are computed again.
        """
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        with _evaluation_mode(self):
            caches = self.empty_caches()
            for _ in range(n):
                if caches[0].full:
                    caches = self.empty_caches()
                unseen = tokens[:, -self.context :][:, caches[0].length :]
                sampled = sample(self.decode(unseen, caches), temperature, generator)
                tokens = torch.cat([tokens, sampled.to(tokens.device)], dim=1)
        return tokens

    @checked(ValueError, prompt=TEXT)
    def generate(
        self, prompt: str, n: int, temperature: float = 0.8, seed: int | None = None
    ) -> str:
        """Continue ``prompt`` by ``n`` bytes.

        Args:
            prompt: the text to start from; not empty.
            n: number of bytes to add.
            temperature: 0 takes the likeliest byte each time, 1 samples from the model's
                distribution.
            seed: makes sampling repeatable.

        Returns:
            The prompt and its continuation; bytes that are not UTF-8 are replaced by U+FFFD.

        Raises:
            ValueError: if an argument is out of range.
        """
        tokens = torch.tensor([list(prompt.encode())], device=self.device)
        [generated] = self.generate_tokens(tokens, n, temperature, seed).tolist()
        return bytes(generated).decode(errors="replace")


def sample(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Choose a token for each sequence: (batch, vocabulary) -> int64 (batch, 1), on CPU."""
    logits = logits.float().cpu()
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
