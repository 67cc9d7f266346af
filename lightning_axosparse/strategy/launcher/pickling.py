"""Pickles objects between the caller and its ranks, with references to objects that both have.

Tensors are saved by torch, and code of ``__main__`` and notebooks by value (cloudpickle). An object
that both have (the trainer, the module, a callback) is saved as its name, and loaded as the object
of that name. Classes and functions of ``__main__`` are added to the ``__main__`` of the process
that loads them, because code looks them up there by name: pickle for the hyperparameters in a
checkpoint, jsonargparse for the classes in a configuration. On ranks functions of ``__main__`` have
its names as globals, too, which ``torch.compile`` looks up in the module.
"""

from __future__ import annotations

import copyreg
import hashlib
import importlib
import io
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, BinaryIO

import cloudpickle
import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_axosparse.support.torch_internals import parametrize_again

_PROTOCOL = 5


def save(value: Any, file: Path | BinaryIO, named: Mapping[str, Any] | None = None) -> None:
    """Write ``value`` to a file, and the objects of ``named`` as their names."""

    class Pickler(_Pickler):
        names = names_by_id(named or {})

    module = SimpleNamespace(__name__="pickle", Pickler=Pickler)
    torch.save(value, file, pickle_module=module, pickle_protocol=_PROTOCOL)


def load(
    file: Path | BinaryIO,
    named: Mapping[str, Any] | None = None,
    main: dict[str, Any] | None = None,
) -> Any:
    """Read what :func:`save` wrote; names become the objects of ``named``.

    Tensors of a path are mapped from the file, copy-on-write.

    Args:
        file: the file.
        named: the objects, by name.
        main: the dict in which functions of ``__main__`` find their globals; None for a new one,
            so that they change none here.
    """

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) == (__name__, _load_by_name.__qualname__):
                return (named or {}).__getitem__
            if main is not None and (module, name) == (__name__, _new_globals.__qualname__):
                return lambda _: main
            return super().find_class(module, name)

    module = SimpleNamespace(__name__="pickle", Unpickler=Unpickler, load=pickle.load)
    mapped = isinstance(file, Path)
    return torch.load(file, pickle_module=module, weights_only=False, mmap=mapped)


def names_by_id(named: Mapping[str, Any]) -> dict[int, str]:
    """Return the names of objects by their ``id``."""
    return {id(value): name for name, value in named.items()}


def pickle_digest(value: Any, names: Mapping[int, str]) -> bytes | None:
    """Return a digest of the pickled value, or None if it cannot be pickled."""
    digest = hashlib.blake2b(digest_size=16)
    pickler = _Pickler(SimpleNamespace(write=digest.update), protocol=_PROTOCOL)
    pickler.names = names
    try:
        pickler.dump(value)
    except Exception:  # Objects may raise any exception.
        return None
    return digest.digest()


def can_be_copied(value: Any, named: Mapping[str, Any]) -> bool:
    """Whether a value can be pickled and unpickled; some can only be pickled."""
    pickled = io.BytesIO()
    try:
        save(value, pickled, named)
        pickled.seek(0)
        load(pickled, named)
    except Exception:  # Objects may raise any exception.
        return False
    return True


def first_unpicklable(roots: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the path and value of the innermost attribute or item that cannot be pickled.

    A reference from one of the roots to another can be pickled.
    """
    for name, root in roots.items():
        others = {other: value for other, value in roots.items() if value is not root}
        if found := _search(root, name, names_by_id(others), visited=set()):
            return found
    return None


def _search(
    value: Any, path: str, names: Mapping[int, str], visited: set[int]
) -> tuple[str, Any] | None:
    if id(value) in visited or pickle_digest(value, names) is not None:
        return None
    visited.add(id(value))
    for name, part in _parts(value):
        if found := _search(part, path + name, names, visited):
            return found
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    if (owner := getattr(value, "__self__", None)) is not None:
        yield ".__self__", owner
    yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())


class _MainGlobals(dict[str, Any]):
    """Stands for the globals of functions of ``__main__``, which pickle their own names."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_globals, (dict(self),)


def _new_globals(names: dict[str, Any]) -> dict[str, Any]:
    """Return the globals of functions of ``__main__``, unless :func:`load` is given others."""
    return names


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    names: Mapping[int, str] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        main = vars(sys.modules["__main__"])
        self.globals_ref[id(main)] = _MainGlobals(__name__="__main__")

    def reducer_override(self, value: Any) -> Any:
        if id(value) in self.names:
            return _load_by_name, (self.names[id(value)],)
        if _is_special_module(value):
            return importlib.import_module, (value.__name__,)
        if _skips_init(value):
            return copyreg.__newobj__, (type(value), *value.args), vars(value)  # type: ignore[attr-defined]
        if isinstance(value, nn.Module) and is_parametrized(value):
            # torch has given it a class of its own, whose objects cannot be pickled.
            original = type(value).__bases__[0]
            if type(value).__name__ == f"Parametrized{original.__name__}":
                return object.__new__, (original,), vars(value), None, None, parametrize_again
        if isinstance(value, nn.Module) and type(value).__new__ is not object.__new__:
            own: Any = value.__reduce_ex__(_PROTOCOL)
            if own[0] is vars(copyreg)["__newobj__"]:  # It calls `__new__` without arguments.
                return (object.__new__, own[1][:1], *own[2:])
        reduced = super().reducer_override(value)
        if isinstance(reduced, tuple) and _is_of_main(value):
            make, arguments, *rest = reduced
            return (_define_in_main, (value.__name__, make, arguments), *rest)
        return reduced


def _load_by_name(name: str) -> Any:
    raise LookupError(
        f"{name!r} can only be loaded by lightning_axosparse.strategy.launcher.pickling.load."
    )


def _is_special_module(value: Any) -> bool:
    """Whether an object has replaced a module in ``sys.modules``, as ``torch.backends.cudnn`` has.

    Cloudpickle would copy it.
    """
    return (
        isinstance(value, ModuleType)
        and type(value) is not ModuleType
        and sys.modules.get(value.__name__) is value
    )


def _skips_init(value: Any) -> bool:
    """Whether to unpickle an exception without ``__init__`` of its class.

    Pickle would call that with ``args``, which need not be the arguments that it takes.
    """
    return (
        isinstance(value, BaseException)
        and isinstance(type(value).__init__, FunctionType)
        and type(value).__reduce__ is BaseException.__reduce__
        and type(value).__reduce_ex__ is BaseException.__reduce_ex__
    )


def _is_of_main(value: Any) -> bool:
    return (
        isinstance(value, type | FunctionType)
        and value.__module__ == "__main__"
        and vars(sys.modules["__main__"]).get(value.__name__) is value
    )


def _define_in_main(name: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    value = make(*arguments)
    vars(sys.modules["__main__"]).setdefault(name, value)
    return value
