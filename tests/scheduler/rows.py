"""Rows of the meter, for tests."""

from __future__ import annotations

from lightning_sdpipe.meter import PHASES
from lightning_sdpipe.scheduler.rows import NewRows, UpdateRow


def one_row(update: int, count: int = 1, core: int = 0, **us: int) -> UpdateRow:
    """``us`` are microseconds by the name of the phase."""
    assert us.keys() <= {*PHASES}
    return UpdateRow(update, count, tuple(us.get(name, 0) for name in PHASES), core)


def rows(update: int, count: int = 1, length: int = 1000, waiting: int = 0) -> NewRows:
    """One row of ``count`` updates, each ``length`` microseconds long."""
    return NewRows((one_row(update, count, forward=count * (length - waiting), wait_group=count * waiting),), 0)
