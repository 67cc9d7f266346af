"""Masks of weights and of channels, distances between masks, and tickets with the final masks.

It may import from support, distributed and sparse.
"""

from lightning_axosparse.pruning.channel_ticket import ChannelTicket
from lightning_axosparse.pruning.ticket import Ticket

__all__ = ["ChannelTicket", "Ticket"]
