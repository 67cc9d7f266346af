"""What all other subpackages use: atomic files, checksums, argument validation, free memory, trace.

It imports from no other subpackage.
"""
