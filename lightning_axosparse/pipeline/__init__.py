"""Partitions a module into stages and runs its steps on them: schedule, engine, micro-batches.

It may import from support, distributed, sparse and pruning.
"""
