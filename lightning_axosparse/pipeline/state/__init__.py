"""The state of a module that steps change, once a batch rather than once a micro-batch."""
