"""The assignment of layers to stages, and the storage of only this rank's tensors."""
