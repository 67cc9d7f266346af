"""The sparse weight as a tensor, its index formats, and the dense copy that operators use."""
