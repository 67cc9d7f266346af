"""Products with a sparse weight: on its kept values on a CPU, or panel by panel."""
