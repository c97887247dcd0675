"""A diary of the training of one process of the suite of faults, and how that process is to end."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L


@dataclass(frozen=True)
class Fault:
    """A process ends itself by ``signal`` in ``phase`` of the first update from ``after`` on that it makes itself."""

    phase: str
    after: int
    signal: int = signal.SIGKILL


class Diary(L.Callback):
    """Writes down each update, and the samples of each batch."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def say(self, what: str, **more: Any) -> None:
        """One line, now."""
        os.write(self._file, (json.dumps({"what": what, "at": time.monotonic()} | more) + "\n").encode())

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.say("start", update=trainer.global_step)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.say("update", update=trainer.global_step, processor=time.process_time())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.say("end", update=trainer.global_step)
