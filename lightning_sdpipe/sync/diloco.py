"""DiLoCo (Douillard et al. 2023) and Streaming DiLoCo (2025): local training, and an outer optimizer for its result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.outer_model import Fragments, Nesterov
from lightning_sdpipe.policies.local_sgd import LocalSGD
from lightning_sdpipe.policies.outer_rounds import OuterRounds
from lightning_sdpipe.policies.partial_reduce import PartialReduce
from lightning_sdpipe.policies.policy import PolicyConfig, refusal
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.sync.capabilities import OUTER, Capabilities, in_groups
from lightning_sdpipe.sync.outer_averaging import OuterAveraging, OuterGroups
from lightning_sdpipe.sync.quorum_averaging import QuorumAveraging
from lightning_sdpipe.sync.synchronizer import Replica, Synchronizer


@dataclass(frozen=True)
class DiLoCo:
    """Pipelines train alone for ``every`` updates. The mean movement of their models since the last round is then taken
    as a gradient by SGD with Nesterov's momentum: ``lr`` and ``momentum``; 1 and 0 make it ``LocalSGD``.

    Streaming DiLoCo divides the model into ``fragments``, whose rounds follow each other at even distances; during
    ``delay`` updates their means may travel. Then a worker takes over the new base, and keeps the share ``mix`` of its
    own fragment; the rest of what it has trained meanwhile is lost. With ``overlap="step"`` it keeps all of it: the new
    base minus the sent fragment is added.

    A round waits for all pipelines, or for as many as ``quorum`` says: their number, or their share of those present,
    such as 0.5. It then waits for more of them as long as ``grace``: seconds, or ``"auto"``, until those have come that
    are expected soon. One that comes later is in a later round, with what it has moved by since its own base, and gets
    the newest base there. A quorum goes with ``fragments=1``; and with ``delay`` if ``overlap="step"``: a pipeline
    then trains on until others are ready, for ``every`` more updates at most, and for ``delay`` until the new base has
    come.

    ``weights`` gives the weight of each pipeline in a round: ``"equal"`` for all, or the ``"samples"`` that it has
    trained since its last one (or the sum of what the module's ``weigh_batch`` counts), which members tell each other
    as a round begins. That goes with ``fragments=1``, and with ``delay`` as a quorum does.

    With ``group``, a round is of a group that this policy forms, so that no pipeline waits for a slow one: the members
    average their bases and momenta with their models, in full, which is up to three times the bytes. It is
    ``SemiDecentralized(...)`` or ``PartialReduce(...)``, and goes with ``fragments=1`` and ``delay=0``.
    """

    every: int = 500
    lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    quorum: int | float | None = None
    grace: float | Literal["auto"] = "auto"
    group: SemiDecentralized | PartialReduce | None = None
    weights: Literal["equal", "samples"] = "equal"

    def __post_init__(self) -> None:
        Nesterov(self.lr, self.momentum)  # each refuses its values
        Fragments(self.every, self.fragments, self.delay, self.mix)
        OuterRounds(self.quorum, self.grace)
        if self.group is not None and not isinstance(self.group, SemiDecentralized | PartialReduce):
            raise ConfigurationError(
                f"group={self.group!r} is not allowed; give SemiDecentralized(...) or PartialReduce(...), or None for "
                "rounds of all."
            )
        if self.group is not None and self.quorum is not None:
            raise ConfigurationError(
                f"quorum={self.quorum} does not go with group=: the policy of the groups says when a round begins. Use "
                "one of them."
            )
        if self.weights not in ("equal", "samples"):
            raise refusal("weights", self.weights, '"equal" or "samples"')
        if self.group is not None and self.weights != "equal":
            raise ConfigurationError(
                "weights='samples' does not go with group=: the policy of the groups says what members weigh. Use "
                "weights='equal'; or leave group= out."
            )
        by = "group=" if self.group is not None else "weights='samples'"
        by = by if self.quorum is None else f"quorum={self.quorum}"
        hide = ", with exchange=Exchange(overlap='step') and delay= to hide it" if self.group is None else ""
        delay = 0 if self.group is None else self.delay
        for name, value, instead in (("fragments", self.fragments, 1), ("delay", delay, 0), ("mix", self.mix, 0)):
            if (self._of_bases or self.group is not None) and value != instead:
                raise ConfigurationError(
                    f"{name}={value} does not go with {by}: the members of such a round have one base each, for the "
                    f"whole model. Use {name}={instead}{hide}; or leave {by.partition('=')[0]}= out."
                )

    @property
    def _of_bases(self) -> bool:
        """True if the members of a round tell each other of their bases or samples, also where none comes or goes."""
        return self.quorum is not None or self.weights == "samples"

    @property
    def policy(self) -> PolicyConfig:
        """Policy of an ordinary run; workers ask when a round is due."""
        return self.elastic_policy if self._of_bases or self.group is not None else LocalSGD(every=1)

    @property
    def elastic_policy(self) -> PolicyConfig:
        """Policy for pipelines that come and go."""
        return self.group or OuterRounds(self.quorum, self.grace)

    @property
    def capabilities(self) -> Capabilities:
        if self.group is not None:
            return in_groups(self.group)
        row = OUTER if self.quorum is None else replace(OUTER, hierarchies={"flat"})
        if (self.fragments, self.delay, self.mix) != (1, 0, 0) and not self._of_bases:
            row = replace(row, elastic=None)  # a newcomer may lack some of the bases of fragments and late means
        if self.delay and self._of_bases:
            row = replace(row, overlaps=row.overlaps - {"none"})  # such a round goes on beside training
        if self.mix or self.every == 1:
            row = replace(row, overlaps=row.overlaps - {"step"})
        return row

    def build(self, replica: Replica) -> Synchronizer:
        nesterov = Nesterov(self.lr, self.momentum)
        if self.group is not None:
            return OuterGroups(replica, nesterov, self.every, self.group.announces == "late")
        if replica.bases is not None or self._of_bases:
            delay = max(self.delay, 1) if replica.exchange.overlap == "step" else 0
            return QuorumAveraging(replica, nesterov, Fragments(self.every, delay=delay), self.weights == "samples")
        keeps = replica.exchange.overlap == "step"
        delay = max(self.delay, 1) if keeps else self.delay
        return OuterAveraging(replica, nesterov, Fragments(self.every, self.fragments, delay, self.mix), keeps)
