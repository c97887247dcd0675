"""A parameter server in virtual time, whose model follows the verdicts of its admission."""

from __future__ import annotations

from typing import Any

import numpy

from lightning_sdpipe.policies.decisions import Group
from recipes.baselines.admission import AdmissionPolicy


class Server:
    """The parameters at a server, after its verdicts."""

    def __init__(self, served: AdmissionPolicy, problem: Any) -> None:
        self._problem, self._verdicts = problem, iter(served.verdicts)
        self.model = problem.start.copy()
        self._round = numpy.zeros_like(self.model)
        self._pulled = numpy.tile(problem.start, (served.participants.num_pipelines, 1))
        self.updates = self.steps = 0

    def step(self, pipeline: int) -> None:
        """Take one push of ``pipeline``."""
        verdict = next(self._verdicts)
        self._round += verdict.weight * self._problem.change(self._pulled[pipeline], pipeline)
        self.steps += verdict.weight > 0.0
        if verdict.closes is not None:
            self.model = self.model + verdict.closes * self._round
            self._round = numpy.zeros_like(self.model)
            self.updates += bool(verdict.released)  # with BSP, a round's last push
        self._pulled[list(verdict.released)] = self.model

    def average(self, group: Group) -> None:
        """Do nothing: a worker that goes on has already pulled."""
