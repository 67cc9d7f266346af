"""Lists the files of a checkpoint folder with their sizes and checksums: the manifest.

It is written last, so a folder that has one is whole.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from lightning.pytorch.utilities import rank_zero_warn

from lightning_axosparse.support.corrupt_file import CorruptFileError, reading
from lightning_axosparse.support.files.atomic_file import replacing
from lightning_axosparse.support.files.checksum import of_file
from lightning_axosparse.support.troubleshooting import see

_NAME = "manifest.json"
_FORMAT = "lightning_axosparse.manifest/1"


class Entry(NamedTuple):
    """What the manifest says of a file.

    Attributes:
        size: in bytes.
        crc32: of its content.
    """

    size: int
    crc32: int


def entry(path: Path) -> Entry:
    """Read a file once, and return what a manifest says of it."""
    with path.open("rb") as file:
        return Entry(path.stat().st_size, of_file(file))


def write(folder: Path, entries: Mapping[str, Entry]) -> None:
    """Write the manifest of a folder whose other files are on the disk.

    Args:
        folder: of the checkpoint.
        entries: by name, its files.
    """
    files = {name: entries[name]._asdict() for name in sorted(entries)}
    with replacing(folder / _NAME) as file:
        file.write(json.dumps({"format": _FORMAT, "files": files}, indent=1).encode())


def verify(folder: Path) -> None:
    """Read each file of a folder once and check that it is as it was written.

    Without a manifest, as in folders of torch, Lightning and older versions, it warns.

    Args:
        folder: of the checkpoint.

    Raises:
        CorruptFileError: if a file is not as it was written.
    """
    if not (folder / _NAME).exists():
        rank_zero_warn(
            f"'{folder}' has no {_NAME}, which torch, Lightning and older versions do not write: "
            "damage is found inside of tensors alone. Save a checkpoint anew to have one."
            + see("files")
        )
        return
    with reading(folder):
        for name, said in _read(folder).items():
            with opened(folder, name) as file:
                found = Entry(file.seek(0, 2), of_file(_rewound(file)))
            if found != said:
                raise CorruptFileError(f"'{name}' is not the file that {_NAME} lists")


def names(folder: Path) -> set[str] | None:
    """Return the names of the files that the manifest lists; None without a manifest."""
    return set(_read(folder)) if (folder / _NAME).exists() else None


def opened(folder: Path, name: str) -> BinaryIO:
    """Open a file of a folder to read it.

    Raises:
        CorruptFileError: if it is not a file inside of the folder.
    """
    path = folder / name
    if Path(name).name != name or not stat.S_ISREG(path.lstat().st_mode):
        raise CorruptFileError(f"{name!r} is not the name of a file in the folder itself")
    return path.open("rb")


def _rewound(file: BinaryIO) -> BinaryIO:
    file.seek(0)
    return file


def _read(folder: Path) -> dict[str, Entry]:
    with opened(folder, _NAME) as file:
        content = json.loads(file.read())
    if content["format"] != _FORMAT:
        raise CorruptFileError(f"{_NAME} is a {content['format']}, this version reads {_FORMAT}")
    return {name: Entry(**said) for name, said in content["files"].items()}
