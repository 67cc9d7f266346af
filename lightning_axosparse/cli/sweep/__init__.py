"""Sweeps: their jobs, the arms that these compare, and the report on all of them.

It may import from cli and what that may import from.
"""
