"""Gathers the state of all ranks, and writes and reads checkpoints and files of weights.

It may import from support, distributed, sparse, pruning, pipeline and planning.
"""
