"""The newest checkpoint of an elastic run, for a scheduler that died together with all pipelines.

When it is started again with ``--resume``, pipelines that come continue from that checkpoint. The file is removed when
the run has finished, so the next run starts anew.
"""

from __future__ import annotations

import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec

from lightning_sdpipe.errors import ConfigurationError, os_errors_as
from lightning_sdpipe.membership.members import MemberDecision, MemberEvent, Published, RunOver
from lightning_sdpipe.scheduler.server.membership_desk import MembershipDesk

log = logging.getLogger(__name__)

_MARK = b'{"type":"published"'


def keep_newest(path: Path, elastic: MembershipDesk, now: float) -> None:
    """Tell ``elastic`` of the checkpoint that an earlier scheduler wrote into the file ``path``, and write each new one
    there from now on, until the run has finished.

    Raises:
        ConfigurationError: the file is another one, such as a checkpoint itself, or cannot be read or written.
    """
    record = elastic.on_decided

    def keep(now: float, event: MemberEvent, decisions: list[MemberDecision]) -> None:
        record(now, event, decisions)
        try:
            if isinstance(event, Published):
                _write(path, msgspec.json.encode(event))
            if any(isinstance(decision, RunOver) and not decision.failed for decision in decisions):
                path.unlink(missing_ok=True)
        except OSError as error:
            log.error("%s cannot be changed (%s): it may name an older checkpoint", path, error.strerror)

    published = _read(path)
    directory = path.parent
    with os_errors_as(f"no file can be written in {directory}, for --newest"):
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    if published is not None:
        record(now, published, elastic.membership.on(published, now))
    elastic.on_decided = keep


def _read(path: Path) -> Published | None:
    try:
        with os_errors_as(f"{path}, for --newest, cannot be read"), suppress(FileNotFoundError, NotADirectoryError):
            text = path.read_bytes()
            return msgspec.json.decode(text, type=Published) if text else None
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if not text.startswith(_MARK):
            raise ConfigurationError(
                f"{path} does not name a checkpoint, and would be replaced; give a file of its own to --newest, where "
                "the scheduler writes the path of each new checkpoint"
            ) from error
        log.warning("%s, with the newest checkpoint, cannot be read: %s", path, error)
        return None


def _write(path: Path, text: bytes) -> None:
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
