"""Which pass a stage runs next: the schedules, how many micro-batches are in flight, and the choice."""
