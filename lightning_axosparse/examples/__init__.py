"""The models and data that the command line and the notebooks use."""
