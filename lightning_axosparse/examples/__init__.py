"""The models and the data that the command line and the notebooks use.

It may import from support.
"""
