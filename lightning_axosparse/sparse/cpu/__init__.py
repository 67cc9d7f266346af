"""Products with a sparse weight: on its unpruned values on a CPU, or panel by panel."""
