"""Whether jobs end, and say why, whatever happens to them."""
