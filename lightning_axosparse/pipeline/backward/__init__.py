"""Backward passes: activation checkpointing, gradient hooks."""
