"""Backward passes: activations computed again, weight gradients that wait, gradient hooks."""
