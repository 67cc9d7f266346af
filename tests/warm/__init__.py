"""Starts the ranks of tests as forks of a process that has imported what all of them need.

A rank spends five seconds of a core on imports, and the tests start more than a hundred. A fork
that starts ranks itself, as a user's script does, starts forks, too.
"""
