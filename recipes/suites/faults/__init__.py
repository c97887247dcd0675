"""Effects of a fault on survivors: pipelines that are killed in every phase of their work, under several methods; and
disks that are full.

For each method, role and phase: how much longer than a median step the survivors' longest step took, until when the
scheduler knew, until when every survivor had made a step that began after it, and until when a newcomer took part.
Workers sleep instead of computing; everything else about them is real, and the processes are forked from this one.
"""

from __future__ import annotations

import signal
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import hydra

from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.scheduler.server.server import Limits
from recipes.suites.faults import elastic_overhead, small_disks, torchft_peer
from recipes.suites.faults.elastic_world import Record, Work, World, world
from recipes.suites.faults.injected_faults import Fault
from recipes.suites.faults.small_disks import disk
from recipes.suites.namespaces import NotAllowed
from recipes.suites.ratios import Parts, Ratios, Row, ratio, run_parts

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
"""Seconds that the survivors' longest step may take beyond a median one; with ``silent`` beyond the limit of silence,
with ``scheduler`` and ``full_logs`` beyond the time without one."""
JOIN_LIMIT, NEWCOMER_LIMIT = 0.25, 2.0
IN_STEP = frozenset({"allreduce"})
"""Methods whose pipelines make every step together: a death costs them the step that was under way, and a join the
transfer of the state."""
SILENCE = 2.0
CHECKPOINT_EVERY = 10  # where their disk is full
VICTIM = 2  # neither the leader, nor the first donor of a state


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
        only: parts.
        after: updates that all make before the death.
        calm: seconds after it until a newcomer takes the place.
        repeats: of each case.
        work: of :class:`~recipes.suites.faults.elastic_world.Work`.
        overhead: of :func:`~recipes.suites.faults.elastic_overhead.measure`.
        torchft: of :func:`~recipes.suites.faults.torchft_peer.measure`.
        seed: of the model.

    Returns:
        One row per death; and the ratios of what was measured to its limit.
    """
    matrix = {"methods": methods, "cases": cases, "after": after, "calm": calm, "repeats": repeats, "work": work}
    allreduce = {"method": methods["allreduce"]}
    compared = {name: methods[of] for name, of in (("elastic", "sdpipe"), ("allreduce", "allreduce"))}
    arguments = {"matrix": matrix, "overhead": {**overhead, "methods": compared}, "torchft": {**torchft, **allreduce}}
    return run_parts("faults", PARTS, only=only, seed=seed, **arguments)


def measure(*, repeats: int, cases: Sequence[Mapping[str, Any]], **others: Any) -> tuple[list[Row], Ratios]:
    """The matrix: one death of each case in each repeat. See :func:`run` for the arguments."""
    rows = [{**_survived(case, **others), "repeat": repeat} for repeat in range(repeats) for case in cases]
    return rows, ratios(rows)


PARTS: Parts = {"matrix": measure, "overhead": elastic_overhead.measure, "torchft": torchft_peer.measure}


def _survived(
    case: Mapping[str, Any], methods: Mapping[str, Any], after: int, calm: float, work: Mapping[str, Any], seed: int
) -> Row:
    stages, ends = case.get("num_stages", 1), case["phase"] in ("pause", "validation")
    whole = Work(
        **work,
        seed=seed,
        num_stages=stages,
        sync=hydra.utils.instantiate(methods[case["method"]]),
        batches=after if ends else 5000,
        epochs=1000 if ends else 1,
        validation_batches=2 if ends else 0,
        checkpoint_every=CHECKPOINT_EVERY if case["phase"] == "full_checkpoints" else 0,
        schedule=case.get("schedule", "1f1b"),
        exchange=Exchange(**case.get("exchange", {})),
    )
    print(f"{case['method']}: {case['role']} in {case['phase']}", end=": ", flush=True)
    row = {"method": case["method"], "role": case["role"], "phase": case["phase"], "num_stages": stages}
    try:
        row |= measure_case(whole, case["role"], case["phase"], after, calm)
        print(f"{row['beyond_s']:.3f} s beyond a step of {row['median_s']:.3f} s", flush=True)
    except TimeoutError as error:
        print(f"FAILED: {error}", flush=True)
        row |= {"failed": str(error)[:200]}
    except NotAllowed as reason:
        print(f"left out: {reason}", flush=True)
        row |= {"left_out": str(reason)}
    return row


def measure_case(work: Work, role: str, phase: str, after: int, calm: float) -> Row:
    """One run with one fault.

    Raises:
        TimeoutError: something did not happen, with what all processes said.
        NotAllowed: there is no disk that may be full.
    """
    full = phase in ("full_logs", "full_checkpoints")
    with (
        tempfile.TemporaryDirectory() as directory,
        disk(Path(directory, phase.removeprefix("full_"))) if full else nullcontext(),
        world(Path(directory), work, Limits(SILENCE)) as it,
    ):
        rank = {"first_stage": work.num_stages - 1}.get(role, 0)
        victims = [0] if role in ("leader", "donor") else [VICTIM]
        victims = {"two_at_once": [0, VICTIM], "all_but_one": [1, VICTIM]}.get(phase, victims)
        inside = phase not in ("scheduler", "donor", "newcomer", "two_at_once", "all_but_one", "sigterm", "silent")
        inside = inside and not full
        it.start(dict.fromkeys(victims, Fault(phase, after)) if inside else {}, rank)
        it.wait(lambda: min(map(it.updates, range(work.num_pipelines))) >= after - 1, f"{after} updates of all")
        downtime = 0.0
        if phase == "scheduler":
            killed = time.monotonic()
            downtime = it.restart_scheduler()
            victims = []
        elif full:
            killed, victims = time.monotonic(), []
            downtime = _with_a_full_disk(it, phase)
        elif phase in ("donor", "newcomer"):
            killed = _kill_in_transfer(it, phase, victims)
        else:
            if not inside:
                number = {"sigterm": signal.SIGTERM, "silent": signal.SIGSTOP}.get(phase, signal.SIGKILL)
                for pipeline in victims:
                    it.kill(pipeline, rank, number)
            killed = it.wait(lambda: _struck_at(it, victims), f"pipeline {victims} to die in {phase}")
        time.sleep(calm + (SILENCE if phase == "silent" else 0.0))
        known = [it.gone_at(pipeline, killed) for pipeline in victims]
        asked = time.monotonic()
        for pipeline in victims:
            it.launch(pipeline)
        it.wait(
            lambda: all(it.updates(pipeline) > 0 for pipeline in victims), f"pipelines {victims} to take part again"
        )
        time.sleep(0.5)
        records = it.records()
    survivors = [record for record in records if record.pipeline not in victims and record.rank == 0]
    if phase in ("donor", "newcomer"):
        survivors = [record for record in survivors if record.pipeline != VICTIM]
    return _figures(survivors, records, victims, killed, asked, known, downtime, phase)


def _with_a_full_disk(it: World, phase: str) -> float:
    """Nothing can be written for a while; the seconds without a scheduler, which is killed then."""
    place, downtime = it.directory / phase.removeprefix("full_"), 0.0

    def train(updates: int) -> None:
        aims = [it.updates(pipeline) + updates for pipeline in range(it.work.num_pipelines)]
        it.wait(lambda: all(it.updates(pipeline) >= aim for pipeline, aim in enumerate(aims)), "training to go on")

    def refused() -> int:
        return sum(
            path.read_text().count("training goes on, but the checkpoint") for path in it.directory.glob("*.log")
        )

    small_disks.fill(place)
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


def _kill_in_transfer(it: World, phase: str, victims: list[int]) -> float:
    """A newcomer comes, and it or its donor dies while the state is on its way; ``victims`` become the dead."""
    it.kill(VICTIM)
    it.wait(lambda: VICTIM not in it.members(), "the scheduler to know of a death")
    if phase == "newcomer":
        it.launch(VICTIM, Fault("newcomer", 0))
        died: float = it.wait(lambda: _struck_at(it, [VICTIM], newest=True), "the newcomer to die")
        victims[:] = [VICTIM]
        return died
    # All that may be asked for the state die of it: the first does, and so do restarted ones.
    it.end(1)
    it.wait(lambda: it.members() == [0], "one pipeline to be left")
    it.launch(1, Fault("donor", 0))
    it.wait(lambda: it.updates(1) > 0, "a donor to be there")
    it.launch(VICTIM)
    died = it.wait(lambda: _struck_at(it, [1], newest=True), "the donor to die")
    it.wait(lambda: it.updates(VICTIM) > 0, "the newcomer to get its state from another donor")
    victims[:] = [1]
    return died


def _struck_at(it: World, victims: Sequence[int], newest: bool = False) -> float | None:
    """When the last of them ended itself, or was killed from outside."""
    times = []
    for pipeline in victims:
        if not newest and pipeline in it.killed_at:
            times.append(it.killed_at[pipeline])
            continue
        records = [record for record in it.records() if record.pipeline == pipeline]
        strikes = [
            at for record in (records[-it.work.num_stages :] if newest else records) for at in record.times("strikes")
        ]
        if not strikes:
            return None
        times.append(strikes[-1])
    return max(times)


def _figures(
    survivors: Sequence[Record],
    records: Sequence[Record],
    victims: Sequence[int],
    killed: float,
    asked: float,
    known: Sequence[float | None],
    downtime: float,
    phase: str,
) -> Row:
    steps = [step for record in survivors for step in pairwise(record.times("update"))]
    calm_steps = [end - begin for begin, end in steps if end <= killed]
    median = statistics.median(calm_steps)
    back = []
    for pipeline in victims:
        newest = [record for record in records if record.pipeline == pipeline and record.rank == 0][-1]
        back.append(newest.times("update")[0])
    contributes = max(back, default=asked)
    longest = max(end - begin for begin, end in steps if end > killed and begin < asked)
    in_join = max((end - begin for begin, end in steps if end > asked and begin < contributes), default=median)
    usual = max(calm_steps)
    regrouped = [min(end for begin, end in pairwise(record.times("update")) if begin >= killed) for record in survivors]
    told = [at - killed for at in known if at is not None]
    return {
        "median_s": median,
        "usual_longest_s": usual,
        "longest_s": longest,
        "beyond_s": longest - median - downtime - (SILENCE if phase == "silent" else 0.0),
        "detected_s": max(told, default=None),
        "regrouped_s": max(regrouped) - killed,
        "join_beyond_s": in_join - median,
        "newcomer_s": contributes - asked if victims else None,
        "transfer_s": _transfer(records, victims),
    }


def _transfer(records: Sequence[Record], victims: Sequence[int]) -> float:
    """Return how long the state of the newest newcomer was on its way."""
    newest = [record for record in records if record.pipeline in victims and record.rank == 0][-1:]
    return max((line["seconds"] for record in newest for line in record.lines if line["what"] == "received"), default=0)


def ratios(rows: Sequence[Row]) -> Ratios:
    """Return the ratios of what survivors noticed to its limit."""
    found: Ratios = {}
    cases: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if "left_out" in row:
            continue
        cases.setdefault((row["method"], row["role"], row["phase"]), []).append(row)
    for (method, role, phase), of_case in cases.items():
        measured = [row for row in of_case if "failed" not in row]
        if len(measured) < len(of_case):
            key = f"longest_step/{method}/{role}/{phase}"
            found[key] = ratio([float("inf")], 1.0, "a run did not go on: see its row")
            continue
        limit, allowed = LIMITS[phase], " and a step" if method in IN_STEP else ""
        found[f"longest_step/{method}/{role}/{phase}"] = ratio(
            [row["beyond_s"] / (limit + (row["median_s"] if allowed else 0.0)) for row in measured],
            1.0,
            f"seconds beyond a median step, over {limit:g} s{allowed}",
        )
    good = [row for row in rows if not {"failed", "left_out"} & row.keys() and row["newcomer_s"] is not None]
    for method in dict.fromkeys(row["method"] for row in good):
        of_method = [row for row in good if row["method"] == method]
        allowed = " and the transfer" if method in IN_STEP else ""
        found[f"longest_in_join/{method}"] = ratio(
            [row["join_beyond_s"] / (JOIN_LIMIT + (row["transfer_s"] if allowed else 0.0)) for row in of_method],
            1.0,
            f"survivors' longest step while another joins, beyond a median one, over {JOIN_LIMIT:g} s{allowed}",
        )
        found[f"newcomer/{method}"] = ratio(
            [row["newcomer_s"] / NEWCOMER_LIMIT for row in of_method],
            1.0,
            f"from the start of a forked process to its first update, over {NEWCOMER_LIMIT:g} s",
        )
    return found
