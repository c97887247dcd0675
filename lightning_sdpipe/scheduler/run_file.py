"""Lets commands of the same account find a scheduler, by a file that it writes, and locks while it lives.

``HOST-PID.json`` has the scheduler's address, the workers' keys and the path of its log. It lies in
``$XDG_RUNTIME_DIR/sdpipe``, or in ``~/.cache/sdpipe`` where that cannot be written, and only its owner may read it. The
system frees the lock however a process ends, so a file of this host that is not locked is left over, and the next
command that looks removes it.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from lightning_sdpipe.errors import shape
from lightning_sdpipe.scheduler.credentials import WorkerKeys, is_loopback

log = logging.getLogger(__name__)


class RunFile(msgspec.Struct, frozen=True):
    """Facts that a command must know of a running scheduler."""

    address: str
    keys: WorkerKeys | None
    """Keys of the workers; None if the scheduler was not given them."""
    log: str | None
    num_stages: int
    num_pipelines: int
    time: str
    """Time at which the scheduler was started, in ISO format."""
    script: str = ""
    """Name of the script that trains, if the scheduler is a part of its run."""
    pid: int = 0
    """Process that started the scheduler, else the scheduler's own."""
    directory: str = ""

    def __str__(self) -> str:
        since = datetime.datetime.fromisoformat(self.time).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        return (
            f"{self.address}  {self.script or 'sdpipe scheduler'} in {self.directory}, process {self.pid}, "
            f"since {since}: {shape(self.num_stages, self.num_pipelines)}"
            + ("" if self.log is None else f", log {self.log}")
        )


@contextlib.contextmanager
def published(run: RunFile) -> Iterator[None]:
    """Let commands find this process as the scheduler of ``run`` inside the block; log a warning if they cannot."""
    descriptor, path = _write(run)
    try:
        yield
    finally:
        if descriptor is not None and path is not None:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def running(answers: Callable[[RunFile], bool]) -> list[RunFile]:
    """Return the schedulers of this account: those that live on this host, and those of other hosts, whose processes
    cannot be seen from here, for which ``answers`` is true."""
    paths = [path for folder in _folders() for path in sorted(folder.glob("*.json"))]
    found = [run for path in paths if (run := _read(path, answers)) is not None]
    return list({run.address: run for run in found}.values())


def _folders() -> list[Path]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "sdpipe")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return [cache] if not runtime else [Path(runtime, "sdpipe"), cache]


def _write(run: RunFile) -> tuple[int | None, Path | None]:
    name = f"{socket.gethostname()}-{os.getpid()}.json"
    for folder in _folders():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, made = tempfile.mkstemp(dir=folder)  # mode 0600, and a name that no command looks for
        except OSError as error:
            reason = error.strerror
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(descriptor, msgspec.json.encode(run))
            os.rename(made, folder / name)
        except OSError as error:
            reason = error.strerror
            os.unlink(made)
            os.close(descriptor)
            continue
        return descriptor, folder / name
    log.warning("`sdpipe status` will not find this run without an address: %s cannot be written (%s)", folder, reason)
    return None, None


def _read(path: Path, answers: Callable[[RunFile], bool]) -> RunFile | None:
    """Return the run in the file at ``path``; None if no scheduler is behind it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:  # the scheduler has just ended, or another account owns the file
        return None
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            return None
        local = path.name.rpartition("-")[0] == socket.gethostname()
        if local and not _locked(descriptor):
            with contextlib.suppress(FileNotFoundError):  # another command was faster
                if path.stat().st_ino == status.st_ino:
                    path.unlink()
            return None
        run = msgspec.json.decode(os.read(descriptor, status.st_size), type=RunFile)
        return run if local or (not is_loopback(run.address) and answers(run)) else None
    except (msgspec.DecodeError, OSError):  # a file of another version of this package, or a failing disk
        return None
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
