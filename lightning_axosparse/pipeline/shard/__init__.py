"""Which stage computes which layers, and the tensors that each rank keeps for that."""
