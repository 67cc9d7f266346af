from __future__ import annotations

import math

import lightning as L
import pytest
import torch

from lightning_axosparse import load_sparse, save_safetensors, sparsify
from lightning_axosparse.examples.data import TextDataModule
from lightning_axosparse.examples.gpt import GPT
from lightning_axosparse.sparse.store.layout import Layout
from tests.quiet import QUIET

TINY = {"width": 32, "depth": 2, "heads": 2, "context": 16}


@pytest.fixture(autouse=True)
def _seed():
    L.seed_everything(0)


def trainer(folder, **kwargs) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        **QUIET,
        **kwargs,
    )


def test_the_future_does_not_change_the_past():
    model = GPT(**TINY).eval()
    tokens = torch.randint(256, (3, 16))
    changed = tokens.clone()
    changed[:, 9:] = torch.randint(256, (3, 7))
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_loss_is_the_mean_of_the_sequences_losses():
    model = GPT(**TINY)
    x, y = torch.randint(256, (2, 4, 16))
    parts = [model.loss((x[i : i + 1], y[i : i + 1])) for i in range(4)]
    torch.testing.assert_close(model.loss((x, y)), torch.stack(parts).mean())


def test_a_fresh_model_is_near_the_uniform_guess():
    x, y = torch.randint(256, (2, 8, 16))
    assert float(GPT(**TINY).loss((x, y)).detach()) == pytest.approx(math.log(256), abs=0.1)


def test_initial_residual_branches_are_scaled_by_depth():
    model = GPT(width=128, depth=8, heads=2)
    block = model.model[1]
    assert block.mlp[0].weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mlp[2].weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.attention.output.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_learns_and_logs(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("to be, or not to be: that is the question. " * 200)
    data = TextDataModule(path, context=16, batch_size=8)
    model = GPT(**TINY, learning_rate=1e-2)
    fit = trainer(tmp_path, max_steps=500, num_sanity_val_steps=0)
    fit.fit(model, datamodule=data)
    metrics = {name: float(value) for name, value in fit.callback_metrics.items()}
    assert metrics["val_loss"] < 0.5 < math.log(20)  # 20 different bytes
    assert metrics["val_perplexity"] == pytest.approx(math.exp(metrics["val_loss"]))
    assert metrics["val_bits_per_byte"] == pytest.approx(metrics["val_loss"] / math.log(2))
    assert "train_loss" in metrics
    [tested] = fit.test(model, datamodule=data, verbose=False)
    assert tested["test_loss"] < 0.5
    assert model.generate("to be, or ", 15, temperature=0) == "to be, or not to be: that"


def test_learning_rate_rises_then_falls_to_a_tenth(tmp_path):
    rates = []

    class Rates(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(256)) * 20)
    data = TextDataModule(path, context=16, batch_size=8)
    model = GPT(**TINY, learning_rate=1.0, warmup=0.2)
    trainer(tmp_path, max_steps=20, callbacks=[Rates()]).fit(model, datamodule=data)
    assert rates[:4] == pytest.approx([0.5, 0.75, 1.0, 1.0])
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


def test_matrices_decay_and_vectors_do_not(tmp_path):
    model = GPT(**TINY, weight_decay=0.3)
    model.trainer = type("", (), {"estimated_stepping_batches": 10})()
    groups = model.configure_optimizers()["optimizer"].param_groups
    assert {(p.dim() > 1, group["weight_decay"]) for group in groups for p in group["params"]} == {
        (True, 0.3),
        (False, 0.0),
    }
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_generate_is_repeatable_and_goes_beyond_the_context():
    model = GPT(**TINY)
    first = model.generate("def ", 30, seed=1)
    assert first == model.generate("def ", 30, seed=1)
    assert first != model.generate("def ", 30, seed=2)
    assert first.startswith("def ")
    assert model.training


def test_generate_leaves_the_modes_of_all_parts():
    model = GPT(**TINY)
    model.model[1].eval()
    modes = [part.training for part in model.modules()]
    model.generate("def ", 2)
    assert [part.training for part in model.modules()] == modes
    with pytest.raises(IndexError):
        model.generate_tokens(torch.full((1, 2), 999), 1)
    assert [part.training for part in model.modules()] == modes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decoding_gives_the_logits_of_the_whole_forward_pass(dtype):
    model = GPT(**TINY).to(dtype).eval()
    tokens = torch.randint(256, (3, 16))
    for prompt in (1, 5, 16):
        caches = model.empty_caches()
        decoded = [model.decode(tokens[:, :prompt], caches)]
        decoded += [model.decode(tokens[:, i : i + 1], caches) for i in range(prompt, 16)]
        torch.testing.assert_close(torch.stack(decoded, 1), model(tokens)[:, prompt - 1 :])


def test_decoding_takes_several_tokens_only_at_first_and_no_more_than_the_context():
    model = GPT(**TINY).eval()
    caches = model.empty_caches()
    model.decode(torch.zeros(1, 3, dtype=torch.int64), caches)
    with pytest.raises(ValueError, match="2 tokens after 3 do not fit"):
        model.decode(torch.zeros(1, 2, dtype=torch.int64), caches)
    with pytest.raises(IndexError):
        model.decode(torch.zeros(1, 17, dtype=torch.int64), model.empty_caches())


@pytest.mark.parametrize("prompt", [1, 10, 16, 21])
def test_tokens_are_those_of_whole_forward_passes_over_the_last_context(prompt):
    model = GPT(**TINY).double()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter)  # large: positions and earlier tokens matter
    tokens = expected = torch.randint(256, (2, prompt))
    model.eval()
    for _ in range(20):
        following = model(expected[:, -16:])[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat([expected, following], dim=1)
    assert torch.equal(model.generate_tokens(tokens, 20, temperature=0), expected)
    assert len(expected[:, prompt:].unique()) > 5


def test_a_batch_is_sampled_sequence_by_sequence():
    model = GPT(**TINY)
    tokens = torch.zeros(4, 2, dtype=torch.int64)
    sampled = model.generate_tokens(tokens, 12, temperature=1, seed=3)
    assert torch.equal(sampled, model.generate_tokens(tokens, 12, temperature=1, seed=3))
    assert len({tuple(row) for row in sampled.tolist()}) == 4
    assert torch.equal(model.generate_tokens(tokens, 0), tokens)


def test_generation_computes_each_token_once_within_the_context():
    model = GPT(**TINY)
    computed = []
    model.model[0].register_forward_pre_hook(lambda _, args: computed.append(args[0].shape[1]))
    model.generate_tokens(torch.zeros(1, 10, dtype=torch.int64), 8)
    assert computed == [10, 1, 1, 1, 1, 1, 1, 16]


def test_heads_that_do_not_divide_the_width_are_rejected():
    with pytest.raises(ValueError, match="heads=5 must divide width=32"):
        GPT(width=32, heads=5)


def test_a_loaded_pruned_model_generates_without_a_dense_weight(tmp_path, monkeypatch):
    def network():
        return GPT(width=64, depth=2, heads=2, context=16)

    model = network()
    masks = {
        name: torch.rand(weight.shape) < 0.2
        for name, weight in model.named_parameters()
        if weight.dim() > 1
    }
    sparsify(model, masks)
    save_safetensors(model, tmp_path / "sparse.safetensors")
    expected = model.generate("a", 12, temperature=0)
    with torch.device("meta"):
        loaded = network()
    load_sparse(loaded, tmp_path / "sparse.safetensors")
    loaded.to("cpu")  # Lightning's modules remember the device of their construction
    for name in ("densify_tile", "compress_tile"):
        monkeypatch.setattr(Layout, name, None)
    assert loaded.generate("a", 12, temperature=0) == expected
