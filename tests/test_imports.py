"""What ``import lightning_axosparse`` imports."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.ranks import PATIENCE

# Lightning itself imports some of these, if they are installed: what counts is who asks for them.
SPY = """
import builtins, json, sys

import lightning

plain, asked, before = builtins.__import__, set(), set(sys.modules)

def spy(name, globals=None, locals=None, fromlist=(), level=0):
    if level == 0 and (globals or {}).get("__name__", "").startswith("lightning_axosparse"):
        asked.update([name, *(f"{name}.{part}" for part in fromlist or ())])
    return plain(name, globals, locals, fromlist, level)

builtins.__import__ = spy
import lightning_axosparse
print(json.dumps([sorted(asked), sorted(set(sys.modules) - before)]))
"""
WHERE_USED = {"hydra", "matplotlib", "mpi4py", "omegaconf", "psutil", "rich", "transformers"}
WHERE_USED |= {"triton"}


def test_what_few_runs_need_is_imported_where_it_is_used() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPY], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    asked, loaded = json.loads(done.stdout)
    assert "torch" in asked
    assert "lightning_axosparse.strategy" in loaded
    assert not WHERE_USED & {name.partition(".")[0] for name in asked}
    others = {name.partition(".")[0] for name in loaded} - {"lightning_axosparse", "lightning"}
    assert others <= {"cloudpickle", "safetensors"}
