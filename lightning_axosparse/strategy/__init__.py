"""The Lightning strategy: its hooks, steps, sharding and validation, and the offloaded optimizer.

It may import from every subpackage but callbacks, cli and examples.
"""
