"""Pickles objects between the caller and its ranks, with references to objects that both have.

Tensors are saved by torch, and code of ``__main__`` and notebooks by value (cloudpickle). An object
that both sides have (the trainer, the module, a callback) is saved as its name: what refers to it
refers to the object of that name after loading. Classes and functions of ``__main__`` are put into
the ``__main__`` of the process that loads them, because code looks them up there by name: pickle
does for the hyperparameters in a checkpoint, jsonargparse for the classes in a configuration.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import cloudpickle
import torch

_PROTOCOL = 5


def save(value: Any, path: Path, known: Mapping[str, Any] | None = None) -> None:
    """Write ``value`` to ``path``, and the objects of ``known`` as their names."""
    names = _names(known or {})

    class Pickler(_Pickler):
        known_names = names

    module = SimpleNamespace(__name__="pickle", Pickler=Pickler)
    torch.save(value, path, pickle_module=module, pickle_protocol=_PROTOCOL)


def load(path: Path, known: Mapping[str, Any] | None = None) -> Any:
    """Read what :func:`save` wrote; names become the objects of ``known``.

    Tensors are mapped from the file, copy-on-write.
    """
    unpickler = _unpickler(known or {})
    module = SimpleNamespace(__name__="pickle", Unpickler=unpickler, load=pickle.load)
    return torch.load(path, pickle_module=module, weights_only=False, mmap=True)


def fingerprint(value: Any, known: Mapping[str, Any]) -> bytes | None:
    """A digest of the pickled value, or None if it cannot be pickled."""
    sink = _Digest()
    try:
        _FingerprintPickler(sink, _names(known)).dump(value)
    except Exception:  # Objects may raise any exception.
        return None
    return sink.digest()


def survives(value: Any, known: Mapping[str, Any]) -> bool:
    """Whether a value can be pickled and unpickled; some can only be pickled."""
    storages: list[Any] = []

    class Pickler(_Pickler):
        known_names = _names(known)

        def persistent_id(self, value: Any) -> int | None:
            if not isinstance(value, torch.TypedStorage | torch.UntypedStorage):
                return None
            storages.append(value)
            return len(storages) - 1

    class Unpickler(_unpickler(known)):  # type: ignore[misc]
        def persistent_load(self, index: int) -> Any:
            return storages[index]

    pickled = io.BytesIO()
    try:
        Pickler(pickled, protocol=_PROTOCOL).dump(value)
        Unpickler(io.BytesIO(pickled.getvalue())).load()
    except Exception:  # Objects may raise any exception.
        return False
    return True


def first_unpicklable(roots: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The path and value of the innermost attribute or item that cannot be pickled.

    A reference from one of the roots to another can be pickled.
    """
    for name, root in roots.items():
        others = {other: value for other, value in roots.items() if value is not root}
        if found := _search(root, name, others, visited=set()):
            return found
    return None


def _search(
    value: Any, path: str, known: Mapping[str, Any], visited: set[int]
) -> tuple[str, Any] | None:
    if id(value) in visited or fingerprint(value, known) is not None:
        return None
    visited.add(id(value))
    for name, part in _parts(value):
        if found := _search(part, path + name, known, visited):
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


def _names(known: Mapping[str, Any]) -> dict[int, str]:
    return {id(value): name for name, value in known.items()}


def _known(name: str) -> Any:
    raise LookupError(
        f"{name!r} can only be loaded by lightning_axosparse.strategy.launcher.pickling.load."
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


def _unpickler(known: Mapping[str, Any]) -> type[pickle.Unpickler]:
    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) == (_known.__module__, _known.__qualname__):
                return known.__getitem__
            return super().find_class(module, name)

    return Unpickler


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    known_names: Mapping[int, str] = {}

    def reducer_override(self, value: Any) -> Any:
        if id(value) in self.known_names:
            return _known, (self.known_names[id(value)],)
        reduced = super().reducer_override(value)
        if isinstance(reduced, tuple) and _is_of_main(value):
            make, arguments, *rest = reduced
            return (_define_in_main, (value.__name__, make, arguments), *rest)
        return reduced


class _FingerprintPickler(_Pickler):
    """Pickles into a digest; the bytes of a tensor's storage are not copied."""

    def __init__(self, sink: _Digest, known_names: Mapping[int, str]) -> None:
        super().__init__(sink, protocol=_PROTOCOL)
        self.known_names = known_names
        self._sink = sink

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.storage.TypedStorage):
            value = value._untyped_storage
        if not isinstance(value, torch.UntypedStorage):
            return None
        if value.device.type != "meta":
            self._sink.write(torch.empty(0, dtype=torch.uint8).set_(value.cpu()).numpy())
        return value.nbytes()


class _Digest(io.RawIOBase):
    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return len(data)

    def digest(self) -> bytes:
        return self._hash.digest()
