"""Wrong arguments are answered before torch and Lightning are imported, which takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from axosparse_commands import overrides
from axosparse_commands.overrides import config_folder, find_problem
from tests.ranks import PATIENCE

CALL = """
import json, sys
import axosparse_commands

command, *sys.argv[1:] = sys.argv[1:]
try:
    getattr(axosparse_commands, command)()
except SystemExit as ended:
    print(ended.code, file=sys.stderr)
print(json.dumps([name for name in sys.modules if "." not in name]))
"""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("train strategy.ginter=2", "axosparse-train: there is no strategy.ginter. Did you mean"),
        ("train modle=vgg", "axosparse-train: there is no modle. Did you mean model?"),
        ("train model=vggg", "Available options in 'model':"),
        ("train 'data.path=a", "axosparse-train: "),
        ("evaluate data.batchsize=2", "axosparse-eval: there is no data.batchsize. Did you mean"),
        ("evaluate checkpoint=no.ckpt", "axosparse-eval: There is no file or folder 'no.ckpt'"),
        (
            "plan --model llama-7b",
            "'llama-7b' is not a model that is known: gpt2, gpt2-xl",
        ),
        (
            "plan --model llama-7b",
            "--shape LAYERS WIDTH HEADS SEQUENCE VOCABULARY, such as",
        ),
        ("plan --devices 0", "'0' is not a count"),
        ("plan --tensor 3 --devices 4", "3 ranks that share layers do not divide 4 devices"),
        ("sweep no/such/folder", "'no/such/folder' is not a folder"),
    ],
)
def test_an_error_imports_neither_torch_nor_lightning(call: str, message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CALL, *call.split()],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    imported = {*json.loads(done.stdout)}
    assert not {"torch", "lightning", "numpy", "matplotlib", "lightning_axosparse"} & imported


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("g_inter=2", "there is no g_inter. Did you mean strategy.g_inter?"),
        ("hydra.run.dri=out", "there is no hydra.run.dri. Did you mean hydra.run.dir?"),
        ("strategy=single strategy.g_inter=2", "there is no strategy.g_inter: strategy is 'auto'."),
        ("-m seed=0,1 model.withd=8,16", "there is no model.withd. Did you mean model.width?"),
        ("~strategy.ginter", "there is no strategy.ginter. Did you mean strategy.g_inter?"),
        ("strategy.transport=loopback", "with a plus: +strategy.transport=VALUE"),
        (
            "model=own model.dim=3",
            "no model.dim. Add arguments of a class with a plus: +model.dim=",
        ),
        ("strategy.transport=loopback", "strategy has: g_inter, microbatches, pipeline,"),
    ],
)
def test_what_was_meant(arguments: str, message: str) -> None:
    found = find_problem("config", arguments.split())
    assert found is not None
    assert message in found


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "experiment=smoke strategy.g_inter=2 seed=3",
        "-m experiment=grid_scaling global_batch=32",
        "-m experiment=ratio_sweep seed=0,1 pruning.ratio=0.5,0.8",
        "arm=ticket,dense -m arm.name=mine",
        "+strategy.ginter=2 ++trainer.x=1 ~sample.prompt",
        "model=own model._target_=my.Module +model.width=64",
        "pruning=none pruning.callback.floor=1",
        "--cfg job strategy.ginter=2",
        "callbacks=none hydra.run.dir=out",
    ],
)
def test_what_hydra_takes_is_left_to_hydra(arguments: str) -> None:
    assert find_problem("config", arguments.split()) is None


def test_configuration_lies_in_the_package_or_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert OmegaConf.load(config_folder() / "config.yaml").seed == 0

    class Found:
        origin = str(tmp_path / "lightning_axosparse" / "__init__.py")

    monkeypatch.setattr(overrides, "find_spec", lambda name: Found)
    assert config_folder() == tmp_path / "conf"
    (tmp_path / "lightning_axosparse" / "conf").mkdir(parents=True)
    assert config_folder() == tmp_path / "lightning_axosparse" / "conf"
