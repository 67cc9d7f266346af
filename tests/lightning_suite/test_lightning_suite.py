"""The comparison of modes, and the suite itself where it is there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_axosparse import AxoSparseStrategy
from tests.lightning_suite.expectations import BY_CHANCE, EXPECTED, judge, parse
from tests.lightning_suite.modes import MODES

PASSED, FAILED, SKIPPED = ["passed", ""], ["failed", "E"], ["skipped", ""]
PLAIN = {f"loops/a.py::{name}": PASSED for name in ("one", "each[1]", "each[2]", "two")}
PLAIN |= {"loops/a.py::never": FAILED}


def test_the_projects_own_list_is_in_order() -> None:
    compared = {name for name, mode in MODES.items() if mode.compared_with}
    assert set(parse(EXPECTED.read_text())) <= compared | {name + BY_CHANCE for name in compared}


def test_failures_that_nobody_expects_and_passes_that_nobody_expects() -> None:
    expected = ["loops/a.py::one", "loops/a.py::each", "core/b.py::two[1]"]
    ours = {**PLAIN, "loops/a.py::one": FAILED, "loops/a.py::each[1]": FAILED}
    verdict = judge({**ours, "loops/a.py::each[2]": FAILED}, PLAIN, expected, ["loops"])
    assert verdict
    assert (verdict.passed, verdict.failed, verdict.reference) == (1, 3, 4)
    one_passes = judge(ours, PLAIN, expected, ["loops"])
    assert one_passes.surprises == ["loops/a.py::each[2]"]
    two_fails = judge({**ours, "loops/a.py::two": FAILED}, PLAIN, expected, ["loops"])
    assert two_fails.unexpected == {"loops/a.py::two": "E"}
    assert not two_fails
    gone = judge(PLAIN, PLAIN, ["loops/a.py::gone"], ["loops"])
    assert gone.surprises == ["loops/a.py::gone"]
    rest = {test: outcome for test, outcome in PLAIN.items() if test != "loops/a.py::two"}
    assert judge(rest, PLAIN, [], ["loops"]).unexpected == {"loops/a.py::two": "it was not run"}
    assert judge({**PLAIN, "loops/b.py::new": FAILED}, PLAIN, [], ["loops"])


@pytest.mark.parametrize("mode", ["one rank", "loopback"])
def test_a_trainer_without_a_strategy_gets_the_one_of_the_mode(mode: str) -> None:
    own = Trainer.__init__
    with pytest.MonkeyPatch.context() as patch:
        MODES[mode].apply(patch)
        chosen = Trainer(logger=False).strategy
        with pytest.raises(pytest.skip.Exception, match="of its own"):
            Trainer(logger=False, strategy="ddp")
        layers = len(list(BoringModel().parameters()))
    assert isinstance(chosen, AxoSparseStrategy)
    assert chosen.g_inter == (2 if mode == "loopback" else 1)
    assert layers == (4 if mode == "loopback" else 2)
    assert Trainer.__init__ is own


@pytest.mark.skipif("LIGHTNING_TESTS" not in os.environ, reason="LIGHTNING_TESTS is not set")
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("mode", ["one rank", "loopback", "two ranks"])
def test_lightnings_suite(mode: str) -> None:
    command = [sys.executable, "-m", "tests.lightning_suite", "--mode", mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
