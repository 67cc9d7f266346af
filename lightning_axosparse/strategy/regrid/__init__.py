"""Regrid: moves a run to shorter pipelines when pruning has freed memory.

It may import from strategy and what strategy may import from.
"""
