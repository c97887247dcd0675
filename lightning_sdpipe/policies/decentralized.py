"""Averaging with neighbours, in a ring or in pairs of the active workers (decentralised algorithms of BAGUA §3.2).

The workers of a ring form one group, in which each averages with its two neighbours only. A worker of a pair waits for
its partner of that iteration, as with AD-PSGD.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from lightning_sdpipe.errors import check_choices, check_integer
from lightning_sdpipe.policies import pairing as places
from lightning_sdpipe.policies.ad_psgd import ADPSGDPolicy
from lightning_sdpipe.policies.capabilities import BESIDE, CHANGING, FREELY, LIKE, RING, Capabilities
from lightning_sdpipe.policies.decisions import Decision, Group, Reason
from lightning_sdpipe.policies.group_policy import GroupPolicy
from lightning_sdpipe.policies.local_sgd import LocalSGDPolicy
from lightning_sdpipe.policies.policy import PolicyConfig

Peers = Literal["ring", "shift_one", "random"]


class Decentralized(PolicyConfig, frozen=True):
    """Decentralised averaging: models are averaged with neighbours in each update that ``every`` divides.

    ``peers`` is ``"ring"`` (with the two neighbours, a third each), ``"shift_one"`` (pairs of one pipeline from each
    half, shifted by one each time) or ``"random"`` (pairs drawn from ``seed``).
    """

    registered = "decentralized"
    forms = ({}, {"peers": "shift_one"}, {"peers": "random"})
    in_step = True

    peers: Peers = "ring"
    every: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_choices(self)
        check_integer("every", self.every, 1, "updates")
        check_integer("seed", self.seed, 0, "any")

    @property
    def capabilities(self) -> Capabilities:
        overlaps = FREELY if self.every == 1 else BESIDE
        if self.peers == "ring":
            return Capabilities(RING, overlaps, unlike=LIKE, elastic={})
        # pairs that meet freely follow from the average's number, which a newcomer cannot know
        return Capabilities(CHANGING, overlaps, unlike=LIKE, elastic={"overlaps": BESIDE})

    @property
    def half(self) -> str:
        return f"lightning_sdpipe.sync.methods:{'in_a_ring' if self.peers == 'ring' else 'in_pairs'}"

    def make_policy(self, num_stages: int, num_pipelines: int) -> GroupPolicy:
        if self.peers == "ring":
            return RingPolicy(num_stages, num_pipelines, every=self.every)
        shifts = self.every if self.peers == "shift_one" else None
        return ADPSGDPolicy(num_stages, num_pipelines, seed=self.seed, shifts=shifts)


class RingPolicy(LocalSGDPolicy):
    """One group of all active workers, as a ring without gaps."""

    def _release(self, reason: Reason) -> list[Decision]:
        return [as_ring(group) for group in super()._release(reason)]


def as_ring(group: Group) -> Group:
    """Return ``group`` as a ring of its members."""
    members, size = group.members, len(group.members)
    beside = tuple(tuple(members[other] for other in places.ring(place, size)) for place in range(size))
    return msgspec.structs.replace(group, neighbours=beside if size > 1 else ())
