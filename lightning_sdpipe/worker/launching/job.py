"""One job of this process, and what has to be undone at its end: a sweep runs many jobs in one process.

A job ends with the process, when the next one begins, or when :func:`end` is called.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning_sdpipe.worker.launching import hydra_job

_undo = ExitStack()
_key: object = None


def begin() -> None:
    """To be called before anything of a job is set up; ends the previous job if this is another one."""
    global _key
    key = hydra_job.key()
    if key != _key:
        end()
        _key = key


def at_end(function: Callable[..., Any], *arguments: Any) -> None:
    """Calls ``function(*arguments)`` at the end of the job; what was registered last is called first."""
    _undo.callback(function, *arguments)


@atexit.register
def end() -> None:
    """Undoes what the job has left in this process. Nothing happens if there is nothing to undo."""
    _undo.close()
