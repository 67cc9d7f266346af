"""The tensor of kept values, its index formats, and the dense copy that operators use."""
