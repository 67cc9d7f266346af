"""Keeps the keys and values of earlier tokens, so that decoding computes those of new ones only."""

from __future__ import annotations

from torch import Tensor

from lightning_axosparse.support.troubleshooting import see


class KeyValueCache:
    """The keys and values that one attention layer has computed for a batch of sequences.

    Its memory is taken once, at the first tokens, in their dtype and on their device.

    Args:
        capacity: largest number of tokens in a sequence.

    Attributes:
        capacity: as above.
        length: number of tokens of each sequence so far.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._memory: tuple[Tensor, Tensor] | None = None

    @property
    def full(self) -> bool:
        """Whether there is no room for another token."""
        return self.length == self.capacity

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of the next tokens, and return those of all tokens.

        Args:
            keys: shape (batch, heads, time, size); ``time`` is 1 unless the cache is empty.
            values: the same shape.

        Returns:
            Views of the cache, (batch, heads, ``length``, size); valid until it is gone.

        Raises:
            ValueError: if the tokens do not fit, or several follow earlier ones at once: each of
                them may see another part of the cache.
        """
        start, end = self.length, self.length + keys.shape[2]
        if end > self.capacity or (start and end > start + 1):
            raise ValueError(
                f"{end - start} tokens after {start} do not fit: a cache takes up to "
                f"{self.capacity} tokens, at first any number and then one at a time."
                + see("examples")
            )
        if self._memory is None:
            batch, heads, _, size = keys.shape
            shape = (batch, heads, self.capacity, size)
            self._memory = keys.new_empty(shape), values.new_empty(shape)
        for memory, new in zip(self._memory, (keys, values), strict=True):
            memory[:, :, start:end] = new
        self.length = end
        all_keys, all_values = (memory[:, :, :end] for memory in self._memory)
        return all_keys, all_values
