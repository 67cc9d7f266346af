"""The Lightning strategy: its hooks, steps, sharding and validation.

It may import from every subpackage but callbacks, cli and examples.
"""
