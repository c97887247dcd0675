"""Sections: the parts of the chain that pipelines with different cuts exchange.

The union of all cuts divides the chain into sections: blocks that lie on one stage in every pipeline. The replicas of a
section are the stages that run it, one in each pipeline. A tensor that several stages of a pipeline hold still belongs
to one section: a parameter to its first owner's, where its first block runs, and a buffer to its last owner's, where it
is up to date. The other owners' copies are not exchanged with other pipelines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.ownership import Ownership

MOST = 64
"""Largest number of sections; each costs threads and a process group, which takes up to 57 ms to open."""


@dataclass(frozen=True)
class Sections:
    """The sections of the pipelines, the same on all workers. ``owners[s][i]`` is the stage of pipeline i that
    exchanges section s. A worker exchanges its sections in increasing order."""

    owners: Sequence[tuple[int, ...]]
    parameters: Mapping[str, int]
    """Section of each tensor, by name, when exchanged as a parameter: that of its first owners. Exchanged as a
    buffer, it belongs to its last owners."""


def sections_of(spans: Sequence[Sequence[range]], ownerships: Sequence[Ownership]) -> Sections:
    """Return the sections of pipelines with these cuts and ownerships.

    Raises:
        ConfigurationError: there are too many sections.
    """
    of_blocks = sections_of_blocks(spans)
    names = ownerships[0].stages
    first = {name: tuple(own.stages[name][0] for own in ownerships) for name in names}
    last = {tuple(own.stages[name][-1] for own in ownerships) for name in names}
    owners = sorted({*of_blocks, *first.values(), *last})
    number = {each: place for place, each in enumerate(owners)}
    return Sections(owners, {name: number[each] for name, each in first.items()})


def sections_of_blocks(spans: Sequence[Sequence[range]]) -> set[tuple[int, ...]]:
    """Return the sections of the blocks: for each section, the stage that runs it in each pipeline.

    Raises:
        ConfigurationError: there are too many sections.
    """
    stages = [[number for number, span in enumerate(cut) for _ in span] for cut in spans]  # by pipeline and block
    found = set(zip(*stages, strict=True))
    if len(found) > MOST:
        raise ConfigurationError(
            f"The cuts of {len(spans)} pipelines divide the chain into {len(found)} sections, and at most {MOST} "
            f"are allowed, since each is a process group of its own. {_to_move(spans)}"
        )
    return found


def _to_move(spans: Sequence[Sequence[range]]) -> str:
    """Return advice to move the cut of a single pipeline that is nearest to another pipeline's cut."""
    cuts = [{span.start for span in cut[1:]} for cut in spans]
    alone = [
        (min(abs(at - other) for other in others), pipeline, at, min(others, key=lambda other: abs(at - other)))
        for pipeline, own in enumerate(cuts)
        if (others := set().union(*(cut for i, cut in enumerate(cuts) if i != pipeline)))
        for at in own - others
    ]
    if not alone:
        return "Use fewer stages."
    _, pipeline, at, to = min(alone)
    return f"Move the cut of pipeline {pipeline} before block {at} to block {to}, where another pipeline has one."
