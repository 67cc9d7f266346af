"""Pruning: which weights to keep, and when that is settled."""

from lightning_axosparse.pruning.ticket import Ticket

__all__ = ["Ticket"]
