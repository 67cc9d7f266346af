"""Prints how each step of the corpus goes: ``python -m tests.corpus hostile ordinary``."""

from __future__ import annotations

import argparse
import time

import torch

from tests.corpus.harness import compare, entries
from tests.ranks import without_external_callbacks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", default=["hostile", "ordinary", "published"])
    parser.add_argument("--only", help="entries whose name contains this")
    parser.add_argument("--long", action="store_true", help="show messages whole")
    options = parser.parse_args()
    torch.set_num_threads(1)
    without_external_callbacks()
    for package in options.packages:
        for one in entries(package).values():
            if options.only and options.only not in one.name:
                continue
            began = time.perf_counter()
            try:
                outcome = compare(one)
            except Exception as error:  # Plain Lightning has failed.
                print(f"{one.name}: {error!r}")
                continue
            took = time.perf_counter() - began
            found = "; ".join(f"{name}: {what}" for name, what in outcome.differences.items())
            said = " | ".join(outcome.said)
            said, found = (said, found) if options.long else (said[:140], found[:160])
            print(
                f"| {package} | {one.cause} | {one.name}{' (=)' if one.equal else ''} "
                f"| {outcome.kind} | {found} | {said} | {took:.2f} |".replace("\n", " "),
                flush=True,
            )


if __name__ == "__main__":
    main()
