"""All uses of Lightning's private API: logging, metrics, precision, loaders, loops, collectives.

It may import from all subpackages from which strategy may.
"""
