"""All uses of Lightning's private API: logging, metrics, precision, loaders, loops, collectives.

It may import from what strategy may import from.
"""
