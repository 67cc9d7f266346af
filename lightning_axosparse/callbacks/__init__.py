"""The callbacks: the early-bird ticket, the timeline of a step, the report of a run."""
