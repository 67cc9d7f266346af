"""What a step changes on a module, in micro-batches as it would in one batch."""
