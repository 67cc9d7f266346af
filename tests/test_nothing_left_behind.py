"""After a call of the Trainer the process, the module and the callbacks are as they were."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torchmetrics import Metric

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket, PipelineTimeline, sparsify
from lightning_axosparse.support.trace import clock
from tests.parity.cases import Net, loader, trainer

SHARED_MEMORY = Path("/dev/shm")
PATCHABLE = (nn.Module, LightningModule, Trainer, Metric, torch.optim.Optimizer, torch.Tensor)


class Example(Net):
    """Has an example input, and can be told to raise in its second training step."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.ones(2, self.model[0].in_features)
        self.raises = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.raises and batch_idx == 1:
            raise ArithmeticError("told to")
        return loss


@pytest.fixture(autouse=True, scope="module")
def steps_are_counted() -> None:
    """The first dense copy of a process registers a hook for good."""
    layer = nn.Linear(64, 64)
    sparsify(layer, {"weight": torch.ones(64, 64, dtype=torch.bool)}, compute="samo")
    layer(torch.ones(1, 64))


def snapshot() -> dict[str, Any]:
    """What code that runs in this process after a fit could stumble over."""
    gc.collect()
    return {
        "warning filters": list(warnings.filters),
        "environment": dict(os.environ),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "signal handlers": {s: signal.getsignal(s) for s in signal.valid_signals()},
        "hooks of Python": (sys.excepthook, sys.unraisablehook, threading.excepthook),
        "functions called at exit": atexit._ncallbacks(),
        "logging": {
            name: (logger.level, list(logger.handlers), list(logger.filters))
            for name, logger in logging.root.manager.loggerDict.items()
            if isinstance(logger, logging.Logger)
            and (logger.level, logger.handlers, logger.filters) != (0, [], [])
        },
        "files": sorted(os.listdir(tempfile.gettempdir())),
        "open files": _open_files(),
        "arguments and folder": (list(sys.argv), list(sys.path), os.getcwd()),
        "classes": {
            (each.__name__, name): id(value)
            for each in PATCHABLE
            for name, value in vars(each).items()
            if name != "__slotnames__"  # which pickle notes down
        },
        "functions": {name: id(value) for name, value in vars(nn.functional).items()},
        "threads of torch": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "settings of torch": (
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            bool(torch.backends.mkldnn.enabled),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_anomaly_enabled(),
        ),
        "modes": (
            torch._C._len_torch_function_stack(),
            _get_current_dispatch_mode_stack(),
            torch._C._autograd._top_saved_tensors_default_hooks(False),
        ),
        "hooks of all modules": {
            name: list(value)
            for name, value in vars(module_hooks).items()
            if name.startswith("_global") and isinstance(value, dict)
        },
        "hooks of all optimizers": (
            list(optimizer_hooks._global_optimizer_pre_hooks),
            list(optimizer_hooks._global_optimizer_post_hooks),
        ),
        "pytree nodes": set(pytree.SUPPORTED_NODES),
        "process group": dist.is_initialized(),
        "clock records": _clock_records(),
    }


def _clock_records() -> bool:
    clock.add("optimizer", 0, 0)
    return clock.stop_recording() != []


def _open_files() -> list[str]:
    names = []
    for file in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{file}"))
        except FileNotFoundError:  # of the listing itself
            continue
    return sorted(name.split(":")[0] for name in names)


def marks(module: LightningModule) -> dict[str, Any]:
    """What could have been put on a module: classes, attributes, hooks, functions."""
    found: dict[str, Any] = {"log": module.log.__func__, "example": id(module.example_input_array)}
    for name, each in module.named_modules():
        found[name] = type(each), sorted(vars(each))
        found[f"{name}.hooks"] = {
            key: list(value) for key, value in vars(each).items() if key.endswith("_hooks")
        }
        if isinstance(each, Metric):
            found[f"{name}.forward"] = each.forward.__func__
            found[f"{name}.sync"] = each.distributed_available_fn, each.dist_sync_fn
            found[f"{name}.compute"] = each.compute.__wrapped__.__func__
    for name, parameter in module.named_parameters():
        hooks = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
        found[f"{name} itself"] = id(parameter), type(parameter), parameter.shape, parameter.dtype
        found[f"{name} on"] = parameter.device, parameter.requires_grad, *map(bool, hooks)
    return found


def differences(before: dict[Any, Any], after: dict[Any, Any]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name in before.keys() | after.keys():
        old, new = before.get(name), after.get(name)
        if old != new:
            both = isinstance(old, dict) and isinstance(new, dict)
            found[name] = differences(old, new) if both else (old, new)
    return found


def abandoned_shared_memory(since: float) -> set[str]:
    """Files in shared memory, younger than ``since``, that no process has open or mapped.

    Other tests run meanwhile, whose files are removed in the end. Semaphores do not count: glibc
    makes them under another name, so who has one open does not show.
    """
    found = _abandoned_since(since)
    for _ in range(20):
        if not found:
            break
        time.sleep(0.5)
        found &= _abandoned_since(since)
    return found


def _abandoned_since(since: float) -> set[str]:
    used = "".join(_read(maps) for maps in Path("/proc").glob("[0-9]*/maps"))
    young = set()
    for file in SHARED_MEMORY.iterdir():
        try:
            mine = file.stat().st_uid == os.getuid() and file.stat().st_ctime >= since
        except FileNotFoundError:
            continue
        if mine and str(file) not in used and not file.name.startswith("sem."):
            young.add(file.name)
    return young


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # The process has ended, or is another user's.
        return ""


ENTRIES: dict[str, Callable[[Trainer, LightningModule], Any]] = {
    "fit": lambda run, module: run.fit(module, loader(1, batches=3), loader(2, batches=2)),
    "validate": lambda run, module: run.validate(module, loader(2, batches=2), verbose=False),
    "test": lambda run, module: run.test(module, loader(2, batches=2), verbose=False),
    "predict": lambda run, module: run.predict(module, loader(2, batches=2)),
}

STRATEGIES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "one rank": ({}, 1, {}),
    "recompute": ({"recompute": 2, "microbatches": 2}, 1, {}),
    "divided": ({"shard_optimizer": True, "microbatches": 2}, 1, {"gradient_clip_val": 1.0}),
    "loopback": (
        {"g_inter": 2, "transport": "loopback"},
        1,
        {"precision": "bf16-mixed", "gradient_clip_val": 1.0},
    ),
    "ranks": ({"g_inter": 2}, 2, {"gradient_clip_val": 1.0}),
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other processes have nothing to do in this temporary folder."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.chdir(tmp_path)
    return iter([None])


def observed_run(name: str, folder: Path, raises: bool) -> tuple[Trainer, Trainer, Example]:
    """A Trainer to observe, one of Lightning's own that has done the same, and their module."""
    arguments, devices, options = STRATEGIES[name]
    (folder / "traces").mkdir()
    module, timeline = Example(), PipelineTimeline(folder=folder / "traces")
    # What Lightning, matplotlib and numba leave is none of these tests' business.
    sparsify(nn.Linear(512, 512), {"weight": torch.rand(512, 512) > 0.9})
    plain = trainer("auto", max_epochs=2, callbacks=[timeline], **options)
    for call in ENTRIES.values():
        call(plain, module)
    module.raises = raises
    ticket = EarlyBirdTicket(0.5, every="1 epoch", draw_by="1 epoch")
    callbacks = [ticket, PipelineTimeline(folder=folder / "traces")]
    strategy = AxoSparseStrategy(**arguments)
    run = trainer(strategy, devices, max_epochs=2, callbacks=callbacks, **options)
    return run, plain, module


CALLED = {
    "fit": ["fit"],
    "a fit that raises": ["fit"],
    "the rest": ["validate", "test", "predict"],
}
CALLS = [
    *((name, what) for name in STRATEGIES for what in ("fit", "a fit that raises")),
    ("ranks", "the rest"),
    ("loopback", "the rest"),
]


@pytest.mark.parametrize(("name", "what"), CALLS)
def test_the_process_is_as_it_was(name: str, what: str, tmp_path: Path) -> None:
    raises = what == "a fit that raises"
    run, plain, module = observed_run(name, tmp_path, raises)
    callbacks, began = list(run.callbacks), time.time()
    before = snapshot() | marks(module)
    with pytest.raises(ArithmeticError, match="told to") if raises else nullcontext() as error:
        for entry in CALLED[what]:
            ENTRIES[entry](run, module)
    if raises:
        for note in getattr(error.value, "__notes__", []):
            Path(note.split("'")[-2]).unlink()  # The file that it names is to stay.
    assert differences(before, snapshot() | marks(module)) == {}
    assert run.callbacks == callbacks
    assert type(run.precision_plugin) is type(plain.precision_plugin)
    assert vars(run.precision_plugin).keys() == vars(plain.precision_plugin).keys()
    for optimizer in run.optimizers:
        assert vars(optimizer).keys() == vars(plain.optimizers[0]).keys()
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
    assert not abandoned_shared_memory(began)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "ranks"])
def test_no_global_keeps_the_module(name: str, tmp_path: Path) -> None:
    run, plain, module = observed_run(name, tmp_path, raises=False)
    for call in ENTRIES.values():
        call(run, module)
    remembered = weakref.ref(module), weakref.ref(module.model[0].weight), weakref.ref(run)
    del run, plain, module
    gc.collect()
    assert [each() for each in remembered] == [None, None, None]


class Refusing(Precision):
    """Raises when the module has been given to the stages, and nothing has run yet."""

    def connect(self, *args: Any) -> Any:
        raise ArithmeticError("told to")


def test_a_setup_that_fails_half_way_leaves_the_module_as_it_was() -> None:
    module = Example()
    ENTRIES["fit"](trainer(), module)
    strategy = AxoSparseStrategy(g_inter=2, transport="loopback")
    before = snapshot() | marks(module)
    with pytest.raises(ArithmeticError, match="told to"):
        ENTRIES["fit"](trainer(strategy, plugins=[Refusing()]), module)
    assert differences(before, snapshot() | marks(module)) == {}


def test_a_log_of_the_users_own_comes_back() -> None:
    module = Example()
    own = lambda *args, **kwargs: None  # noqa: E731
    module.log = own
    ENTRIES["fit"](trainer(AxoSparseStrategy(microbatches=2)), module)
    assert module.log is own


def test_filters_that_a_hook_adds_stay() -> None:
    class Filters(Callback):
        def on_train_start(self, *args: Any) -> None:
            warnings.filterwarnings("ignore", message="from a hook")

    before = list(warnings.filters)
    ENTRIES["fit"](trainer(AxoSparseStrategy(), callbacks=[Filters()]), Example())
    added = [entry for entry in warnings.filters if entry not in before]
    assert [entry[1].pattern for entry in added] == ["from a hook"]
