"""Lightning's steps on a whole batch: split, run by the pipeline, combined, and checked."""
