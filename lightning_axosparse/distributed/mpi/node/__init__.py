"""Ranks of one node: memory that they share, and the all-reduce inside it."""
