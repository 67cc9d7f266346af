"""The commands `axosparse-train`, `axosparse-sweep` and `axosparse-plan`.

It may import from every subpackage.
"""
