"""The examples run as their READMEs start them, smaller."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.ranks import PATIENCE, REPOSITORY, warm_python

EXAMPLES = REPOSITORY / "examples"
TEXT = "so long as men can breathe or eyes can see so long lives this " * 20


def run(folder: Path, command: list[str], **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def example(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLES / request.param, tmp_path / request.param))


@pytest.mark.parametrize("example", ["own_module"], indirect=True)
def test_own_module(example: Path) -> None:
    printed = run(example, [*warm_python(), "train.py", "--width", "32", "--epochs", "2"])
    assert float(re.search(r"accuracy ([\d.]+)", printed)[1]) > 0.4  # one of four classes
    assert re.search(r"80% pruned after \d+ steps", printed)


@pytest.mark.parametrize("example", ["vision"], indirect=True)
def test_vision(example: Path) -> None:
    printed = run(example, [*warm_python(), "train.py", "--width", "4", "--epochs", "2"])
    assert float(re.search(r"accuracy ([\d.]+)", printed)[1]) > 0.15  # one of ten


@pytest.mark.parametrize("example", ["circuit"], indirect=True)
def test_circuit(example: Path) -> None:
    pytest.importorskip("matplotlib")
    printed = run(example, [*warm_python(), "train.py", "--ratio", "0.99", "--epochs", "3"])
    assert float(re.search(r"accuracy ([\d.]+)", printed)[1]) > 0.9  # one of two quotes
    edges = int(re.search(r"(\d+) edges lead from inputs to outputs", printed)[1])
    assert 10 < edges < 131 + 64, "1 % of 13,056 weights, and the residual stream"
    assert "<svg" in (example / "circuit.svg").read_text()


@pytest.mark.parametrize("example", ["transfer"], indirect=True)
def test_transfer(example: Path) -> None:
    size = ["--width", "32", "--pretrain", "20", "--steps", "20"]
    printed = run(example, [*warm_python(), "finetune.py", *size])
    rows = re.findall(r"^\| (.+) \| (\d+)% \| ([\d.]+) \|$", printed, re.MULTILINE)
    assert [int(left) for _, left, _ in rows] == [100, 100, 20, 20]
    new, dense, at_once, gradually = (float(perplexity) for *_, perplexity in rows)
    assert dense < at_once
    assert max(dense, gradually) < new < 256  # of a byte


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that save_pretrained has written, and a text."""
    folder = tmp_path_factory.mktemp("model")
    words = {word: i for i, word in enumerate(sorted(set(TEXT.split())))}
    tokenizer = Tokenizer(WordLevel(words))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "text.txt").write_text(TEXT)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("example", ["huggingface"], indirect=True)
def test_hugging_face(example: Path, language_model: Path, lora: bool, tmp_path: Path) -> None:
    if lora:
        pytest.importorskip("peft")
    text = language_model / "text.txt"
    size = ["--steps", "4", "--length", "8", "--save", "tuned"] + ["--lora"] * lora
    where = ["--model", str(language_model), "--text", str(text)]
    assert "loss" in run(example, [*warm_python(), "finetune.py", *where, *size])
    if lora:
        assert {"adapter_config.json", "adapter_model.safetensors"} <= {
            path.name for path in (example / "tuned").iterdir()
        }
        return
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (language_model, example / "tuned")
    )
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert not torch.equal(weight, after[name]), name
        assert torch.allclose(weight, after[name], rtol=0, atol=2e-4), name


@pytest.mark.parametrize("example", ["cluster"], indirect=True)
def test_cluster(example: Path) -> None:
    mpiexec = str(Path(sys.executable).parent / "mpiexec")
    size = ["--width", "16", "--depth", "2", "--stages", "2", "--steps", "2"]
    command = [mpiexec, "-n", "2", *warm_python(), "train.py", *size]
    printed = run(example, command, SLURM_NTASKS_PER_NODE="2", SLURM_NNODES="1")
    assert len(re.findall(r"^loss [\d.]+$", printed, re.MULTILINE)) == 1  # of one rank


@pytest.mark.parametrize("example", ["lightning_cli"], indirect=True)
def test_lightning_cli(example: Path) -> None:
    pytest.importorskip("jsonargparse")
    small = "--model.width 16 --model.depth 2 --model.heads 2 --trainer.limit_train_batches 2"
    small += " --trainer.max_epochs 3 --data.max_held_out 4 --data.max_bytes 50000"
    every = [*warm_python(), "main.py"]
    options = ["--config", "config.yaml", *small.split()]
    drawn = run(example, [*every, "fit", *options])
    assert "Ticket drawn" in drawn or list(example.glob("checkpoints/last.ckpt"))
    checkpoint = torch.load(example / "checkpoints" / "last.ckpt", weights_only=False)
    assert checkpoint["global_step"] == 6
    assert any(key.startswith("GradualPruning") for key in checkpoint["callbacks"])
    weight = checkpoint["state_dict"]["model.1.mlp.0.weight"]
    assert weight.count_nonzero() < weight.numel() / 2
    saved = ["--ckpt_path", "checkpoints/last.ckpt"]
    validated = run(example, [*every, "validate", *options, *saved])
    tested = run(example, [*every, "test", *options, *saved])
    assert "val_perplexity" in validated
    assert "test_loss" in tested


@pytest.mark.parametrize("form", ["--trainer.strategy axosparse", "the class alone"])
@pytest.mark.parametrize("example", ["lightning_cli"], indirect=True)
def test_lightning_cli_takes_a_name_and_overrides(example: Path, form: str) -> None:
    pytest.importorskip("jsonargparse")
    if form == "the class alone":
        form = "--trainer.strategy AxoSparseStrategy --trainer.strategy.g_inter 2"
        form += " --trainer.callbacks GradualPruning --trainer.callbacks.end 2"
    small = "--model.width 16 --model.depth 2 --model.heads 2 --data.max_held_out 4"
    small += " --data.max_bytes 50000 --data.context 64 --model.context 64 --trainer.logger false"
    trainer = "--trainer.accelerator cpu --trainer.devices 2 --trainer.max_steps 4"
    run(example, [*warm_python(), "main.py", "fit", *f"{small} {trainer} {form}".split()])


PREDICT = """
import lightning as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.cli import LightningCLI
import lightning_axosparse

class Writer(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch")

    def write_on_batch_end(self, trainer, module, prediction, indices, batch, batch_idx, *_):
        torch.save(prediction, f"batch-{batch_idx}.pt")

class Net(L.LightningModule):
    def __init__(self, width: int = 4):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 2))

    def predict_step(self, batch, batch_idx):
        return self.layers(batch)

class Data(L.LightningDataModule):
    def predict_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(8, 3), batch_size=4)

if __name__ == "__main__":
    LightningCLI(Net, Data, save_config_callback=None, trainer_defaults={"callbacks": [Writer()]})
"""


def test_lightning_cli_predicts_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    (tmp_path / "main.py").write_text(PREDICT)
    trainer = "--trainer.accelerator cpu --trainer.devices 2 --trainer.logger false"
    strategy = "--trainer.strategy AxoSparseStrategy --trainer.strategy.g_inter 2"
    command = [*warm_python(), "main.py", "predict", *f"{trainer} {strategy}".split()]
    run(tmp_path, command)
    shapes = [torch.load(tmp_path / f"batch-{batch}.pt").shape for batch in range(2)]
    assert shapes == [(4, 2), (4, 2)]
