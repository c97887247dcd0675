"""Which exception ended a process of a script, as the process itself says."""

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
"""One pipeline or scheduler that is lost may cause it in several others; what is refused is another class."""


@dataclass(frozen=True)
class UncaughtException:
    """An exception that was not caught."""

    kind: str
    """Its class, with its module where that is not built in."""
    message: str
    """Its first line."""
    place: str
    """The innermost frame, as in ``train.py:41 in training_step``; empty if there is none."""

    @property
    def follows_another(self) -> bool:
        """Whether another process failed first, and this one because of it."""
        return self.kind.rpartition(".")[2] in _OF_OTHERS or LOST_CONNECTION in self.message

    @property
    def may_be_a_bug(self) -> bool:
        """Whether another pipeline that raises the same says that the script is to blame."""
        return not self.follows_another and self.kind.rpartition(".")[2] != _NO_BUG

    def is_like(self, other: UncaughtException) -> bool:
        """The same exception, up to the numbers in its message: a wrong index, a rank, an address."""
        return self._key() == other._key()

    def __str__(self) -> str:
        text = f"{self.kind.rpartition('.')[2]}: {self.message}" if self.message else self.kind.rpartition(".")[2]
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"

    def _key(self) -> tuple[str, str, str]:
        return self.kind, self.place, _NUMBER.sub("#", self.message)

    def encode(self) -> bytes:
        """For :func:`decode`, in another process; short enough for a pipe to take it at once."""
        return json.dumps(asdict(self)).encode() + b"\n"


def decode(said: bytes) -> UncaughtException | None:
    """What :meth:`UncaughtException.encode` made; None if it is not whole."""
    try:
        return UncaughtException(**json.loads(said)) if said.endswith(b"\n") else None
    except (ValueError, TypeError):
        return None


def describe(error: BaseException) -> UncaughtException:
    """``error`` as it left the script."""
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    try:
        message = str(error).partition("\n")[0]
    except Exception as own:  # which must not hide the one that is told
        message = f"its text raised {type(own).__name__}"
    return UncaughtException(f"{module}{kind.__qualname__}", message[: 2 * _LONGEST], place_of(error))
