"""The loss of the whole batch, and other values, from those of its micro-batches."""
