"""What every room uses: atomic files, checksums, argument validation, free memory, time spans.

It imports from no other room.
"""
