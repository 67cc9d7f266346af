"""What all others use: atomic files, checksums, argument validation, free memory, time spans.

It imports from no other subpackage.
"""
