from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_axosparse import CorruptFileError
from lightning_axosparse.support.files.checksum import verified, with_checksum


@settings(max_examples=30)
@given(st.recursive(st.integers() | st.text() | st.none(), st.lists))
def test_a_checksum_is_of_all_values(value: Any) -> None:
    record = with_checksum({"value": value, "tensor": torch.arange(6).view(2, 3)})
    assert verified(record, "it")["value"] == value
    tensors = [torch.arange(6).view(3, 2), torch.arange(6).int().view(2, 3), torch.zeros(2, 3)]
    changes: list[dict[str, Any]] = [{"tensor": tensor} for tensor in tensors]
    changes += [{"value": [value]}, {"value": (value, 0)}, {"another": 1}]
    for change in changes:
        with pytest.raises(CorruptFileError, match="checksum of it"):
            verified({**record, **change}, "it")
