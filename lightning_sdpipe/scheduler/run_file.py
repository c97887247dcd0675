"""How commands of the same account find a scheduler: a file that it writes, and locks while it lives.

``HOST-PID.json`` has the scheduler's address, the workers' keys and the path of its log. It lies in
``$XDG_RUNTIME_DIR/sdpipe``, or in ``~/.cache/sdpipe`` where that cannot be written, and only its owner may read it. The
system frees the lock however a process ends, so a file of this host that is not locked is left over, and the next
command that looks removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from lightning_sdpipe.scheduler.credentials import WorkerKeys, is_loopback

log = logging.getLogger(__name__)


class RunFile(msgspec.Struct, frozen=True):
    """What a command must know of a running scheduler."""

    address: str
    keys: WorkerKeys | None
    """None if the scheduler was not given the workers' half."""
    log: str | None
    num_stages: int
    num_pipelines: int
    time: str
    """When it was started."""

    def __str__(self) -> str:
        log = "" if self.log is None else f", log {self.log}"
        return f"{self.address}: {self.num_stages} stages × {self.num_pipelines} pipelines, since {self.time}{log}"


@contextlib.contextmanager
def published(run: RunFile) -> Iterator[None]:
    """Within, this process can be found as the scheduler of ``run``; the log says so if it cannot."""
    descriptor, path = _write(run)
    try:
        yield
    finally:
        if descriptor is not None and path is not None:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def running(answers: Callable[[RunFile], bool]) -> list[RunFile]:
    """The schedulers of this account that live on this host, and those of other hosts, whose processes cannot be seen
    from here, of which ``answers`` says that they do."""
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
            descriptor, made = tempfile.mkstemp(dir=folder)  # mode 0600, and not a name that is looked at
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
    """None if no scheduler is behind it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:  # it has just ended, or the file is not ours
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
    except (msgspec.DecodeError, OSError):  # of another version of this package; or the disk fails
        return None
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
