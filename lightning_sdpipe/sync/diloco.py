"""DiLoCo (Douillard et al. 2023) and Streaming DiLoCo (2025): local training, and an outer optimizer for its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import msgspec

from lightning_sdpipe.errors import ConfigurationError, check_choices
from lightning_sdpipe.exchange.outer_model import Fragments, Nesterov
from lightning_sdpipe.policies.capabilities import OUTER, Capabilities
from lightning_sdpipe.policies.local_sgd import LocalSGD
from lightning_sdpipe.policies.outer_rounds import OuterRounds
from lightning_sdpipe.policies.policy import PolicyConfig, Refusing
from lightning_sdpipe.sync.outer_averaging import OuterAveraging
from lightning_sdpipe.sync.outer_rounds_averaging import OuterRoundsAveraging
from lightning_sdpipe.sync.synchronizer import Replica, Synchronizer


class DiLoCo(msgspec.Struct, frozen=True, metaclass=Refusing):
    """Pipelines train alone for ``every`` updates. The mean movement of their models since the last round is then taken
    as a gradient by SGD with Nesterov's momentum: ``lr`` and ``momentum``; 1 and 0 make it ``LocalSGD``.

    In elastic runs batches are dealt, and a round is due when all pipelines together have made ``every`` updates for
    each: fast ones make more of them, and slow ones fewer. Each joins after its next update, so that none waits; use
    ``weights="samples"`` with it.

    Streaming DiLoCo divides the model into ``fragments``, whose rounds follow each other at even distances; during
    ``delay`` updates their means may travel. Then a worker takes over the new base, and keeps the share ``mix`` of its
    own fragment; the rest of what it has trained meanwhile is lost. With ``overlap="step"`` it keeps all of it: the new
    base minus the sent fragment is added.

    ``weights`` gives the weight of each pipeline in a round: ``"equal"`` for all, or the ``"samples"`` that it has
    trained since its last one (or the sum of what the module's ``weigh_batch`` counts), which members tell each other
    as a round begins. That goes with ``fragments=1``, and with ``delay`` if ``overlap="step"``.
    """

    registered: ClassVar[str] = "diloco"
    forms: ClassVar[tuple[Mapping[str, Any], ...]] = ({}, {"weights": "samples"})
    every: int = 500
    lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    weights: Literal["equal", "samples"] = "equal"

    def __post_init__(self) -> None:
        Nesterov(self.lr, self.momentum)  # each refuses its values
        Fragments(self.every, self.fragments, self.delay, self.mix)
        check_choices(self)
        for name, value, instead in (("fragments", self.fragments, 1), ("mix", self.mix, 0)):
            if self.weights == "samples" and value != instead:
                raise ConfigurationError(
                    f"{name}={value} does not go with weights='samples': such a round is of the whole model, to "
                    f"which each adds all that it has trained. Use {name}={instead}, with "
                    "exchange=Exchange(overlap='step') and delay= to hide it; or leave weights out."
                )

    @property
    def policy(self) -> PolicyConfig:
        """Policy of an ordinary run; workers ask when a round is due."""
        return OuterRounds(None) if self.weights == "samples" else LocalSGD(every=1)

    @property
    def elastic_policy(self) -> PolicyConfig:
        """Policy for pipelines that come and go."""
        return OuterRounds(self.every)

    @property
    def capabilities(self) -> Capabilities:
        row = OUTER
        if self.fragments > 1 or self.mix:
            row = replace(row, elastic=None)  # a newcomer may lack some of the bases of fragments
        elif self.delay:  # such a round goes on beside training
            row = replace(row, elastic={**(OUTER.elastic or {}), "overlaps": frozenset({"step"})})
        if self.delay and self.weights == "samples":
            row = replace(row, overlaps=row.overlaps - {"none"})
        if self.mix or self.every == 1:
            row = replace(row, overlaps=row.overlaps - {"step"})
        return row

    def build(self, replica: Replica) -> Synchronizer:
        nesterov, keeps = Nesterov(self.lr, self.momentum), replica.exchange.overlap == "step"
        delay = max(self.delay, 1) if keeps else self.delay
        if replica.peers is not None or self.weights == "samples":
            return OuterRoundsAveraging(
                replica, nesterov, Fragments(self.every, delay=delay), self.weights == "samples"
            )
        return OuterAveraging(replica, nesterov, Fragments(self.every, self.fragments, delay, self.mix), keeps)
