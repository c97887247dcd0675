"""The newest checkpoint of an elastic run, for a scheduler that died together with all pipelines.

It is started again with ``--resume``, and the pipelines that then come go on from that checkpoint. The file is removed
when the run has finished, so the next run starts anew.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from lightning_sdpipe.membership.members import MemberDecision, MemberEvent, Published, RunOver
from lightning_sdpipe.scheduler.server.membership_desk import MembershipDesk

log = logging.getLogger(__name__)


class NewestCheckpoint:
    """The newest checkpoint of an elastic run, kept in the file ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def follow(self, elastic: MembershipDesk, now: float) -> None:
        """Tell ``elastic`` of the checkpoint that an earlier scheduler heard of, and record each new one from now
        on."""
        record = elastic.on_decided

        def keep(now: float, event: MemberEvent, decisions: list[MemberDecision]) -> None:
            record(now, event, decisions)
            self.hear(event, decisions)

        if (published := self.read()) is not None:
            record(now, published, elastic.membership.on(published, now))
        elastic.on_decided = keep

    def read(self) -> Published | None:
        """Return the checkpoint that an earlier scheduler heard of last; None if there is none."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Published)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s, with the newest checkpoint, cannot be read: %s", self._path, error)
            return None

    def hear(self, event: MemberEvent, decisions: list[MemberDecision]) -> None:
        """Record a published checkpoint, until the run has finished."""
        try:
            if isinstance(event, Published):
                self._write(msgspec.json.encode(event))
            if any(isinstance(decision, RunOver) and not decision.failed for decision in decisions):
                self._path.unlink(missing_ok=True)
        except OSError as error:
            log.error("%s cannot be changed (%s): it may name an older checkpoint", self._path, error.strerror)

    def _write(self, text: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_name(f"{self._path.name}.new")
        with fresh.open("wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self._path)
