"""Table of what goes together: the sets of what each method takes, and one sentence for each dimension.

What a method does not take is refused before any process has started, with the dimension's sentence, what the method
takes instead, and the methods that take all of what was asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.exchange.payloads import FORMS
from lightning_sdpipe.policies.capabilities import FLUSH, SHARDED, Dimension
from lightning_sdpipe.policies.capabilities import Capabilities as Capabilities
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.sync.synchronizer import SyncMethod

SENTENCES: Mapping[Dimension, str] = {
    "payloads": "how few bits a message may have depends on what its members have in common: sums of gradients and "
    "changes of a common base take all payloads (momenta are sent in place of gradients only), rings 8 bits, groups "
    "and pairs that change 8 bits without feedback, and methods that move tensors in their own way none",
    "overlaps": "models can be averaged beside the next mini-batch, and at a pace of their own where all or fixed "
    "neighbours average after each update; gradients are needed before the step, and meetings and rounds are part of "
    "one",
    "hierarchies": "machines can average first where all of their pipelines add up alike: not in pairs, in rings, in "
    "sums by samples, or in a way of one's own",
    "schedules": "without a flush the stages of a pipeline step one after the other, so that groups of whole pipelines "
    "would wait for the slowest of all in each update, and rounds of pipelines that come and go would have no common "
    "turn",
    "data": "batches are dealt by speed to pipelines that may leave their groups and come back while others train, and "
    "a joint batch is divided among pipelines that take each step together and count gradients by samples",
    "batches": "a pipeline that is lost would take the gradients of several batches with it",
    "unlike": "pipelines that are cut unlike have replicas of sections of the chain, and none of their stages",
    "elastic": "an exchange must go on without members that are lost, and newcomers must get what members have in "
    "common",
}
"""Reasons why a method does not take everything in a dimension."""

WORDS: Mapping[Dimension, Mapping[str, str]] = {
    "overlaps": {"none": "overlap='none'", "step": "overlap='step'", "free": "overlap='free'"},
    "hierarchies": {"flat": "hierarchy='flat'", "hosts": "hierarchy='hosts'"},
    "schedules": {"flush": "schedule='1f1b'", "pipedream": "schedule='pipedream'"},
    "data": {"sharded": "data='sharded' without batch_by_speed", "dealt": "data='dealt'"},
    "batches": {"one": "accumulate_grad_batches=1"},
}
"""Values of the dimensions in the words of users; :data:`~lightning_sdpipe.exchange.payloads.FORMS` has payloads."""


@dataclass(frozen=True)
class Combination:
    """The options of a run that not every method goes with, and ``sync`` as it was given."""

    sync: SyncMethod | PolicyConfig | str
    exchange: Exchange = field(default_factory=Exchange)
    schedule: str = "1f1b"
    num_stages: int = 1
    dealt: bool = False
    batch_by_speed: bool = False
    elastic: bool = False
    accumulate_grad_batches: int = 1
    unlike: Sequence[int] = ()
    """Depths of the pipelines, if these are cut differently."""


class Refusal(NamedTuple):
    """What was asked and is refused, the dimension whose sentence says why, and the values of ``dimension`` that are
    taken."""

    said: str
    why: Dimension
    dimension: Dimension
    takes: Set[str] = frozenset()

    @property
    def words(self) -> list[str]:
        """Values that are taken, in the words of users."""
        if self.dimension == "payloads":
            return [words for words, payload in FORMS.items() if payload.kinds & self.takes]
        return [words for value, words in WORDS.get(self.dimension, {}).items() if value in self.takes]


def capabilities_of(method: SyncMethod | PolicyConfig) -> Capabilities:
    """Return the row of ``method``: its attribute ``capabilities``, which a user's own method may have, too."""
    policy = method if isinstance(method, PolicyConfig) else method.policy
    row: Capabilities = getattr(method, "capabilities", Capabilities())
    if policy.announces == "late":
        row = replace(row, schedules=row.schedules & FLUSH)
    elastic: PolicyConfig = getattr(method, "elastic_policy", policy)
    if elastic.keeps_equal and row.elastic is not None:  # no member of a round may be a turn behind
        row = replace(row, elastic={"schedules": FLUSH, "batches": frozenset({"one"}), **row.elastic})
    return row


def refusals(row: Capabilities, asked: Combination) -> Iterator[Refusal]:
    """Yield what was asked and is not in the row's sets."""
    exchange, method, job = asked.exchange, f"sync={asked.sync!r}", "in an elastic run (SDPIPE_PIPELINE is set)"
    depths = f"num_stages={list(asked.unlike)} with unlike cuts"
    flushes = "pipedream" if asked.schedule == "pipedream" else "flush"
    several = "one" if asked.accumulate_grad_batches == 1 else "several"
    demands: list[tuple[Dimension, Set[str], str]] = [
        ("payloads", exchange.payload.kinds, f"exchange={exchange}"),
        ("overlaps", {exchange.overlap}, f"exchange={exchange}"),
        ("hierarchies", {exchange.hierarchy}, f"exchange={exchange}"),
        ("schedules", {flushes}, f"schedule={asked.schedule!r} with num_stages={asked.num_stages}"),
        ("batches", {several}, f"accumulate_grad_batches={asked.accumulate_grad_batches}"),
    ]
    demands += [("data", {"dealt"}, "data='dealt'")] * asked.dealt
    demands += [("data", {"by_speed"}, "batch_by_speed=True")] * asked.batch_by_speed
    for dimension, values, what in demands:
        takes: Set[str] = getattr(row, dimension)
        if not values & takes and not (dimension == "schedules" and asked.num_stages == 1):
            yield Refusal(f"{what} does not go with {method}", dimension, dimension, takes)
    if asked.unlike and row.unlike is None:
        yield Refusal(f"{depths} does not go with {method}", "unlike", "unlike")
    if asked.elastic and row.elastic is None:
        yield Refusal(f"{method} does not work {job}", "elastic", "elastic")
    for dimension, values, what in demands:
        if asked.unlike and not values & (takes := (row.unlike or {}).get(dimension, values)):
            yield Refusal(f"{what} does not go with {method} and {depths}", "unlike", dimension, takes)
        if asked.elastic and not values & (takes := (row.elastic or {}).get(dimension, values)):
            why: Dimension = "elastic" if dimension in ("payloads", "overlaps") else dimension
            yield Refusal(f"{what} with {method} does not work {job}", why, dimension, takes)
    if asked.elastic and asked.batch_by_speed and not exchange.is_plain:
        yield Refusal(f"batch_by_speed=True with exchange={exchange} does not work {job}", "data", "data", SHARDED)
