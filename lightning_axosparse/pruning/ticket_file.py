"""Reads tickets from states and files, and says what is wrong with those that are damaged."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_axosparse.support import archive
from lightning_axosparse.support.checksum import verified
from lightning_axosparse.support.corrupt_file import CorruptFileError, reading
from lightning_axosparse.support.troubleshooting import see


def fields_of(state: Mapping[str, Any], form: str, what: str) -> dict[str, Any]:
    """Return the fields of a ticket's state.

    Args:
        state: the fields, with a checksum and their format.
        form: the format that this version reads.
        what: names the state in errors.

    Raises:
        CorruptFileError: if the state is not as it was written, or is of another version.
    """
    if state["format"] != form:
        raise CorruptFileError(
            f"it is a {state['format']}, but this version of lightning_axosparse reads {form}"
        )
    fields = verified(state, what)
    del fields["format"]
    return fields


@contextmanager
def content_of(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Read a file; what is found wrong with the content inside the context names the file.

    Raises:
        FileNotFoundError: if there is no such file.
        CorruptFileError: if the file is not as it was written.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file '{path}'." + see("files"))
    archive.check(path)
    with reading(path):
        yield torch.load(path, map_location="cpu", weights_only=True)
