"""The layers and tensors of the stages of a rank: their choice, storage and checkpoints."""
