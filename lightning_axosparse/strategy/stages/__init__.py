"""The layers and tensors that the stages of a rank have: which, how they are kept, and saved."""
