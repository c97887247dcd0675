"""Pipelines with stragglers whose links are as busy as their processors: the gain from hiding the averaging and from
sending less.

Workers are emulated: they sleep instead of computing, and every message between them takes as long as over a link on
which a full average of a stage's parameters among all pipelines takes a given share of an iteration. Each worker has
one card, which sends one message at a time. The stages of a pipeline are within a machine, or reach each other through
the same cards; then activations wait for averages that are being sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_sdpipe.placement.network import Device, Network
from lightning_sdpipe.topology.mesh import Mesh
from recipes.harness.emulated_links import WITHIN_A_MACHINE, emulated_links
from recipes.suites.grid import Case, Grid, Ratios, Row, ratios, rotated, versus
from recipes.suites.throughput import summary
from recipes.suites.trainings import Named, Training, quiet, train

NOSYNC = "nosync"
LINKS = {"between_machines": "", "everywhere": "/everywhere"}
"""Which links are busy, and the suffix that this adds to keys."""
KEYS: dict[str, tuple[str, float | None]] = {
    "best": ("sdpipe/nosync/b/busy_link", 0.93),
    "default": ("sdpipe/nosync/b/busy_link/default", None),
}
"""Keys and goals of the exchanges that have a ratio; others have only rows."""


@dataclass(frozen=True)
class Busy:
    """A training in which the links of ``kind`` carry ``rate`` bytes per second."""

    training: Training
    kind: str
    rate: float


def measure(
    *,
    training: Mapping[str, Any],
    share: float,
    repeats: int,
    delays: Mapping[str, Any],
    exchanges: Mapping[str, Any],
    links: Sequence[str],
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Return the ratio of the samples per second with each exchange to those of pipelines that never synchronise.

    Args:
        training: fields of a :class:`~recipes.suites.trainings.Training`.
        share: ratio of the time of a full average among all pipelines to that of an iteration without delays.
        repeats: trainings of each, each with its own seed.
        delays: specification of the heterogeneity that slows workers down.
        exchanges: specifications by name; "best" and "default" have a ratio.
        links: the links that are busy: "between_machines", "everywhere".
        seed: seed of the first repeat.
    """
    quiet()
    stages, pipelines, parameters = (training[name] for name in ("num_stages", "num_pipelines", "block_parameters"))
    part = -(-parameters // pipelines)
    moved = 4 * (parameters - part + (pipelines - 1) * part)  # the others' parts, then the own part's mean to each
    rate = moved / (share * (training["num_micro_batches"] + stages - 1) * training["block_seconds"])
    cases = []
    for repeat in range(repeats):
        for kind in links:
            for name in rotated([NOSYNC, *exchanges], repeat):
                method = "NoSync" if name == NOSYNC else "SemiDecentralized"
                asked = Training(
                    method=Named(name, {"_target_": f"lightning_sdpipe.{method}"}),
                    condition=Named("b", delays),
                    exchange=exchanges.get(name),
                    seed=seed + repeat,
                    **training,
                )
                cases.append(Case({"what": name, "busy_links": kind, "repeat": repeat}, Busy(asked, kind, rate)))
    rows = Grid().run(cases, _train, "samples_per_s")
    shape = f"{stages}x{pipelines} emulated, b, a full average takes {share:g} of an iteration"
    goals = {}
    for kind in links:
        for name, (key, value) in KEYS.items():
            meaning = f"samples/s, {shape}, busy {kind}: SemiDecentralized with {name} exchange over NoSync"
            of = "samples_per_s", name, NOSYNC, None if LINKS[kind] else value
            goals[key + LINKS[kind]] = versus(meaning, *of, busy_links=kind)
    return rows, ratios(rows, goals)


def _train(asked: Busy) -> Row:
    case = asked.training
    ranks = range(case.workers)
    assert isinstance(case.num_stages, int)
    mesh = Mesh.build(case.workers, case.num_stages)
    pipelines = [mesh.locate(rank)[1] for rank in ranks]
    within = WITHIN_A_MACHINE if asked.kind == "between_machines" else asked.rate
    rates = [[within if pipelines[a] == pipelines[b] else asked.rate for b in ranks] for a in ranks]
    devices = tuple(Device("emulated", rank, 1.0) for rank in ranks)
    network = Network(devices, [[0.0 for _ in ranks] for _ in ranks], rates)
    reports = train(case, links=emulated_links(network))
    return {"link_bytes_per_s": asked.rate, **summary(reports, case.warm_up, case.num_micro_batches)}
