"""Averaging with neighbours that follow from who is there: a ring, or pairs (BAGUA §3.2, its decentralised algorithms).

In a ring every worker is a neighbour of a waiting one, so all of them form one group, in which each averages with its
two neighbours only; the ring closes over the members of its group. A worker of a pair waits for its partner of that
iteration, as with AD-PSGD. The pairs depend on the number of the iteration, and on the pipelines that the policy notes
when the first worker reports it, on any stage. Later changes do not change these pairs: a worker whose partner is gone,
or that was not there yet, goes on alone. So all stages agree on partners, and no cycle of waits can form.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, get_args

import msgspec

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.policies import pairing as places
from lightning_sdpipe.policies.ad_psgd import ADPSGDPolicy
from lightning_sdpipe.policies.capabilities import BESIDE, CHANGING, FREELY, LIKE, RING, Capabilities
from lightning_sdpipe.policies.decisions import Decision, Group, Reason
from lightning_sdpipe.policies.group_policy import GroupPolicy
from lightning_sdpipe.policies.local_sgd import LocalSGDPolicy
from lightning_sdpipe.policies.policy import PolicyConfig, check_integer

Peers = Literal["ring", "shift_one", "random"]
_REMEMBERED = 64
"""Number of iterations whose members are remembered."""


class Decentralized(PolicyConfig, frozen=True):
    """Decentralised averaging: models are averaged with neighbours in each update that ``every`` divides.

    ``peers``: ``"ring"``: with the two neighbours, a third each; ``"shift_one"``: in pairs of a pipeline of the first
    half and one of the second, which shift by one each time; ``"random"``: in pairs that are drawn from ``seed``.
    """

    registered = "decentralized"
    forms = ({}, {"peers": "shift_one"}, {"peers": "random"})
    in_step = True

    peers: Peers = "ring"
    every: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.peers not in get_args(Peers):
            raise ConfigurationError(f"peers={self.peers!r} is not allowed; give 'ring', 'shift_one' or 'random'.")
        check_integer("every", self.every, 1, "updates")
        check_integer("seed", self.seed, 0, "any")

    @property
    def capabilities(self) -> Capabilities:
        overlaps = FREELY if self.every == 1 else BESIDE
        if self.peers == "ring":
            return Capabilities(RING, overlaps, unlike=LIKE, elastic={})
        # a newcomer cannot know the number of the average by which pairs meet freely
        return Capabilities(CHANGING, overlaps, unlike=LIKE, elastic={"overlaps": BESIDE})

    @property
    def half(self) -> str:
        return f"lightning_sdpipe.sync.methods:{'in_a_ring' if self.peers == 'ring' else 'in_pairs'}"

    def make_policy(self, num_stages: int, num_pipelines: int) -> GroupPolicy:
        if self.peers == "ring":
            return RingPolicy(num_stages, num_pipelines, every=self.every)
        return PairsPolicy(self, num_stages, num_pipelines)


class RingPolicy(LocalSGDPolicy):
    """One group of all workers that are there, as a ring without gaps."""

    def _release(self, reason: Reason) -> list[Decision]:
        return [as_ring(group) for group in super()._release(reason)]


class PairsPolicy(ADPSGDPolicy):
    """Pairs of those that are there."""

    def __init__(self, config: Decentralized, num_stages: int, num_pipelines: int) -> None:
        super().__init__(num_stages, num_pipelines, seed=config.seed)
        self._config = config
        self._there: OrderedDict[int, list[int]] = OrderedDict()
        """Pipelines that took part when the first worker reported an iteration."""

    def _partner(self, pipeline: int, iteration: int) -> int:
        there = self._there.setdefault(iteration, sorted(set[int]().union(*self.participants.active)))
        if len(self._there) > _REMEMBERED:
            self._there.popitem(last=False)
        if pipeline not in there:
            return pipeline
        place, size = there.index(pipeline), len(there)
        if self._config.peers == "shift_one":
            partner = places.shift_one(place, size, iteration // self._config.every)
        else:
            partner = places.matching(size, self._config.seed, iteration)[place]
        return pipeline if partner is None else there[partner]


def as_ring(group: Group) -> Group:
    """Return ``group`` as a ring of its members."""
    members, size = group.members, len(group.members)
    beside = tuple(tuple(members[other] for other in places.ring(place, size)) for place in range(size))
    return msgspec.structs.replace(group, neighbours=beside if size > 1 else ())
