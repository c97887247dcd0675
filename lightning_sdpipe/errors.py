"""The exceptions that reach users, and how their messages end where a name is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigurationError(ValueError):
    """What was asked for cannot work; the message says what was given, what is allowed and what to do."""


class SchedulerError(RuntimeError):
    """The scheduler cannot be reached, or did not answer in time."""


class RefusedError(SchedulerError):
    """The scheduler was reached, and says what cannot be: starting again does not mend it."""


class NonFiniteError(RuntimeError):
    """A loss, gradients or parameters are nan or infinite: ``what`` names them, the pipeline and the step."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"Not finite: {what}. Lower the learning rate or clip gradients; Trainer(detect_anomaly=True) finds the "
            "operation. SDPipeStrategy(on_nonfinite='continue') goes on all the same."
        )


class NotWrittenError(OSError):
    """A checkpoint was not written; the message names the file, what it needs and what is free."""


class WorkerFailedError(RuntimeError):
    """Another worker of the run failed first; the message names it and its reason."""


class MustEndError(WorkerFailedError):
    """This process was declared lost, or another stage of its pipeline was: it must end, and start anew."""

    def __init__(self, pipeline: int, reason: str) -> None:
        super().__init__(f"this process of pipeline {pipeline} must end: {reason}")


ONLY_LIGHTNING = (
    "SDPipeStrategy works with the Trainer of `import lightning as L` only: pytorch_lightning has one of its own, "
    "which takes none of its strategies, and with Fabric there is no training_step that could be cut."
)

LOST_CONNECTION = "gloo/transport"
"""In the text of an exception of gloo that has lost a connection: it names the line of its own source."""


def place_of(error: BaseException) -> str:
    """The innermost frame in which ``error`` was raised, as in ``train.py:41 in training_step``; empty if none."""
    frames = error.__traceback__
    if frames is None:
        return ""
    while frames.tb_next is not None:
        frames = frames.tb_next
    code = frames.tb_frame.f_code
    return f"{code.co_filename.rpartition('/')[2]}:{frames.tb_lineno} in {code.co_name}"


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a message about a wrong ``name``: the one that may have been meant, or all."""
    names = list(dict.fromkeys(names))
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; there are: {', '.join(names) or 'none'}."
