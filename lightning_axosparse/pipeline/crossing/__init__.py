"""What travels from stage to stage: activations, skip tensors, side outputs and gradients."""
