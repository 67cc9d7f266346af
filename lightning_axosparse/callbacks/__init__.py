"""Callbacks that prune, record the timeline of a step, and report on a run.

It may import from every subpackage but cli and examples.
"""
