"""Runs a Trainer's call on new ranks and applies its changes in the calling process.

It may import from strategy, and from all subpackages from which strategy may.
"""
