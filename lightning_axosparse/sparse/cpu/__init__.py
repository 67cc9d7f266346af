"""Products and convolutions on the kept values of a sparse weight on a CPU."""
