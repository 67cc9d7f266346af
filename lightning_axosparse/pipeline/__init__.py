"""The pipeline: schedule, engine, stages, and how a module is dealt to them."""
