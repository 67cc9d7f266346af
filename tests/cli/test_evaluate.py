"""The command that evaluates saved weights: files, folders, sparse files, one and two ranks."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig, OmegaConf

from axosparse_commands.overrides import config_folder
from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket, load_sparse, save_safetensors
from lightning_axosparse.checkpoint.consolidate import consolidate
from lightning_axosparse.cli import evaluate as entry
from lightning_axosparse.cli.evaluate import evaluate, load_model, with_data_of_run
from lightning_axosparse.examples.data import TextDataModule
from lightning_axosparse.examples.gpt import GPT
from tests.quiet import QUIET

SMALL = ["data.context=16", "data.batch_size=8", "sample.length=5"]
SHAPE = {"width": 16, "depth": 2, "heads": 2, "context": 16}


def configured(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose("eval", [*SMALL, *overrides])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """A run with a ticket, its files, and the metrics that its own Trainer finds."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("Full many a glorious morning have I seen. " * 100)
    data = TextDataModule(folder / "text.txt", context=16, batch_size=8)
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=6,
        strategy=AxoSparseStrategy(save_distributed_checkpoint=True),
        callbacks=[
            EarlyBirdTicket(0.5, draw_by=3),
            ModelCheckpoint(folder, "sharded", every_n_train_steps=6),
        ],
        num_sanity_val_steps=0,
        **{**QUIET, "enable_checkpointing": True},
    )
    model = GPT(**SHAPE)
    trainer.fit(model, datamodule=data)
    consolidate(folder / "sharded.ckpt", folder / "one.ckpt")
    loops = (trainer.validate, trainer.test)
    [validated], [tested] = (loop(model, datamodule=data, verbose=False) for loop in loops)
    sparse = GPT(**SHAPE)
    load_sparse(sparse, folder / "one.ckpt")
    save_safetensors(sparse, folder / "sparse.safetensors")
    save_safetensors(sparse, folder / "dense.safetensors", sparse=False)
    return folder, validated | tested


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("one.ckpt", 1),
        ("one.ckpt", 2),
        ("sharded.ckpt", 1),
        ("sparse.safetensors", 1),
        ("dense.safetensors", 1),
    ],
)
def test_the_metrics_are_those_of_the_run(run, name, ranks, tmp_path, capsys):
    folder, expected = run
    shape = [f"model.{key}={value}" for key, value in SHAPE.items()]
    if name.endswith(".ckpt"):
        shape = []  # its hyperparameters describe the model
    stages = [f"trainer.devices={ranks}", f"strategy.g_inter={ranks}"] if ranks > 1 else []
    found = evaluate(
        configured(
            f"checkpoint={folder / name}",
            f"data.path={folder / 'text.txt'}",
            f"folder={tmp_path / 'out'}",
            "trainer.enable_progress_bar=false",
            *shape,
            *stages,
        )
    )
    assert found == pytest.approx(expected, rel=1e-5)
    assert json.loads((tmp_path / "out" / "metrics.json").read_text()) == found
    shown = capsys.readouterr().out
    for words in ("test_loss", "val_perplexity", "After 'def '", "After 'class '"):
        assert words in shown


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["checkpoint=no/such.ckpt"], "There is no file or folder 'no/such.ckpt'"),
        (["checkpoint={other}"], "'{other}' cannot be read"),
        (["checkpoint={sparse}"], "'model.0.tokens.weight' has shape (256, 16) in the file, ("),
        (["checkpoint={dense}"], "The weights in '{dense}' do not fit to `model`, which is "),
        (["checkpoint={other}", "loops=[train]"], "loops=['train'] must be"),
        (["checkpoint={other}", "loops=[]"], "loops=[] must be"),
        (["checkpoint={other}", "sample.length=-1"], "sample.length=-1 must be"),
    ],
)
def test_what_cannot_be_evaluated_ends_in_words(run, overrides, message, tmp_path, monkeypatch):
    torch.save([1], tmp_path / "other.ckpt")
    names = {name: run[0] / f"{name}.safetensors" for name in ("dense", "sparse")}
    names["other"] = tmp_path / "other.ckpt"
    arguments = [override.format(**names) for override in overrides]
    depth = ["model.depth=2", f"data.path={run[0] / 'text.txt'}", f"hydra.run.dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["axosparse-eval", *SMALL, *depth, *arguments])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        entry.main()
    shown = str(ended.value.code)
    assert shown.startswith(f"axosparse-eval: {message.format(**names)}")
    assert "\n" not in shown


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            {"width": 8},
            r"GPT: size mismatch for .* in current model is torch\.Size\(\[256, 8\]\)\. Such",
        ),
        ({"depth": 3}, r'GPT: Unexpected key.* in state_dict: "model\.3\.0\.bias", .*"\. Such'),
        ({"depth": 1}, r"GPT: Unexpected key.* in state_dict: .{100,170}, \[\.\.\.\]\. Such"),
    ],
)
def test_weights_of_another_shape_are_named(run, shape, message):
    model = [f"model.{name}={value}" for name, value in {**SHAPE, **shape}.items()]
    with pytest.raises(ValueError, match=message):
        load_model(configured(*model).model, run[0] / "dense.safetensors")


PLANTED = [
    ({"_target_": "pathlib.Path.write_text", "_args_": []}, "the key `_target_`"),
    ({"_partial_": True}, "the key `_partial_`"),
    ({"_args_": [1]}, "the key `_args_`"),
    ("${oc.env:HOME}", "an interpolation"),
]


@pytest.fixture(scope="module")
def gpt() -> DictConfig:
    """What the configuration says of the model."""
    return configured("checkpoint=x").model


@pytest.mark.parametrize(("value", "found"), PLANTED)
@pytest.mark.parametrize(
    "plant",
    [
        lambda value: {"width": value},
        lambda value: {"depth": {"a": {"b": value}}},
        lambda value: {"depth": [1, (value,)]},
        lambda value: value if isinstance(value, dict) else {"width": value},
    ],
)
def test_nothing_in_a_checkpoint_is_called(run, gpt, value, found, plant, tmp_path, monkeypatch):
    contents = torch.load(run[0] / "one.ckpt", weights_only=True)
    contents["hyper_parameters"].update(plant(value))
    torch.save(contents, tmp_path / "planted.ckpt")
    monkeypatch.setattr(GPT, "__init__", lambda *args, **kwargs: pytest.fail("was called"))
    with pytest.raises(ValueError, match=rf"planted\.ckpt' has {found} in hyper_parameters"):
        load_model(gpt, tmp_path / "planted.ckpt")


def test_values_of_a_checkpoint_replace_those_of_the_configuration(run, gpt, tmp_path):
    contents = torch.load(run[0] / "one.ckpt", weights_only=True)
    del contents["hyper_parameters"]["depth"]
    contents["hyper_parameters"]["unknown"] = 1
    torch.save(contents, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"do not fit to `model`, which is .*GPT: .*unknown"):
        load_model(gpt, tmp_path / "other.ckpt")
    del contents["hyper_parameters"]["unknown"]
    torch.save(contents, tmp_path / "other.ckpt")
    model, _ = load_model(
        configured("checkpoint=x", "model.depth=3").model, tmp_path / "other.ckpt"
    )
    assert (model.hparams.width, model.hparams.depth) == (16, 3)


TEXT = "lightning_axosparse.examples.data.TextDataModule"


def left_by_a_run(folder: Path, checkpoint: Path, **data: object) -> Path:
    """Make the folder of a run with its settings of data, and return its checkpoint."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    OmegaConf.save({"seed": 3, "folder": "???", "data": data}, folder / ".hydra" / "config.yaml")
    return Path(shutil.copy(checkpoint, folder / "checkpoints" / "last.ckpt"))


def test_data_are_those_of_the_run_in_whose_folder_the_checkpoint_lies(run, tmp_path, monkeypatch):
    folder, expected = run
    text = {"_target_": TEXT, "path": str(folder / "text.txt"), "context": 16, "batch_size": 8}
    file = left_by_a_run(tmp_path / "run", folder / "one.ckpt", **text)
    out = ["sample.length=0", "trainer.enable_progress_bar=false", f"hydra.run.dir={tmp_path}/out"]
    monkeypatch.setattr(sys, "argv", ["axosparse-eval", f"checkpoint={file}", *out])
    monkeypatch.chdir(tmp_path)
    entry.main()
    found = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_command_line_is_above_the_settings_of_the_run(run, tmp_path):
    text = {"_target_": TEXT, "path": "mine", "context": 16, "batch_size": 4, "seed": "${seed}"}
    file = left_by_a_run(tmp_path, run[0] / "one.ckpt", **text)
    overrides = [f"checkpoint={file}", "data.batch_size=2", "+data.held_out=0.1"]
    config = configured(overrides[0], "data.batch_size=2", "data.held_out=0.1")
    data = with_data_of_run(config, overrides).data
    assert (data.path, data.batch_size, data.held_out, data.seed) == ("mine", 2, 0.1, 3)


def test_data_that_are_named_have_the_settings_of_the_run(run, tmp_path):
    crop = {"size": 8, "flip": True}
    file = left_by_a_run(tmp_path, run[0] / "one.ckpt", _target_=TEXT, held_out=0.2, crop=crop)
    overrides = [f"checkpoint={file}", "data=text", "+data.crop.size=4"]
    data = with_data_of_run(configured(*overrides), overrides).data
    assert (data.held_out, data.crop) == (0.2, {"size": 4, "flip": True})


def test_data_of_another_class_have_no_settings_of_the_run(run, tmp_path):
    file = left_by_a_run(tmp_path, run[0] / "one.ckpt", _target_=TEXT, path="${unknown}")
    overrides = [f"checkpoint={file}", "data=images"]
    config = configured(overrides[0])
    config.data._target_ = "lightning_axosparse.examples.data.ImageDataModule"
    assert with_data_of_run(config, overrides) == config


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"_target_": "os.system", "command": "true"}, "had other data, os.system: give data=text"),
        ({"_target_": TEXT, "path": {"_target_": "os.system"}}, "has the key `_target_` in data.p"),
    ],
)
def test_nothing_in_the_folder_of_a_run_is_called(run, data, message, tmp_path):
    file = left_by_a_run(tmp_path, run[0] / "one.ckpt", **data)
    with pytest.raises(ValueError, match=message):
        with_data_of_run(configured(f"checkpoint={file}"), [f"checkpoint={file}"])


def test_windows_longer_than_the_context_are_refused_before_any_rank_starts(run):
    path = [f"checkpoint={run[0] / 'one.ckpt'}", f"data.path={run[0] / 'text.txt'}", "folder=here"]
    with pytest.raises(ValueError, match=r"data\.context=17 are longer .*: give data\.context=16"):
        evaluate(configured(*path, "data.context=17"))
