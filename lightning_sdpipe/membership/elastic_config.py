"""What an elastic run needs, and what all jobs of one must have in common."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from lightning_sdpipe.policies.policy import check_integer, refusal


class ElasticConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a run; times in seconds. :mod:`lightning_sdpipe.membership.membership` says what they mean."""

    min_pipelines: int = 1
    start_pipelines: int | None = None
    """None: as many as ``min_pipelines``."""
    gather: float = 60.0
    hold_limit: float = 1800.0
    recovery_grace: float = 10.0
    settle: float = 1.5
    resume: bool = False
    """If nobody is left, pipelines start again from the newest checkpoint; else the run is over then."""
    apart: float = 60.0
    """For how long a pipeline that others cannot reach is not let in again, at first."""

    def __post_init__(self) -> None:
        check_integer("min_pipelines", self.min_pipelines, 1, "pipelines")
        check_integer("start_pipelines", self.start_pipelines, self.min_pipelines, "pipelines", optional=True)
        for name in ("gather", "hold_limit", "recovery_grace", "settle", "apart"):
            value = getattr(self, name)
            if not value >= 0:
                raise refusal(name, value, "seconds from 0")

    @property
    def to_start(self) -> int:
        """How many begin together."""
        return self.start_pipelines or self.min_pipelines


def differences(found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """In what a job differs from those of the run, for people; empty if in nothing."""
    names = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    if not names:
        return ""
    said = "; ".join(
        f"{name}: found {found.get(name, 'nothing')}, expected {expected.get(name, 'nothing')}" for name in names
    )
    return f"this job differs from those that train ({said}); start it as they were started, or with a new scheduler"
