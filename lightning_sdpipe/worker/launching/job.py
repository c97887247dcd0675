"""One job of this process, and the functions that undo it at its end: a sweep runs many jobs in one process.

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
    """Begin a job, before anything of it is set up; end the previous job if this is another one."""
    global _key
    key = hydra_job.key()
    if key != _key:
        end()
        _key = key


def at_end(function: Callable[..., Any], *arguments: Any) -> None:
    """Call ``function(*arguments)`` at the end of the job; functions are called in reverse order."""
    _undo.callback(function, *arguments)


@atexit.register
def end() -> None:
    """Undo what the job has left in this process; do nothing if nothing is left."""
    _undo.close()
