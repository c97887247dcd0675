"""Consolidation of a distributed checkpoint into one file: ``python -m lightning_sdpipe.checkpoints.consolidate
DIRECTORY [FILE]``.

Lightning's own tool expects the names that its strategies give to the parts. This command writes an ordinary
checkpoint, from which a run on one device resumes, too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_sdpipe.checkpoints.distributed import is_distributed, read_whole
from lightning_sdpipe.checkpoints.files import WholeFiles


def consolidate(directory: Path, file: Path) -> None:
    """Write the checkpoint in ``directory`` into ``file``; it has to fit into memory.

    Raises:
        ValueError: ``directory`` is not a distributed checkpoint, or ``file`` exists already.
    """
    if not is_distributed(directory):
        raise ValueError(
            f"{directory} is not a distributed checkpoint; give a directory that a run with "
            "SDPipeStrategy(save_distributed_checkpoint=True) has written"
        )
    if file.exists():
        raise ValueError(f"{file} exists already; remove it, or give another file")
    files = WholeFiles()
    files.save_checkpoint(read_whole(directory, files), file)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Makes one file of a distributed checkpoint.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("file", type=Path, nargs="?", help="DIRECTORY.consolidated by default")
    given = parser.parse_args()
    file = given.file or given.directory.with_name(f"{given.directory.name}.consolidated")
    try:
        consolidate(given.directory, file)
    except ValueError as error:
        parser.error(str(error))
    print(file)


if __name__ == "__main__":
    main()
