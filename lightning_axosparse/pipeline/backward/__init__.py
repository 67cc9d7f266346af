"""Backward passes: activations computed again, gradient hooks."""
