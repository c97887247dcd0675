"""Distant islands that are preempted: DiLoCo over slow links, while processes are killed.

Every pipeline is its own host (a network namespace), and the kernel limits its link to a rate. Messages between workers
are delayed by an emulated latency; so are those to and from the scheduler, by a proxy. Devices sleep instead of
computing, and one is slower than the others. A killed pipeline is restarted at once, from a process that has imported
everything, and gets the state of another one.

Two pipelines also train, without kills, on links of published rates: the result is the share that is left of their rate
without a link.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hydra
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from recipes.harness.namespaces import hosts, inside
from recipes.harness.pipelines import Record, spans
from recipes.suites.elastic import Work, World
from recipes.suites.emulated import FEATURES, EmulatedChain, passes
from recipes.suites.far_apart.samples import PacedBert, Text, learn_together, loader, losses, reached, rows_of, target
from recipes.suites.grid import Goal, Ratios, Row, chosen, ratios, values
from recipes.suites.soak.events import Events
from recipes.suites.trainings import quiet

LOWER_IS_BETTER = frozenset({"samples", "longest"})

BATCH = 4
KILLED, CALM, BEST, ALL_REDUCE = "killed", "calm", "best", "all_reduce"
_SAMPLES = "mini-batches of a small BERT in the model at a loss, with kills over"
GOALS = {
    "far_apart/calm": Goal("the same without kills", "utilisation", {"run": CALM}, "one"),
    "far_apart/bytes/calm": Goal("the same without kills", "all_reduce_bytes", {"run": CALM}, "bytes"),
    "samples/far_apart": Goal(f"{_SAMPLES} without; one value per seed", KILLED, {"run": "bert"}, CALM, 1.05),
    "samples/all_reduce": Goal(
        f"{_SAMPLES} all-reduce of the gradients (without kills, in one process), each at its best learning rate",
        BEST,
        {"run": "bert"},
        ALL_REDUCE,
    ),
}


@dataclass(frozen=True)
class Islands(Work):
    """The training of every pipeline; the last one has the slow device.

    Args:
        slow: factor of a mini-batch's length on the slow device.
        text: the text that a BERT learns in place of the emulated model; None for that model.
        rows: rows of the text.
    """

    slow: float = 1.0
    text: Text | None = None
    rows: Sequence[Tensor] = ()

    def seconds(self, pipeline: int) -> float:
        """Return the seconds of a mini-batch on an island."""
        return self.batch_seconds * (self.slow if pipeline == self.num_pipelines - 1 else 1.0)


class Numbered(EmulatedChain):
    """Learns from the second part of a batch; the first has the numbers of its samples."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        return super().training_step(batch[1], batch_idx)


def island(work: Islands, pipeline: int) -> Sequence[Any]:
    """Return a pipeline's module and its data."""
    seconds = work.seconds(pipeline)
    if work.text is not None:
        return PacedBert(work.text, seconds), loader(work.text, work.rows, work.batches)
    count = work.batches * BATCH
    data = TensorDataset(torch.arange(count), torch.randn(count, FEATURES))
    return Numbered(1, *passes(seconds), work.num_parameters), DataLoader(data, BATCH)


def run(
    *,
    method: Mapping[str, Any],
    exchange: Mapping[str, Any],
    work: Mapping[str, Any],
    rate_mbit: float,
    kill_every: float,
    repeats: int,
    samples: Mapping[str, Any],
    links: Mapping[str, Any],
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Train the emulated model and a BERT, each with kills and without.

    Args:
        method: specification of DiLoCo for Hydra.
        exchange: specification of its exchange for Hydra.
        work: options of :class:`Islands`.
        rate_mbit: rate of every link, in either direction.
        kill_every: seconds between kills.
        repeats: repeats of each run.
        samples: for the BERT: ``text``, options of :class:`~recipes.suites.far_apart.samples.Text`; ``work``, options
            of :class:`Islands` that differ; ``fast_lrs``, learning rates of which the best is compared with all-reduce;
            and the number of ``seeds``, which may be 0.
        links: for runs at other rates: ``work``, options of :class:`Islands`; ``methods``, each with a ``sync``, an
            ``exchange`` and the number of ``steps`` that count, or None to leave it out; and ``rates`` in Mbit/s, each
            with the published share of the rate, and the goal of the best method.
        seed: seed of the choice of victims.

    Raises:
        NotAllowed: network namespaces cannot be made here.
    """
    quiet()
    rows: list[Row] = []
    always: dict[str, Any] = {"num_stages": 1, "make": island, "timeout": 120.0}
    rows += on_links(always, **links)
    always |= {**work, "exchange": hydra.utils.instantiate(exchange)}

    def train(islands: Islands, killed: int | None) -> tuple[list[Record], int]:
        """Make one run to its end, killing by the seed ``killed``, or nothing if it is None; return the records and the
        number of kills."""
        with world_of(islands, rate_mbit) as world:
            most, draws = 0 if killed is None else 1 << 30, random.Random(killed)
            done = Events(world, draws, most, kill_every, frozenset(), {}, {"kill": 1}, regular=True)
            done.until_the_end()
            return world.records(), done.what["kill"]

    for repeat in range(repeats):
        for name in (KILLED, CALM):
            islands = Islands(sync=hydra.utils.instantiate(method), **always)
            records, kills = train(islands, seed + repeat if name == KILLED else None)
            rows.append({"run": name, "repeat": repeat, "kills": kills, **measured(records, islands)})
            print(rows[-1], flush=True)
    for number in range(seed, seed + samples["seeds"]):
        text = Text(**samples["text"])
        of_bert: dict[str, Any] = {**always, **samples["work"], "rows": rows_of(text, number), "seed": number}
        calm = Islands(sync=hydra.utils.instantiate(method), text=text, **of_bert)
        fast = [replace(text, lr=lr) for lr in samples["fast_lrs"]]
        killed = [losses(train(each, number)[0]) for each in (calm, *(replace(calm, text=t) for t in fast))]
        shape = calm.num_pipelines, calm.batches, number
        all_reduce = [learn_together(each, calm.rows, *shape) for each in fast]
        row = to_target(losses(train(calm, None)[0]), killed, all_reduce)
        rows.append({"run": "bert", "repeat": number, **row})
        print(rows[-1], flush=True)
    return rows, ratios_of(rows)


@contextmanager
def world_of(islands: Islands, rate_mbit: float | None) -> Iterator[World]:
    """Yield a world whose pipelines are separate hosts, on links of this rate."""
    with (
        hosts(islands.num_pipelines + 1, rate_mbit) as names,
        inside(names[-1]),
        tempfile.TemporaryDirectory(prefix="far-apart-") as directory,
        World(Path(directory), islands, hosts=names) as world,
    ):
        yield world


def on_links(
    always: Mapping[str, Any],
    *,
    work: Mapping[str, Any],
    methods: Mapping[str, Mapping[str, Any] | None],
    rates: Sequence[tuple[float, float, float]],
) -> list[Row]:
    """Return the steps per second of each method at each rate, and without a link."""
    rows: list[Row] = []
    for rate, published, goal in [(math.inf, 1.0, 1.0), *rates]:
        for name, method in methods.items():
            if method is None or (rows and math.isinf(rate)):
                continue  # without a link, the first method stands for all
            sync, exchange = (hydra.utils.instantiate(method[key]) for key in ("sync", "exchange"))
            every, steps, rated = getattr(sync, "every", 1), method["steps"], math.isfinite(rate)
            islands = Islands(**always, sync=sync, exchange=exchange, batches=0, **work)
            islands = replace(islands, batches=islands.num_pipelines * (steps + every + 1))
            if not rated:
                islands = replace(islands, latency=0.0)
            with world_of(islands, rate if rated else None) as world:
                records = world.finish(900.0)
            row = {"run": "link", "repeat": 0, "method": name, "rate_mbit": rate, "published": published, "goal": goal}
            in_full = 32e-6 * islands.num_parameters / rate
            row |= paced(records, islands.num_pipelines * every, islands.num_pipelines * steps)
            rows.append({**row, "in_full": 1.3 * in_full + islands.batch_seconds})
            print(rows[-1], flush=True)
    return rows


def paced(records: Sequence[Record], every: int, steps: int) -> Row:
    """Return the rate of ``steps`` steps of all pipelines, counted from the middle of the first period of ``every``
    steps on, and the longest time between two steps of one pipeline."""
    times = sorted(at for record in records for at in record.times("trained"))
    begin, end = times[(every + 1) // 2], times[(every + 1) // 2 + steps]
    longest = max(after - before for before, after in spans(records, "trained"))
    return {"rate": steps / (end - begin), "longest": longest}


def to_target(calm: Sequence[float], killed: Sequence[Sequence[float]], all_reduce: Sequence[Sequence[float]]) -> Row:
    """Return the number of mini-batches that each run needs to reach the target: a loss of the run without kills while
    it still falls.

    Args:
        calm: losses without kills.
        killed: losses with kills, at the same learning rate and then at each faster one.
        all_reduce: losses of all-reduce at each faster learning rate.
    """
    goal = target(calm)
    return {
        "target": goal,
        CALM: reached(calm, goal),
        KILLED: reached(killed[0], goal),
        BEST: min(reached(each, goal) for each in killed),
        ALL_REDUCE: min(reached(each, goal) for each in all_reduce),
    }


def measured(records: Sequence[Record], islands: Islands) -> Row:
    """Return the seconds of a run and its utilisation, the ratio of the seconds of mini-batches in the model to those
    of all devices. A mini-batch that was lost with a pipeline is trained again; only its last training counts.

    Raises:
        ValueError: a mini-batch was never trained.
    """
    trained = sorted(
        (line["at"], tuple(line["trained"]), record.pipeline) for record in records for line in record.said("trained")
    )
    last = {samples: pipeline for _, samples, pipeline in trained}
    if len(last) != islands.batches:
        raise ValueError(f"{len(last)} of {islands.batches} mini-batches were trained")
    seconds = trained[-1][0] - min(at for record in records for at in record.times("started"))
    useful = sum(islands.seconds(pipeline) for pipeline in last.values())
    nodes = islands.num_pipelines
    return {
        "one": 1,
        "seconds": seconds,
        "utilisation": useful / (nodes * seconds),
        "trained_again": len(trained) - len(last),
        "bytes": sum(max((line["sent"] for line in record.lines if "sent" in line), default=0) for record in records),
        "state_bytes": sum(line["bytes"] for record in records for line in record.said("received")),
        "all_reduce_bytes": 2 * (nodes - 1) * 4 * islands.num_parameters * islands.batches / nodes,
    }


def ratios_of(rows: Sequence[Row]) -> Ratios:
    """Return the ratios of utilisation and bytes, with kills and without; of speed on links; and of samples."""
    goals, killed = dict(GOALS), chosen(rows, run=KILLED)
    kills, states = (sum(row[column] for row in killed) for column in ("kills", "state_bytes"))
    meaning = f"seconds of mini-batches in the model over those of all devices; {kills} kills"
    goals["far_apart/utilisation"] = Goal(meaning, "utilisation", {"run": KILLED}, "one", 0.83)
    meaning = "bytes that all-reduce of the gradients would send (by arithmetic) over those sent, with kills"
    meaning += f"; states of newcomers, {states / 1e6:.0f} MB, are not counted"
    goals["far_apart/bytes"] = Goal(meaning, "all_reduce_bytes", {"run": KILLED}, "bytes", 70.0)
    alone = {"run": "link", "rate_mbit": math.inf}
    for rate in values(chosen(rows, run="link"), "rate_mbit")[1:]:
        found = chosen(rows, run="link", rate_mbit=rate)
        best, theirs = max(found, key=lambda row: row["rate"]), found[0]["published"]
        bars = {"full": theirs - 0.02}
        for name, row in [(BEST, best), *((row["method"], row) for row in found)]:
            of, key = {"run": "link", "rate_mbit": rate, "method": row["method"]}, f"{name}/{rate:g}mbit"
            meaning = f"steps per second, {row['method']} on a link over DiLoCo without; published in full: {theirs:g}"
            goals[f"share/{key}"] = Goal(meaning, "rate", of, alone, best["goal"] if name == BEST else bars.get(name))
            if name != BEST:
                meaning = "longest seconds between two steps over a step and 1.3 times those of all bytes in full"
                goals[f"longest/{key}"] = Goal(meaning, "longest", of, "in_full", 1.0)
    return ratios(rows, goals)
