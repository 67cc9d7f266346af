"""The move of a run to shorter pipelines once pruning has freed memory.

It may import from strategy and what strategy may import from.
"""
