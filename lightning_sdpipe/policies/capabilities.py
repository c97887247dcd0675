"""What a method takes: plain sets of values, by dimension.

Payloads are named by what the members of an exchange must have in common (``Payload.needs``), so that a set also covers
payloads added later.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Literal

Dimension = Literal["payloads", "overlaps", "hierarchies", "schedules", "data", "batches", "unlike", "elastic"]

FULL = frozenset({"full"})
CHANGING = FULL | {"nothing"}
RING = CHANGING | {"neighbours"}
BASES = RING | {"base"}
AT_ONCE, BESIDE = frozenset({"none"}), frozenset({"none", "step"})
FREELY = BESIDE | {"free"}
FLAT, HOSTS = frozenset({"flat"}), frozenset({"flat", "hosts"})
FLUSH = frozenset({"flush"})
SHARDED = frozenset({"sharded"})
ASKED = SHARDED | {"dealt"}
DEALT = ASKED | {"auto"}


@dataclass(frozen=True)
class Capabilities:
    """What a method takes. The default is what works with any method; a user's own method names what else it was made
    for.

    Args:
        payloads: any of ``"full"``, ``"half"``, ``"eight_bit"``, ``"feedback"`` (8 bits with error feedback or
            stochastic rounding, and payloads of one's own), ``"one_bit"`` and ``"momentum"``; or what the members have
            in common, as payloads need it: ``"nothing"``, ``"neighbours"`` that stay the same, a common ``"base"``, or
            sums of ``"gradients"``.
        overlaps: values of ``Exchange(overlap=...)``.
        hierarchies: values of ``Exchange(hierarchy=...)``.
        schedules: any of ``"flush"`` and ``"pipedream"``, with several stages. A policy that announces late takes only
            ``"flush"``.
        data: any of ``"sharded"``, ``"dealt"`` (if the user asks for it), ``"auto"`` (dealt unasked) and ``"by_speed"``
            (``batch_by_speed=True``).
        batches: any of ``"one"`` and ``"several"``, the batches of an update.
        unlike: the smaller sets for pipelines that are cut differently, by dimension; None if it takes no such
            pipelines.
        elastic: the same for elastic runs.
    """

    payloads: Set[str] = FULL
    overlaps: Set[str] = AT_ONCE
    hierarchies: Set[str] = FLAT
    schedules: Set[str] = frozenset({"flush", "pipedream"})
    data: Set[str] = SHARDED
    batches: Set[str] = frozenset({"one", "several"})
    unlike: Mapping[Dimension, Set[str]] | None = None
    elastic: Mapping[Dimension, Set[str]] | None = None


LIKE: Mapping[Dimension, Set[str]] = {"overlaps": BESIDE, "hierarchies": FLAT}
GROUPS = Capabilities(CHANGING, BESIDE, HOSTS, data=DEALT, unlike=LIKE, elastic={})
"""Averaging of models in groups that the scheduler forms."""
GRADIENTS = Capabilities(
    BASES | {"gradients"},
    hierarchies=HOSTS,
    data=SHARDED | {"by_speed"},
    unlike={"payloads": FULL, "hierarchies": FLAT},
    elastic={"payloads": BASES},
)
EQUALLY = replace(GRADIENTS, elastic={"payloads": BASES, "data": SHARDED})
BY_SAMPLES = replace(GRADIENTS, payloads=FULL, hierarchies=FLAT, data=SHARDED)
OUTER = Capabilities(BASES, BESIDE, HOSTS, elastic={"schedules": FLUSH})
