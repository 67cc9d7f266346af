"""Masks by magnitude, distances between masks, and the ticket that stores the final masks.

It may import from support, distributed and sparse.
"""

from lightning_axosparse.pruning.ticket import Ticket

__all__ = ["Ticket"]
