"""The report of a run: measured facts, tables and plots.

It may import from callbacks and what callbacks may import from.
"""
