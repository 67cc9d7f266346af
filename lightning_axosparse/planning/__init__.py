"""Planning: which grid, micro-batch and in-flight limit suit a model and a cluster."""
