"""Operators that take a sparse weight, such as linear and convolution, and their products."""
