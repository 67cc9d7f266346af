"""The tensor of kept values, their positions, and the dense copy that operators use."""
