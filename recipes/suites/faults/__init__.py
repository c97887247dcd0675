"""Effects of a fault on survivors: pipelines are killed in every phase of their work, with several methods, and disks
are full.

For each method, role and phase, this measures how much longer than a median step the survivors' longest step took, and
how long it took until a newcomer took part. Workers sleep instead of computing; everything else about them is real, and
their processes are forked from this one.
"""

from __future__ import annotations

import math
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hydra

from lightning_sdpipe.exchange.options import Exchange
from recipes.harness import small_disks
from recipes.harness.namespaces import NotAllowed
from recipes.harness.pipelines import Record, spans, usual_and_longest
from recipes.suites.elastic import Fault, Work, World
from recipes.suites.faults import elastic_overhead, torchft_peer
from recipes.suites.grid import Parts, Ratios, Row, chosen, ratio, run_parts, values

LOWER_IS_BETTER = frozenset({"longest_step", "longest_in_join", "newcomer", "torchft"})

LIMITS = {
    **dict.fromkeys(["forward", "backward", "optimizer", "waiting", "exchange", "half_sent", "sigterm"], 0.25),
    **dict.fromkeys(["pause", "validation", "two_at_once", "all_but_one"], 0.5),
    **dict.fromkeys(["donor", "newcomer"], 0.25),
    "scheduler": 0.3,
    "silent": 0.2,
    "full_logs": 0.3,
    "full_checkpoints": 0.5,
}
"""Seconds that the survivors' longest step may take beyond a median one; with ``silent``, also beyond the limit of
silence; with ``scheduler`` and ``full_logs``, also beyond the time without a scheduler."""
JOIN_LIMIT, NEWCOMER_LIMIT = 0.25, 2.0
IN_STEP = frozenset({"allreduce"})
"""Methods whose pipelines make every step together: a death costs them the step under way, and a join the transfer of
the state."""
SILENCE = 2.0
CHECKPOINT_EVERY = 10  # if the checkpoints' disk is full
VICTIM = 2  # neither the leader nor the first donor of a state
FROM_OUTSIDE = {
    "sigterm": signal.SIGTERM,
    "silent": signal.SIGSTOP,
    **dict.fromkeys(["two_at_once", "all_but_one"], signal.SIGKILL),
}
"""Phases in which the victim gets a signal from outside, whatever it does, and the signal."""


def run(
    *,
    methods: Mapping[str, Any],
    cases: Sequence[Mapping[str, Any]],
    only: Sequence[str],
    after: int,
    calm: float,
    repeats: int,
    work: Mapping[str, Any],
    overhead: Mapping[str, Any],
    torchft: Mapping[str, Any],
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Run the parts that ``only`` names: ``matrix``, ``overhead``, ``torchft``.

    Args:
        methods: specifications for Hydra, by name.
        cases: what is killed, or full: ``method``, ``role``, ``phase``, ``num_stages`` if not 1, ``schedule`` if not
            1F1B, and ``exchange`` if not ``Exchange()``.
        only: names of parts.
        after: updates that all pipelines make before the death.
        calm: seconds from the death until a newcomer replaces the victim.
        repeats: repeats of each case.
        work: options of :class:`~recipes.suites.elastic.Work`.
        overhead: arguments of :func:`~recipes.suites.faults.elastic_overhead.measure`.
        torchft: arguments of :func:`~recipes.suites.faults.torchft_peer.measure`.
        seed: seed of the model.

    Returns:
        A row for each death, and the ratios of measurements to their limits.
    """
    matrix = {"methods": methods, "cases": cases, "after": after, "calm": calm, "repeats": repeats, "work": work}
    allreduce = {"method": methods["allreduce"]}
    compared = {name: methods[of] for name, of in (("elastic", "sdpipe"), ("allreduce", "allreduce"))}
    arguments = {"matrix": matrix, "overhead": {**overhead, "methods": compared}, "torchft": {**torchft, **allreduce}}
    return run_parts("faults", PARTS, only=only, seed=seed, **arguments)


def measure(*, repeats: int, cases: Sequence[Mapping[str, Any]], **others: Any) -> tuple[list[Row], Ratios]:
    """Measure the matrix: one death of each case in each repeat. See :func:`run` for the arguments."""
    rows = [{**_survived(case, **others), "repeat": repeat} for repeat in range(repeats) for case in cases]
    return rows, ratios(rows)


PARTS: Parts = {"matrix": measure, "overhead": elastic_overhead.measure, "torchft": torchft_peer.measure}


def _survived(
    case: Mapping[str, Any], methods: Mapping[str, Any], after: int, calm: float, work: Mapping[str, Any], seed: int
) -> Row:
    ends, phase = case["phase"] in ("pause", "validation"), case["phase"]
    whole = Work(
        **work,
        seed=seed,
        num_stages=case.get("num_stages", 1),
        sync=hydra.utils.instantiate(methods[case["method"]]),
        batches=(after if ends else 5000) * work["num_pipelines"],
        epochs=1000 if ends else 1,
        validation_batches=2 if ends else 0,
        checkpoint_every=CHECKPOINT_EVERY if phase == "full_checkpoints" else 0,
        schedule=case.get("schedule", "1f1b"),
        exchange=Exchange(**case.get("exchange", {})),
    )
    print(f"{case['method']}: {case['role']} in {phase}", end=": ", flush=True)
    row = {"method": case["method"], "role": case["role"], "phase": phase, "num_stages": whole.num_stages}
    try:
        row |= measure_case(whole, case["role"], phase, after, calm)
        print(f"{row['beyond_s']:.3f} s beyond a step of {row['median_s']:.3f} s", flush=True)
    except TimeoutError as error:
        print(f"FAILED: {error}", flush=True)
        row |= {"failed": str(error)[:200]}
    except NotAllowed as reason:
        print(f"left out: {reason}", flush=True)
        row |= {"left_out": str(reason)}
    return row


def measure_case(work: Work, role: str, phase: str, after: int, calm: float) -> Row:
    """Make one run with one fault.

    Raises:
        TimeoutError: something did not happen; the message has what all processes printed.
        NotAllowed: no disk can be mounted to be filled.
    """
    full, downtime = phase.startswith("full_"), 0.0
    with (
        tempfile.TemporaryDirectory() as directory,
        small_disks.disk(Path(directory, phase.removeprefix("full_"))) if full else nullcontext(),
        World(Path(directory), work, worker_timeout=SILENCE) as it,
    ):
        rank = {"first_stage": work.num_stages - 1}.get(role, 0)
        victims = {"two_at_once": [0, VICTIM], "all_but_one": [1, VICTIM]}.get(
            phase, [0] if role in ("leader", "donor") else [VICTIM]
        )
        inside = not full and phase not in ("scheduler", "donor", "newcomer", *FROM_OUTSIDE)
        it.launch_all(dict.fromkeys(victims, Fault(phase, after)) if inside else {}, rank)
        it.wait(lambda: min(map(it.updates, range(work.num_pipelines))) >= after - 1, f"{after} updates of all")
        if phase == "scheduler" or full:
            killed, victims = time.monotonic(), []
            downtime = _with_a_full_disk(it, phase) if full else it.restart_scheduler()
        elif phase in ("donor", "newcomer"):
            killed, victims = _kill_in_transfer(it, phase)
        else:
            for pipeline in [] if inside else victims:
                it.kill(pipeline, rank, FROM_OUTSIDE[phase])
            killed = it.wait(lambda: _struck_at(it, victims), f"pipeline {victims} to die in {phase}")
        time.sleep(calm + (SILENCE if phase == "silent" else 0.0))
        asked = time.monotonic()
        for pipeline in victims:
            it.launch(pipeline)
        again = f"pipelines {victims} to take part again"
        it.wait(lambda: all(it.updates(pipeline) > 0 for pipeline in victims), again)
        time.sleep(0.5)
        records = it.records()
    hit = {*victims, *([VICTIM] if phase in ("donor", "newcomer") else [])}
    survivors = [record for record in records if record.pipeline not in hit and record.rank == 0]
    figures = _figures(survivors, records, victims, killed, asked)
    figures["beyond_s"] -= downtime + (SILENCE if phase == "silent" else 0.0)
    return figures


def _with_a_full_disk(it: World, phase: str) -> float:
    """Fill a disk for a while; return the seconds without a scheduler, which is restarted if its disk is full."""
    place, downtime, pipelines = it.directory / phase.removeprefix("full_"), 0.0, range(it.work.num_pipelines)

    def train(updates: int) -> None:
        aims = [it.updates(pipeline) + updates for pipeline in pipelines]
        it.wait(lambda: all(it.updates(i) >= aim for i, aim in enumerate(aims)), "training to go on")

    def refused() -> int:
        logs = [path.read_text() for path in it.directory.glob("*.log")]
        return sum(text.count("but the checkpoint") for text in logs)

    small_disks.fill(place)
    whole: list[Path] = []
    if phase == "full_logs":
        downtime = it.restart_scheduler()
        train(3 * CHECKPOINT_EVERY)
    else:
        it.wait(lambda: refused() > 0, "word of a checkpoint that is not written")
        whole = sorted(place.glob("*.ckpt"))
        it.wait(lambda: refused() > 2, "word of each further one")
        if not whole or sorted(place.glob("*.ckpt")) != whole:
            raise TimeoutError(f"the last whole checkpoint, of {whole}, was not kept")
    small_disks.empty(place)
    train(2 * CHECKPOINT_EVERY)
    if phase == "full_checkpoints" and sorted(place.glob("*.ckpt")) == whole:
        raise TimeoutError("no checkpoint was written when there was space again")
    return downtime


def _kill_in_transfer(it: World, phase: str) -> tuple[float, list[int]]:
    """Let a newcomer join, and kill it or its donor while the state is under way; return when, and the victims."""
    it.kill(VICTIM)
    it.wait(lambda: VICTIM not in it.members(), "the scheduler to know of a death")
    if phase == "newcomer":
        it.launch(VICTIM, Fault("newcomer", 0))
        return it.wait(lambda: _struck_at(it, [VICTIM], newest=True), "the newcomer to die"), [VICTIM]
    # Pipeline 1 dies when it is asked for the state.
    it.end(1)
    it.wait(lambda: it.members() == [0], "one pipeline to be left")
    it.launch(1, Fault("donor", 0))
    it.wait(lambda: it.updates(1) > 0, "a donor to be there")
    it.launch(VICTIM)
    died = it.wait(lambda: _struck_at(it, [1], newest=True), "the donor to die")
    it.wait(lambda: it.updates(VICTIM) > 0, "the newcomer to get its state from another donor")
    return died, [1]


def _struck_at(it: World, victims: Sequence[int], newest: bool = False) -> float | None:
    """Return when the last of ``victims`` died, by itself or killed from outside; None if one has not."""
    found = []
    for pipeline in victims:
        records = [record for record in it.records() if record.pipeline == pipeline]
        strikes = [at for record in records[-it.work.num_stages if newest else 0 :] for at in record.times("strikes")]
        if not newest and pipeline in it.killed_at:
            strikes = [it.killed_at[pipeline]]
        if not strikes:
            return None
        found.append(strikes[-1])
    return max(found)


def _figures(
    survivors: Sequence[Record],
    records: Sequence[Record],
    victims: Sequence[int],
    killed: float,
    asked: float,
) -> Row:
    steps = spans(survivors, "update")
    median, longest = usual_and_longest([step for step in steps if step[0] < asked], killed)
    newest = [[r for r in records if r.pipeline == pipeline and r.rank == 0][-1] for pipeline in victims]
    contributes = max((record.times("update")[0] for record in newest), default=asked)
    in_join = max((end - begin for begin, end in steps if end > asked and begin < contributes), default=median)
    return {
        "median_s": median,
        "longest_s": longest,
        "beyond_s": longest - median,
        "join_beyond_s": in_join - median,
        "newcomer_s": contributes - asked if victims else None,
        "transfer_s": max((line["received"] for record in newest for line in record.said("received")), default=0.0),
    }


def ratios(rows: Sequence[Row]) -> Ratios:
    """Return the ratios of the survivors' delays, and of newcomers' times, to their limits."""
    found: Ratios = {}
    made = [row for row in rows if "left_out" not in row]
    for method, role, phase in dict.fromkeys((row["method"], row["role"], row["phase"]) for row in made):
        of_case, allowed = chosen(made, method=method, role=role, phase=phase), method in IN_STEP
        limit = LIMITS[phase]
        beyond = [
            math.inf if "failed" in row else row["beyond_s"] / (limit + (row["median_s"] if allowed else 0.0))
            for row in of_case
        ]
        meaning = f"seconds beyond a median step, over {limit:g} s{' and a step' if allowed else ''}"
        if math.inf in beyond:
            beyond, meaning = [math.inf], "a run did not go on: see its row"
        found[f"longest_step/{method}/{role}/{phase}"] = ratio(beyond, 1.0, meaning)
    good = [row for row in made if "failed" not in row and row["newcomer_s"] is not None]
    for method in values(good, "method"):
        of_method, allowed = chosen(good, method=method), method in IN_STEP
        meaning = f"survivors' longest step while another joins, beyond a median one, over {JOIN_LIMIT:g} s"
        found[f"longest_in_join/{method}"] = ratio(
            [row["join_beyond_s"] / (JOIN_LIMIT + (row["transfer_s"] if allowed else 0.0)) for row in of_method],
            1.0,
            meaning + (" and the transfer" if allowed else ""),
        )
        newcomers = [row["newcomer_s"] / NEWCOMER_LIMIT for row in of_method]
        meaning = f"from the start of a forked process to its first update, over {NEWCOMER_LIMIT:g} s"
        found[f"newcomer/{method}"] = ratio(newcomers, 1.0, meaning)
    return found
