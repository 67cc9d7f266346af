"""Implements torch.distributed, point-to-point messages and shared memory over mpi4py.

Only this subpackage imports mpi4py; it may import from support and distributed.
"""
