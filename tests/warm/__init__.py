"""Starts the ranks of tests as forks of two processes that have imported what all need.

A rank spends five seconds of a core on imports, and the tests start more than a hundred. A fork
that starts ranks itself, as a user's script does, starts forks, too.
"""
