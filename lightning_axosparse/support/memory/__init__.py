"""Memory: what is free, what is given back, and tensors that are made later."""
