"""Channels of a network that can be removed, and the ticket that names those to keep."""
