"""Runs Lightning's own test-suite with the strategy in place of Lightning's default one."""
