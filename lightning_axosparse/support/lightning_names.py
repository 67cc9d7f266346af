"""Makes both names of Lightning, `lightning.pytorch` and `pytorch_lightning`, one set of modules.

Two packages have the same code under two names. If both are imported, each has its own classes, and
a ``lightning.pytorch.Callback`` is no ``pytorch_lightning.Callback``. Here the modules have the
name that is imported first, and an import of the other name finds the same modules.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from lightning_axosparse.support.troubleshooting import see

_NAMES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


class OtherName(MetaPathFinder, Loader):
    """Finds the modules of packages under other names.

    Args:
        names: the other name of a package -> the name under which its modules are imported.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a module with such a name; None for all others."""
        for name, real in self._names.items():
            if fullname == name or fullname.startswith(f"{name}."):
                return ModuleSpec(fullname, self, loader_state=real + fullname[len(name) :])
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of the real name."""
        module = import_module(spec.loader_state)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec; the module has run already."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def _unite() -> None:
    """Make imports of both names find the same modules from now on, or warn if that fails."""
    try:
        versions = {version("lightning"), version("pytorch-lightning")}
    except PackageNotFoundError:  # There is only one of them.
        return
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" in sys.modules:
        _warn("both were imported before lightning_axosparse. Import it first")
    elif len(versions) == 1:
        imported = [name for name in _NAMES if name in sys.modules]
        names = {name: real for name, real in _NAMES.items() if name not in imported}
        names |= {_NAMES[name]: name for name in imported}
        sys.meta_path.insert(0, OtherName(names))
    elif "pytorch_lightning" in sys.modules:
        _warn(f"they have different versions, {' and '.join(sorted(versions))}. Install one")


def _warn(reason: str) -> None:
    warnings.warn(
        "lightning.pytorch and pytorch_lightning have the same classes under two names, and an "
        f"object of one is no instance of the other: {reason}, or import only one of them."
        + see("copies"),
        stacklevel=4,
    )


_unite()
