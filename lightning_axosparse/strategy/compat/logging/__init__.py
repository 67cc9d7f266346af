"""Values that steps log, print or give to metrics, once a batch and on every rank."""
