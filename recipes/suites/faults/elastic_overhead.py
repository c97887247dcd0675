"""Cost of letting pipelines come and go, where none does: an elastic run over an ordinary one."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hydra

from lightning_sdpipe.scheduler.server.process import reserve_port
from recipes.suites.faults.elastic_world import Record, Work, read_records, said, train, world
from recipes.suites.ratios import Ratios, Row, ratio, rotated

LONGEST = 300.0
GOALS = {"elastic": 0.98, "allreduce": 0.97}


def measure(
    *,
    num_pipelines: int,
    batch_seconds: float,
    num_parameters: int,
    batches: int,
    warm_up: int,
    repeats: int,
    methods: Mapping[str, Any],
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Samples per second of both, in rotated order; batches are dealt in both where the method allows it.

    Args:
        batches: of each pipeline, in one epoch.
        warm_up: the first updates, which do not count.
        repeats: of each kind.
        methods: specifications for Hydra, by the name of their ratio.
    """
    rows: list[Row] = []
    found: Ratios = {}
    for name, method in methods.items():
        sync = hydra.utils.instantiate(method)
        work = Work(1, num_pipelines, sync, batch_seconds, num_parameters, batches, seed=seed)
        quotients = []
        for repeat in range(repeats):
            rates = {}
            for kind in rotated(["elastic", "ordinary"], repeat):
                records = _elastic(work) if kind == "elastic" else _ordinary(work)
                rates[kind] = sum(_rate(record, warm_up) for record in records)
                processor = 1e3 * statistics.mean(_processor(record, warm_up) for record in records)
                print(f"{name}: {kind}, repeat {repeat}: {rates[kind]:.2f} batches per second", flush=True)
                row = {
                    "kind": kind,
                    "repeat": repeat,
                    "batches_per_s": rates[kind],
                    "processor_ms_per_batch": processor,
                }
                rows.append({"method": name, **row, "emulated": True})
            quotients.append(rates["elastic"] / rates["ordinary"])
        meaning = f"samples per second of an elastic run without faults over an ordinary one, 1 × {num_pipelines}"
        found[f"overhead/{name}"] = ratio(quotients, GOALS[name], meaning)
    return rows, found


def _rate(record: Record, warm_up: int) -> float:
    times = record.times("update")[warm_up:]
    return (len(times) - 1) / (times[-1] - times[0])


def _processor(record: Record, warm_up: int) -> float:
    """Seconds of processor time of a batch, in all threads of a worker: it tells more than the wall if all is busy."""
    seconds = [line["processor"] for line in record.lines if line["what"] == "update"][warm_up:]
    return float(seconds[-1] - seconds[0]) / (len(seconds) - 1)


def _elastic(work: Work) -> list[Record]:
    with tempfile.TemporaryDirectory() as directory, world(Path(directory), work) as it:
        it.start()
        pipelines = range(work.num_pipelines)
        it.wait(lambda: not any(map(it.lives, pipelines)), "the end of the run", LONGEST)
        if any(code for pipeline in pipelines for code in it.exit_codes(pipeline)):
            raise RuntimeError(f"an elastic run without faults failed: {it.said()}")
        return it.records()


def _ordinary(work: Work) -> list[Record]:
    count = work.num_stages * work.num_pipelines
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory, reserve_port() as port:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.getsockname()[1]), "WORLD_SIZE": str(count)}
        processes = [
            context.Process(
                target=train,
                args=(work, Path(directory), f"0001-{rank}-0", where | {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}),
            )
            for rank in range(count)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(LONGEST)
            if [process.exitcode for process in processes] != [0] * count:
                raise RuntimeError(f"an ordinary run failed: {said(Path(directory))}")
        finally:
            for process in processes:
                process.kill()
                process.join()
        return read_records(Path(directory))
