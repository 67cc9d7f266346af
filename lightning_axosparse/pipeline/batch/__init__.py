"""A batch and its micro-batches: which dimension is cut, and how results are merged."""
