"""Conversion of modules, their parameters and their optimizer state to sparse storage."""
