"""The Lightning strategy: its hooks, steps, sharding and validation.

It may import from all subpackages except callbacks, cli and examples.
"""
