"""Order of a stage's computation: forwards and backwards of micro-batches, for a whole run."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from lightning_sdpipe.errors import ConfigurationError

Schedule = Literal["1f1b", "gpipe", "pipedream"]


class Pass(NamedTuple):
    """A forward or backward of one micro-batch of mini-batch ``iteration``."""

    forward: bool
    iteration: int
    first: bool
    """Whether it is the first of its kind in the mini-batch."""
    last: bool
    """Whether it is the last of its kind in the mini-batch; after the last backward the optimizer steps."""


def passes(schedule: Schedule, stage: int, num_stages: int, num_micro_batches: int, iterations: int) -> list[Pass]:
    """Return the passes of ``stage``, in order. ``"pipedream"`` has no micro-batches and no flush until the end.

    Raises:
        ConfigurationError: the schedule is not simulated.
    """
    if schedule not in get_args(Schedule):
        raise ConfigurationError(f"schedule={schedule!r} is not simulated; use one of {', '.join(get_args(Schedule))}")
    ahead = num_stages - 1 - stage
    if schedule == "pipedream":
        kinds = [True] * min(ahead, iterations) + [True, False] * max(0, iterations - ahead)
        return _numbered([*kinds, *[False] * min(ahead, iterations)], 1)
    warm_up = num_micro_batches if schedule == "gpipe" else min(ahead, num_micro_batches)
    one = [True] * warm_up + [True, False] * (num_micro_batches - warm_up) + [False] * warm_up
    return _numbered(one * iterations, num_micro_batches)


def _numbered(kinds: list[bool], num_micro_batches: int) -> list[Pass]:
    done = {True: 0, False: 0}
    numbered = []
    for forward in kinds:
        iteration, micro_batch = divmod(done[forward], num_micro_batches)
        done[forward] += 1
        numbered.append(Pass(forward, iteration, micro_batch == 0, micro_batch == num_micro_batches - 1))
    return numbered
