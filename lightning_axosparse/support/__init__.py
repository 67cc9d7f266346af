"""Functions for all other subpackages: atomic files, argument validation, free memory, trace.

It imports from no other subpackage.
"""
