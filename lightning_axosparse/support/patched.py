"""Replaces an attribute of an object, a class or a module inside a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(owner: object, name: str, value: Any) -> Iterator[None]:
    """Set an attribute inside the context; after it the owner has its own again, if it had one."""
    own = {key: vars(owner)[key] for key in vars(owner).keys() & {name}}
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        for key, before in own.items():
            setattr(owner, key, before)
