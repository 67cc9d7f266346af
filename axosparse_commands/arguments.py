"""The arguments of ``axosparse-plan`` and ``axosparse-sweep``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Any

_SHAPE = ("LAYERS", "WIDTH", "HEADS", "SEQUENCE", "VOCABULARY")
MODELS = {
    "gpt2": (12, 768, 12, 1024, 50257),
    "gpt2-xl": (48, 1600, 25, 1024, 50257),
    "gpt3-xl": (24, 2048, 16, 2048, 50257),
    "gpt3-2.7b": (32, 2560, 32, 2048, 50257),
    "gpt3-6.7b": (32, 4096, 32, 2048, 50257),
    "gpt3-13b": (40, 5120, 40, 2048, 50257),
}
"""Name -> the numbers of ``--shape``."""


def sweep() -> argparse.ArgumentParser:
    """Return what reads the arguments of ``axosparse-sweep``."""
    parser = argparse.ArgumentParser(
        prog="axosparse-sweep",
        description="Gather the results of a sweep in its folder: sweep.csv, pictures, and "
        "sweep.html, which stands alone. Jobs that failed are listed with their commands.",
    )
    says = f"%(prog)s {version('lightning-axosparse')}"
    parser.add_argument("--version", action="version", version=says)
    parser.add_argument("folder", type=_folder, help="hydra.sweep.dir of axosparse-train -m")
    return parser


def plan() -> argparse.ArgumentParser:
    """Return what reads the arguments of ``axosparse-plan``."""
    parser = argparse.ArgumentParser(
        prog="axosparse-plan",
        description="Simulate every grid, micro-batch and in-flight limit that fits into memory, "
        "and print the fastest.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"%(prog)s {version('lightning-axosparse')}")
    add("--model", type=_model, default="gpt3-2.7b", help=f"what to train: {', '.join(MODELS)}")
    add("--shape", type=_count, nargs=5, metavar=_SHAPE, help="a GPT of your own instead")
    add(
        "--experts",
        type=_count,
        nargs="+",
        default=[1],
        metavar="N",
        help="multi-layer perceptrons of a block, and how many of these a token goes to (1)",
    )
    add(
        "--tensor",
        type=_count,
        nargs="+",
        default=[1],
        metavar="N",
        help="how many ranks share the layers of a stage; several to compare",
    )
    add("--batch", type=_count, default=512, help="samples of a step, over all replicas")
    add("--pruning-ratio", type=_ratio, nargs="+", default=[0.0], help="a table for each")
    add("--recompute", action="store_true", help="recompute activations in backward")
    add("--shard-optimizer", action="store_true", help="replicas divide the optimizer's state")
    add(
        "--overhead",
        type=_not_negative,
        default=0.05,
        help="time that sparse storage adds to a pass, as a fraction of it",
    )
    add("--devices", type=_count, default=64, help="devices in all")
    add("--devices-per-node", type=_count, default=8, help="devices of a node")
    add("--memory", type=_positive, default=80.0, help="GB of a device")
    add("--tflops", type=_positive, default=312.0, help="peak of a device")
    add("--efficiency", type=_fraction, default=0.5, help="fraction of the peak in a pass")
    add("--memory-bandwidth", type=_positive, default=1500.0, help="GB/s of a device's memory")
    add("--node-bandwidth", type=_positive, default=200.0, help="GB/s between devices of a node")
    add("--network-bandwidth", type=_positive, default=25.0, help="GB/s of a node to others")
    add("--latency", type=_not_negative, default=10.0, help="microseconds of a message")
    add("--best", type=_count, default=8, help="rows of a table")
    add("--gantt", type=_picture, help="draw the best plans' steps into this PNG file")
    return parser


def _read(
    convert: Callable[[str], Any], wanted: str, fits: Callable[[Any], bool]
) -> Callable[[str], Any]:
    """Return what converts and validates an argument; argparse shows its error."""

    def read(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return read


_model = _read(
    str,
    f"a model that is known: {', '.join(MODELS)}. Any other is given by its shape: "
    f"--shape {' '.join(_SHAPE)}, such as --shape {' '.join(map(str, MODELS['gpt2']))}",
    MODELS.__contains__,
)
_folder = _read(Path, "a folder", Path.is_dir)
_ratio = _read(float, "a ratio: from 0 up to below 1", lambda ratio: 0 <= ratio < 1)
_count = _read(int, "a count: a whole number, 1 or more", lambda count: 1 <= count < 2**31)
_fraction = _read(float, "a fraction: above 0, at most 1", lambda part: 0 < part <= 1)
_not_negative = _read(float, "a finite number, at least 0", lambda value: 0 <= value < inf)
_positive = _read(float, "a positive number", lambda value: 0 < value < inf)
_picture = _read(
    Path,
    "a .png file in a folder that exists",
    lambda file: file.suffix == ".png" and file.parent.is_dir(),
)
