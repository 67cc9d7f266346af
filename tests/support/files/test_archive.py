from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_axosparse import CorruptFileError
from lightning_axosparse.support.files import archive

CONTENT = {"weight": torch.arange(5000.0), "step": 3}


@pytest.mark.parametrize("save", [archive.save, torch.save])
def test_every_change_of_a_tensor_is_found(save, tmp_path: Path) -> None:
    path = tmp_path / "file"
    save(CONTENT, path)
    archive.check(path)
    assert torch.equal(torch.load(path)["weight"], CONTENT["weight"])
    whole = path.read_bytes()
    place = whole.index(CONTENT["weight"].numpy().tobytes())
    for at in (place, place + 10_000, place + 19_999):
        data = bytearray(whole)
        data[at] ^= 1
        path.write_bytes(data)
        with pytest.raises(CorruptFileError, match=f"{path}' cannot be read"):
            archive.check(path)


@pytest.mark.parametrize("save", [archive.save, torch.save])
def test_a_truncated_file_is_found(save, tmp_path: Path) -> None:
    path = tmp_path / "file"
    save(CONTENT, path)
    whole = path.read_bytes()
    for length in (0, 3, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptFileError):
            archive.check(path)
