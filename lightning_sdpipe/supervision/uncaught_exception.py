"""The exception that ended a process of a script, as the process itself reports it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass

from lightning_sdpipe.errors import LOST_CONNECTION, SchedulerError, place_of

_NUMBER = re.compile(r"\d+")
_LONGEST = 300

_OF_OTHERS = (
    *("WorkerFailedError", "RunAborted", "MustEndError", "RunOverError"),
    *("SIGTERMException", "KeyboardInterrupt"),
)
_NO_BUG = SchedulerError.__name__
"""Exception that one lost pipeline or scheduler may cause in several others; a refusal is of another class."""


@dataclass(frozen=True)
class UncaughtException:
    """An exception that was not caught."""

    kind: str
    """Class of the exception, with its module where it is not built in."""
    message: str
    """First line of its message."""
    place: str
    """Innermost frame, as in ``train.py:41 in training_step``; empty if there is none."""

    @property
    def follows_another(self) -> bool:
        """True if another process failed first, and this one because of it."""
        return self.kind.rpartition(".")[2] in _OF_OTHERS or LOST_CONNECTION in self.message

    @property
    def may_be_a_bug(self) -> bool:
        """True if the script is to blame when another pipeline raises the same."""
        return not self.follows_another and self.kind.rpartition(".")[2] != _NO_BUG

    def is_like(self, other: UncaughtException) -> bool:
        """Return whether the exceptions are the same, up to the numbers in their messages: an index, a rank, an
        address."""
        return self._key() == other._key()

    def __str__(self) -> str:
        text = f"{self.kind.rpartition('.')[2]}: {self.message}" if self.message else self.kind.rpartition(".")[2]
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"

    def _key(self) -> tuple[str, str, str]:
        return self.kind, self.place, _NUMBER.sub("#", self.message)

    def encode(self) -> bytes:
        """Encode the exception for :func:`decode` in another process; short enough for a pipe to take it at once."""
        return json.dumps(asdict(self)).encode() + b"\n"


def decode(said: bytes) -> UncaughtException | None:
    """Decode what :meth:`UncaughtException.encode` made; None if it is not whole."""
    try:
        return UncaughtException(**json.loads(said)) if said.endswith(b"\n") else None
    except (ValueError, TypeError):
        return None


def describe(error: BaseException) -> UncaughtException:
    """Describe ``error`` as it left the script."""
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    try:
        message = str(error).partition("\n")[0]
    except Exception as own:  # it must not hide the exception that is reported
        message = f"its text raised {type(own).__name__}"
    return UncaughtException(f"{module}{kind.__qualname__}", message[: 2 * _LONGEST], place_of(error))
