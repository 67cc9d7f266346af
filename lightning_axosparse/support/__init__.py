"""Functions for all other subpackages: files, arguments, memory, torch's internals, traces.

It imports from no other subpackage.
"""
