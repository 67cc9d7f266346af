"""Language, speech and series, in the shape of the repositories that made them known."""

from __future__ import annotations

import inspect
import math
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.text import CharErrorRate

from tests.corpus.harness import entry
from tests.corpus.modules import numbers

VOCABULARY, LENGTH, WIDTH, COUNT = 13, 8, 16, 24
DOUBLE = {"precision": "64-true"}


class Characters(L.LightningModule):
    """Loads rows of characters and the characters that follow."""

    @classmethod
    def loader(cls, seed: int) -> Any:
        ids = torch.randint(VOCABULARY, (COUNT, LENGTH + 1), generator=numbers(seed))
        return DataLoader(TensorDataset(ids[:, :-1], ids[:, 1:]), batch_size=8)


class CausalSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        bias = torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (part.view(b, t, 2, c // 2).transpose(1, 2)
                   for part in self.c_attn(x).split(WIDTH, dim=2))  # fmt: skip
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = (
            nn.LayerNorm(WIDTH),
            CausalSelfAttention(),
            nn.LayerNorm(WIDTH),
        )
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(WIDTH, 2 * WIDTH),
                "c_proj": nn.Linear(2 * WIDTH, WIDTH),
                "act": nn.GELU(),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        m = self.mlp
        return x + m["c_proj"](m["act"](m["c_fc"](self.ln_2(x))))


def decay_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Weights of linear layers decay; biases, norms and embeddings do not."""
    decay, no_decay = set(), set()
    for mn, m in module.named_modules():
        for pn, _ in m.named_parameters(recurse=False):
            name = f"{mn}.{pn}" if mn else pn
            is_weight = pn.endswith("weight") and isinstance(m, nn.Linear)
            (decay if is_weight else no_decay).add(name)
    named = dict(module.named_parameters())
    decay &= named.keys()
    no_decay &= named.keys()
    return [
        {"params": [named[n] for n in sorted(decay)], "weight_decay": 0.1},
        {"params": [named[n] for n in sorted(no_decay)], "weight_decay": 0.0},
    ]


@entry(trainer={**DOUBLE, "accumulate_grad_batches": 2})
class NanoGPT(Characters):
    """nanoGPT: a ModuleDict, tied embeddings, a loss inside the network, perplexity in the log."""

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = nn.ModuleDict(
                {
                    "wte": nn.Embedding(VOCABULARY, WIDTH),
                    "wpe": nn.Embedding(LENGTH, WIDTH),
                    "drop": nn.Dropout(0.0),
                    "h": nn.ModuleList([Block() for _ in range(4)]),
                    "ln_f": nn.LayerNorm(WIDTH),
                }
            )
            self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.transformer["wte"].weight = self.lm_head.weight

        def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
            pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
            x = self.transformer["drop"](
                self.transformer["wte"](idx) + self.transformer["wpe"](pos)
            )
            for block in self.transformer["h"]:
                x = block(x)
            x = self.transformer["ln_f"](x)
            if targets is None:
                return self.lm_head(x[:, [-1], :]), None
            logits = self.lm_head(x)
            loss = F.cross_entropy(
                logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1
            )
            return logits, loss

    def __init__(self) -> None:
        super().__init__()
        self.model = self.GPT()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        _, loss = self.model(*batch)
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/perplexity", torch.exp(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, loss = self.model(*batch)
        self.log_dict({"val/loss": loss, "val/perplexity": loss.exp()}, sync_dist=True)

    def configure_optimizers(self) -> Any:
        fused = "fused" in inspect.signature(torch.optim.AdamW).parameters
        assert fused
        optimizer = torch.optim.AdamW(decay_groups(self), lr=1e-3, betas=(0.9, 0.99))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda it: min(1, (it + 1) / 3))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Utterances(Dataset):
    """Spectrograms of different lengths and what was said, as short rows of characters."""

    def __init__(self, seed: int) -> None:
        generator = numbers(seed)
        self.spectra = torch.randn(16, 20, 6, generator=generator)
        self.lengths = torch.randint(14, 21, (16,), generator=generator)
        self.texts = torch.randint(1, VOCABULARY, (16, 4), generator=generator)

    def __len__(self) -> int:
        return len(self.spectra)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.spectra[index, : self.lengths[index]], self.texts[index, : 2 + index % 3]


def collate_utterances(samples: list[Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    spectra = nn.utils.rnn.pad_sequence([one for one, _ in samples], batch_first=True)
    texts = nn.utils.rnn.pad_sequence([one for _, one in samples], batch_first=True)
    lengths = torch.tensor([len(one) // 2 for one, _ in samples])
    return spectra, texts, lengths, torch.tensor([len(one) for _, one in samples])


class BidirectionalGRU(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(inputs)
        self.gru = nn.GRU(inputs, width, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(F.gelu(self.layer_norm(x)))[0]


@entry(trainer=DOUBLE)
class DeepSpeech(L.LightningModule):
    """Speech recognition by CTC, with an error rate of characters."""

    def __init__(self) -> None:
        super().__init__()
        self.cnn = nn.Conv1d(6, 8, 3, stride=2, padding=1)
        self.birnn_layers = nn.ModuleList(
            BidirectionalGRU(8 if i == 0 else 16, 8) for i in range(3)
        )
        self.classifier = nn.Linear(16, VOCABULARY)
        self.criterion = nn.CTCLoss(blank=0, zero_infinity=True)
        self.cer = CharErrorRate()

    @classmethod
    def loader(cls, seed: int) -> Any:
        return DataLoader(Utterances(seed), batch_size=8, collate_fn=collate_utterances)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cnn(x.transpose(1, 2)).transpose(1, 2)
        for layer in self.birnn_layers:
            x = layer(x)
        return self.classifier(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        spectra, texts, input_lengths, label_lengths = batch
        output = F.log_softmax(self(spectra), dim=2).transpose(0, 1)
        loss = self.criterion(output, texts, input_lengths, label_lengths)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        spectra, texts, _, label_lengths = batch
        guess = self(spectra).argmax(2)
        decoded = ["".join(chr(97 + int(c)) for c in row if c) for row in guess]
        said = ["".join(chr(97 + int(c)) for c in row[:n])
                for row, n in zip(texts, label_lengths, strict=True)]  # fmt: skip
        self.cer.update(decoded, said)
        self.log("val_cer", self.cer, batch_size=len(spectra))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 5e-4)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-4, total_steps=10)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@entry(trainer=DOUBLE)
class WordLanguageModel(Characters):
    """The classic recurrent language model, a layer a module."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.drop = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Dropout(0.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.rnn(x)[0])

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(VOCABULARY, WIDTH)
        self.rnns = nn.ModuleList(self.Recurrent() for _ in range(3))
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)

    def _loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.encoder(x)
        for rnn in self.rnns:
            x = rnn(x)
        return nn.NLLLoss()(F.log_softmax(self.decoder(x).view(-1, VOCABULARY), 1), y.reshape(-1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, prog_bar=True)
        self.log("ppl", torch.exp(loss), prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("valid_ppl", math.e ** self._loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=5.0)
