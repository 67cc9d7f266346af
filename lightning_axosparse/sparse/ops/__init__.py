"""Operators that take a sparse weight: linear, convolution, embedding, other torch functions."""
