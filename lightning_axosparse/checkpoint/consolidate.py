"""Consolidates a sharded checkpoint into one file, one tensor at a time.

``python -m lightning_axosparse.checkpoint.consolidate FOLDER [FILE]``
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from lightning_axosparse.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_axosparse.support.troubleshooting import see


def consolidate(
    folder: str | os.PathLike[str],
    file: str | os.PathLike[str] | None = None,
    weights_only: bool | None = None,
) -> Path:
    """Write the one file that a run without ``save_distributed_checkpoint`` would have written.

    Args:
        folder: the sharded checkpoint.
        file: to write; None for the folder's name with ``.consolidated`` behind it.
        weights_only: as for ``torch.load``; False for hyperparameters of your own classes, in a
            folder from a source that you trust.

    Returns:
        The file.

    Raises:
        NotADirectoryError: if there is no such folder.
        CorruptFileError: if it is not as it was written.
    """
    source = Path(folder)
    if not source.is_dir():
        raise NotADirectoryError(
            f"'{source}' is no folder. Give the folder of a sharded checkpoint, as "
            "AxoSparseStrategy(save_distributed_checkpoint=True) writes it." + see("checkpoints")
        )
    target = source.with_name(f"{source.name}.consolidated") if file is None else Path(file)
    files = AtomicCheckpointIO()
    files.verify(source)
    files.save_checkpoint(files.load_mapped(source, weights_only), target)
    return target


def main() -> None:
    """Consolidate the checkpoint of the command line."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folder", help="of the sharded checkpoint")
    arguments.add_argument("file", nargs="?", help="to write (default: FOLDER.consolidated)")
    arguments.add_argument(
        "--trusted", action="store_true", help="unpickle objects of other classes, too"
    )
    options = arguments.parse_args()
    print(consolidate(options.folder, options.file, False if options.trusted else None))


if __name__ == "__main__":
    main()
