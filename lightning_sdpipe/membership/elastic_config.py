"""Terms of an elastic run."""

from __future__ import annotations

import msgspec

from lightning_sdpipe.errors import check_integer, check_number, refusal

MOST_PIPELINES = 1024
"""Pipeline numbers from this one up are taken for mistakes."""


class ElasticConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Terms of a run; times are in seconds. :mod:`lightning_sdpipe.membership.membership` says what they mean."""

    min_pipelines: int = 1
    start_pipelines: int | None = None
    """Pipelines that begin together; None for ``min_pipelines``."""
    gather: float = 60.0
    hold_limit: float = 1800.0
    recovery_grace: float = 10.0
    settle: float = 1.5
    resume: bool = False
    """If no pipeline is left, True lets later ones start again from the newest checkpoint; else the run is over."""
    apart: float = 60.0
    """Seconds for which a pipeline that others cannot reach is kept out at first."""
    fixed: bool = False
    """Pipelines neither come late nor go: ``min_pipelines`` begin together, and one that ends ends the run."""
    depths: tuple[int, ...] = ()
    """Stages of each pipeline of a fixed roster, if they differ."""

    def __post_init__(self) -> None:
        check_integer("min_pipelines", self.min_pipelines, 1, "pipelines")
        check_integer("start_pipelines", self.start_pipelines, self.min_pipelines, "pipelines", optional=True)
        for name in ("gather", "hold_limit", "recovery_grace", "settle", "apart"):
            check_number(name, getattr(self, name), "seconds from 0", least=0)
        if self.fixed and self.to_start != self.min_pipelines:
            raise refusal("start_pipelines", self.start_pipelines, f"{self.min_pipelines}, all of a fixed roster")
        if self.depths and not (self.fixed and len(self.depths) == self.min_pipelines and min(self.depths) >= 1):
            allowed = f"the stages of each of {self.min_pipelines} pipelines of a fixed roster, 1 or more"
            raise refusal("depths", list(self.depths), allowed)

    @classmethod
    def of_fixed(cls, num_pipelines: int, depths: tuple[int, ...] = ()) -> ElasticConfig:
        """Return the terms of a run whose pipelines are known."""
        return cls(num_pipelines, settle=0.0, fixed=True, depths=depths)

    @property
    def to_start(self) -> int:
        """Number of pipelines that begin together."""
        return self.start_pipelines or self.min_pipelines
