"""The commands `axosparse-train` and `axosparse-plan`.

It may import from every room.
"""
