"""What ``import lightning_axosparse`` imports, and where private API of others is used."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import lightning as L
from torch import Tensor, nn
from torch.optim import Optimizer

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
WHERE_USED = {"hydra", "matplotlib", "mpi4py", "omegaconf", "rich", "transformers", "triton"}
DTENSOR = "torch.distributed.tensor", "torch.distributed._functional_collectives"


def test_what_few_runs_need_is_imported_where_it_is_used() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPY], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    asked, loaded = json.loads(done.stdout)
    assert "torch" in asked
    assert "lightning_axosparse.strategy" in loaded
    assert not WHERE_USED & {name.partition(".")[0] for name in asked}
    assert not [name for name in asked if name.startswith(DTENSOR)]
    others = {name.partition(".")[0] for name in loaded} - {"lightning_axosparse", "lightning"}
    assert others <= {"cloudpickle", "safetensors"}


PACKAGE = Path(__file__).parents[1] / "lightning_axosparse"
WRAPPERS = "support/torch_internals.py", "strategy/compat/"
NO_OTHER_WAY = {
    # What a module holds, under names that state dicts and subclasses depend on.
    "checkpoint/load.py": {"_buffers", "_parameters"},
    "pipeline/state/module_state.py": {"_buffers", "_modules", "_parameters"},
    "pipeline/crossing/placeholder.py": {"_buffers", "_make_subclass"},
    "pipeline/shard/partition.py": {"_forward_hooks", "_forward_pre_hooks"},
    "pruning/tracing.py": {"_forward_hooks", "_forward_pre_hooks"},
    "pipeline/shard/sharding.py": {"_buffers", "_parameters"},
    "pipeline/crossing/side_outputs.py": {
        *("_buffers", "_forward_hooks", "_forward_pre_hooks"),
        *("_global_forward_hooks", "_global_forward_pre_hooks"),
    },
    "pruning/channels.py": {"_parameters"},
    "pruning/rule.py": {"_forward_pre_hooks"},
    "sparse/module/sparse_module.py": {"_flat_weights_names", "_init_flat_weights", "_parameters"},
    "sparse/module/parameters.py": {"_indices", "_parameters", "_values"},
    # What torch and Lightning leave to subclasses.
    "distributed/gradient_reducer.py": {"_make_wrapper_subclass"},
    "distributed/mpi/process_group.py": {"_register_backend", "_set_default_backend"},
    "pipeline/microbatch.py": {"_BatchNorm"},
    "sparse/ops/convolution.py": {"_conv_forward"},
    "sparse/store/weight.py": {"_make_wrapper_subclass"},
    "strategy/step/learning.py": {"_backward_hooks", "_backward_pre_hooks"},
    "strategy/tensor_parallel.py": {"_parameters"},
    "strategy/validation.py": {"_NormBase"},
}
"""File -> the attributes of others that it uses; docs/architecture.md says the same."""


def defined(tree: ast.Module) -> set[str]:
    """The names of functions, classes, variables and attributes that a module defines."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            of_self = isinstance(node, ast.Name) or ast.unparse(node.value) in ("self", "cls")
            if of_self:
                found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def private_attributes(tree: ast.Module) -> set[str]:
    """The private attributes that a module uses, but for what Python documents."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.endswith("_")
        and node.attr not in ("_asdict", "_fields", "_make", "_replace")
        and ast.unparse(node.value) not in ("os", "sys")
    }


def test_private_attributes_of_torch_and_lightning_are_used_where_the_docs_say() -> None:
    paths = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    trees = {name: ast.parse(path.read_text()) for name, path in paths.items()}
    of_others = {*dir(nn.Module()), *dir(Tensor), *dir(Optimizer), *dir(L.Trainer)}
    own = set().union(*map(defined, trees.values())) - of_others
    used = {
        name: private_attributes(tree) - defined(tree) - own
        for name, tree in trees.items()
        if not name.startswith(WRAPPERS)
    }
    assert {name: names for name, names in used.items() if names} == NO_OTHER_WAY
