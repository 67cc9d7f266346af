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
from tests.corpus.modules import Rows, numbers

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


@entry(trainer={**DOUBLE, "gradient_clip_val": 1.0})
class MinGPT(Characters):
    """minGPT with Lightning: blocks in a Sequential, positions as a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(VOCABULARY, WIDTH)
        self.pos_emb = nn.Parameter(torch.zeros(1, LENGTH, WIDTH))
        self.drop = nn.Dropout(0.0)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=0.02)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(decay_groups(self), lr=6e-4, betas=(0.9, 0.95))

    def forward(self, idx: Tensor) -> Tensor:
        t = idx.size(1)
        x = self.drop(self.tok_emb(idx) + self.pos_emb[:, :t, :])
        return self.head(self.ln_f(self.blocks(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        idx, targets = batch
        logits = self(idx)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        self.log("train_loss", loss)
        return loss


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


class PositionalEncoding(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0, longest: int = 32) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        position = torch.arange(longest).unsqueeze(1)
        div = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        pe = torch.zeros(1, longest, width)
        pe[0, :, 0::2], pe[0, :, 1::2] = torch.sin(position * div), torch.cos(position * div)
        self.register_buffer("pe", pe, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.pe[:, : x.size(1)])


@entry(trainer=DOUBLE)
class LightningTransformer(Characters):
    """Lightning's demonstration: nn.Transformer on words and the words before."""

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pos_encoder = PositionalEncoding(WIDTH)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 24, 0.0, batch_first=True)
            self.decoder = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
            t = inputs.shape[1]
            mask = torch.tril(torch.ones(t, t) == 1).to(self.embedding.weight.dtype)
            mask = mask.masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, 0.0)
            src = self.pos_encoder(self.embedding(inputs) * math.sqrt(WIDTH))
            target = self.pos_encoder(self.embedding(target) * math.sqrt(WIDTH))
            output = self.transformer(src, target, tgt_mask=mask)
            return F.log_softmax(self.decoder(output), dim=-1).view(-1, VOCABULARY)

    def __init__(self) -> None:
        super().__init__()
        self.model = self.Transformer()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, target = batch
        output = self.model(inputs, target)
        return F.nll_loss(output, target.view(-1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


class EncoderBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.linear_net = nn.Sequential(
            nn.Linear(WIDTH, 24), nn.Dropout(0.0), nn.ReLU(inplace=True), nn.Linear(24, WIDTH)
        )
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, t, _ = x.size()
        q, k, v = self.qkv(x).reshape(b, t, 2, -1).permute(0, 2, 1, 3).chunk(3, dim=-1)
        logits = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        if mask is not None:
            logits = logits.masked_fill(mask == 0, -9e15)
        values = (logits.softmax(-1) @ v).permute(0, 2, 1, 3).reshape(b, t, WIDTH)
        x = self.norm1(x + self.o(values))
        return self.norm2(x + self.linear_net(x))


class TransformerEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([EncoderBlock() for _ in range(4)])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask=mask)
        return x


@entry(trainer={**DOUBLE, "gradient_clip_val": 5})
class UvAReversePredictor(Characters):
    """The notebook on transformers, with its warm-up by cosine."""

    def __init__(self) -> None:
        super().__init__()
        self.input_net = nn.Sequential(nn.Dropout(0.0), nn.Linear(VOCABULARY, WIDTH))
        self.positional_encoding = PositionalEncoding(WIDTH)
        self.transformer = TransformerEncoder()
        self.output_net = nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
            nn.ReLU(inplace=True),
            nn.Dropout(0.0),
            nn.Linear(WIDTH, VOCABULARY),
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.positional_encoding(self.input_net(x))
        return self.output_net(self.transformer(x, mask=mask))

    def _calculate_loss(self, batch: Any, mode: str) -> Tensor:
        inp, _ = batch
        labels = inp.flip(1)
        inp = F.one_hot(inp, num_classes=VOCABULARY).to(self.output_net[0].weight.dtype)
        preds = self.forward(inp)
        loss = F.cross_entropy(preds.view(-1, preds.size(-1)), labels.view(-1))
        acc = (preds.argmax(dim=-1) == labels).float().mean()
        self.log(f"{mode}_loss", loss)
        self.log(f"{mode}_acc", acc)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._calculate_loss(batch, mode="train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._calculate_loss(batch, mode="val")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=5e-4)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda epoch: min(1.0, epoch / 3) * 0.5 * (1 + math.cos(epoch / 20))
        )
        return optimizer

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.lr_scheduler.step()


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


@entry(trainer=DOUBLE)
class SequenceToSequence(L.LightningModule):
    """Translation with padding on both sides and smoothed labels."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = (
            nn.Embedding(VOCABULARY, WIDTH, padding_idx=0),
            nn.Embedding(VOCABULARY, WIDTH, padding_idx=0),
        )
        self.positions = PositionalEncoding(WIDTH)
        self.encoder_layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 24, 0.0, batch_first=True) for _ in range(2)
        )
        self.decoder_layers = nn.ModuleList(
            nn.TransformerDecoderLayer(WIDTH, 2, 24, 0.0, batch_first=True) for _ in range(2)
        )
        self.generator = nn.Linear(WIDTH, VOCABULARY)
        self.criterion = nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1)

    @classmethod
    def loader(cls, seed: int) -> Any:
        generator = numbers(seed)
        source = torch.randint(1, VOCABULARY, (16, LENGTH), generator=generator)
        lengths = torch.randint(3, LENGTH + 1, (16, 1), generator=generator)
        source = source.where(torch.arange(LENGTH) < lengths, 0)
        return DataLoader(Rows(source=source, target=source.flip(1)[:, :6]), batch_size=8)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        padding = source == 0
        memory = self.positions(self.source(source))
        for layer in self.encoder_layers:
            memory = layer(memory, src_key_padding_mask=padding)
        x = self.positions(self.target(target))
        t = target.size(1)
        causal = torch.triu(torch.ones(t, t, dtype=torch.bool), diagonal=1)
        for layer in self.decoder_layers:
            x = layer(x, memory, tgt_mask=causal, memory_key_padding_mask=padding)
        return self.generator(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        source, target = batch["source"], batch["target"]
        logits = self(source, target[:, :-1])
        loss = self.criterion(logits.reshape(-1, VOCABULARY), target[:, 1:].reshape(-1))
        self.log("train_loss", loss, batch_size=source.size(0))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda n: WIDTH**-0.5 * min((n + 1) ** -0.5, (n + 1) * 4**-1.5) * 0.1
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Series(L.LightningModule):
    """Loads windows of series: what was, and what comes."""

    @classmethod
    def loader(cls, seed: int) -> Any:
        series = torch.randn(COUNT, 16, generator=numbers(seed)).cumsum(1)
        return DataLoader(TensorDataset(series[:, :12], series[:, 12:]), batch_size=8)


class NBeatsBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.theta_b, self.theta_f = nn.Linear(16, 12, bias=False), nn.Linear(16, 4, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(x)
        return self.theta_b(x), self.theta_f(x)


@entry(trainer={**DOUBLE, "gradient_clip_val": 0.1})
class NBeats(Series):
    """pytorch-forecasting: blocks that each explain what the ones before have left."""

    def __init__(self) -> None:
        super().__init__()
        self.net_blocks = nn.ModuleList(NBeatsBlock() for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scale = x.abs().mean(dim=1, keepdim=True) + 1e-3
        backcast, forecasts = x / scale, []
        for block in self.net_blocks:
            backcast_block, forecast_block = block(backcast)
            backcast = backcast - backcast_block
            forecasts.append(forecast_block)
        return {
            "prediction": sum(forecasts) * scale,  # type: ignore[dict-item]
            "backcast": backcast * scale,
        }

    def step(self, batch: Any, name: str) -> Tensor:
        x, y = batch
        out = self(x)
        mase = (out["prediction"] - y).abs() / (x[:, 1:] - x[:, :-1]).abs().mean(1, keepdim=True)
        loss = mase.mean() + 0.1 * out["backcast"].abs().mean()
        self.log(f"{name}_loss", loss, on_step=name == "train", on_epoch=True, batch_size=len(x))
        error = out["prediction"] - y
        self.log(f"{name}_MAE", error.abs().mean(), on_epoch=True, batch_size=len(x))
        self.log(f"{name}_RMSE", error.pow(2).mean().sqrt(), on_epoch=True, batch_size=len(x))
        smape = 2 * error.abs() / (out["prediction"].abs() + y.abs() + 1e-8)
        self.log(f"{name}_SMAPE", smape.mean(), on_epoch=True, batch_size=len(x))
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch, "val")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
        }


@entry(trainer=DOUBLE)
class DeepAR(Series):
    """A likelihood of the next value, by recurrent layers."""

    class Layer(nn.Module):
        def __init__(self, inputs: int) -> None:
            super().__init__()
            self.rnn = nn.GRU(inputs, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x)[0]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(1), self.Layer(8), self.Layer(8)])
        self.distribution = nn.Linear(8, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        past, future = batch
        series = torch.cat([past, future], 1)
        scale = past.abs().mean(1, keepdim=True) + 1
        x = (series / scale)[:, :-1, None]
        for layer in self.layers:
            x = layer(x)
        mean, std = self.distribution(x).unbind(-1)
        normal = torch.distributions.Normal(mean * scale, (F.softplus(std) + 1e-3) * scale)
        nll = -normal.log_prob(series[:, 1:])
        loss = nll.mean()
        self.log("train_nll", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@entry(trainer=DOUBLE)
class TemporalFusion(Series):
    """Gated residual networks, attention to the past, quantiles of the future."""

    class GatedResidual(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(width, width), nn.Linear(width, width)
            self.gate, self.norm = nn.Linear(width, 2 * width), nn.LayerNorm(width)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + F.glu(self.gate(self.fc2(F.elu(self.fc1(x))))))

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.networks = nn.ModuleList(self.GatedResidual(8) for _ in range(3))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.output_layer = nn.Linear(8, 4 * 3)
        self.quantiles = [0.1, 0.5, 0.9]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        past, future = batch
        x = self.embed(past[..., None])
        for network in self.networks:
            x = network(x)
        x = self.attention(x[:, -1:], x, x, need_weights=False)[0]
        out = self.output_layer(x).view(-1, 4, 3)
        losses = []
        for i, q in enumerate(self.quantiles):
            errors = future - out[..., i]
            losses.append(torch.max((q - 1) * errors, q * errors).unsqueeze(-1))
        loss = torch.cat(losses, dim=2).sum(2).mean()
        self.log("train_loss", loss)
        self.log("coverage", ((future > out[..., 0]) & (future < out[..., 2])).float().mean())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.RAdam(self.parameters(), lr=1e-2)
