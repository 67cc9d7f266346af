"""Every line that imports mpi4py."""
