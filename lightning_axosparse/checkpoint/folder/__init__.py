"""Checkpoints that are folders, of which each stage writes its own part."""
