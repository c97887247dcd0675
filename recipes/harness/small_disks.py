"""Small disks that can be filled for a while: file systems in memory, mounted where files are written. Needs root."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recipes.harness.namespaces import NotAllowed, run

SIZE = 64 << 20
_FILLER = ".filler"


@contextmanager
def disk(place: Path) -> Iterator[None]:
    """Within the context, make ``place`` a directory on its own disk.

    Raises:
        NotAllowed: the disk cannot be mounted.
    """
    place.mkdir()
    if os.geteuid() != 0:
        raise NotAllowed("a disk of its own takes root")
    run("mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path) -> None:
    """Fill all space that is left on the disk."""
    with open(place / _FILLER, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def empty(place: Path) -> None:
    """Free the space that :func:`fill` took."""
    (place / _FILLER).unlink()
