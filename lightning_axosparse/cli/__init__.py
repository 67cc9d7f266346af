"""The commands `axosparse-train`, `axosparse-eval`, `axosparse-sweep` and `axosparse-plan`.

It may import from every subpackage.
"""
