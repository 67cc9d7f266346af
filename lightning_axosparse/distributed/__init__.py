"""The grid of ranks, its process groups, collectives, and the all-reduce of gradients.

It may import from support.
"""
