"""Faults: what happens when ranks, hosts, links or files break."""
