"""Sweeps: the jobs of one, the arms that they compare, and the report that is made of all of them.

It may import from cli and what that may import from.
"""
