"""The part of a module that a rank makes, keeps and leaves."""
