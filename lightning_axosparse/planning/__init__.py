"""Predicts which grid, micro-batch size and in-flight limit are fastest, by simulation.

It may import from support, distributed, sparse, pruning and pipeline.
"""
