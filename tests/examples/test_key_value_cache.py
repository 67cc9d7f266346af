from __future__ import annotations

import pytest
import torch

from lightning_axosparse.examples.key_value_cache import KeyValueCache


def test_returns_what_all_tokens_gave():
    keys, values = torch.randn(2, 3, 2, 6, 4)
    cache = KeyValueCache(6)
    for start, end in ((0, 3), (3, 4), (4, 5), (5, 6)):
        assert (cache.length, cache.full) == (start, False)
        got = cache.extend(keys[:, :, start:end], values[:, :, start:end])
        assert torch.equal(got[0], keys[:, :, :end])
        assert torch.equal(got[1], values[:, :, :end])
    assert cache.full


def test_memory_is_taken_once_in_the_dtype_of_the_first_tokens():
    cache = KeyValueCache(5)
    tokens = torch.ones(1, 1, 1, 2, dtype=torch.bfloat16)
    first, second = cache.extend(tokens, tokens), cache.extend(tokens, tokens)
    assert first[0].dtype == torch.bfloat16
    assert [one.data_ptr() for one in first] == [other.data_ptr() for other in second]


@pytest.mark.parametrize(("held", "more"), [(0, 5), (2, 2), (4, 1)])
def test_refuses_tokens_that_do_not_fit(held, more):
    cache = KeyValueCache(4)
    if held:
        cache.extend(*torch.zeros(2, 1, 1, held, 2))
    with pytest.raises(ValueError, match=f"{more} tokens after {held} do not fit"):
        cache.extend(*torch.zeros(2, 1, 1, more, 2))
    assert cache.length == held
