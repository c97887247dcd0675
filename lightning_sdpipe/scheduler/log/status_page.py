"""The status of a run as a page of text, and as plain values for machines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from lightning_sdpipe.policies.sync_graph import network_error
from lightning_sdpipe.scheduler.log.status import StageStatus, Status, WorkerStatus

PAIRS_UP_TO = 16
"""Most pipelines for which the page has a table of the rounds since each pair met."""
PAIRS_IN_JSON_UP_TO = 64


def to_plain(status: Status) -> dict[str, object]:
    """Return the status as plain values for JSON, with what follows from it."""
    plain: dict[str, object] = msgspec.to_builtins(status, str_keys=True)
    plain["policy"] = json.loads(status.policy)
    plain["workers"] = msgspec.to_builtins(status.workers())
    plain["stages"] = [_stage_to_plain(stage) for stage in status.stages]
    return plain


def _stage_to_plain(stage: StageStatus) -> dict[str, object]:
    rho = _rho(stage)
    plain: dict[str, object] = {
        "round": stage.round,
        "since": stage.since,
        "components": [sorted(component) for component in stage.components()],
        "rounds_since_connected": stage.rounds_since_connected(),
        "rho": rho,
        "largest_learning_rate": None if rho is None else stage.largest_learning_rate(rho),
        "groups": [
            {
                "number": row.number,
                "round": row.round,
                "pipelines": row.pipelines,
                "reason": row.reason,
                "weights": row.weights or None,
            }
            for row in stage.groups
            if row.number >= 0
        ],
    }
    if len(stage.states) <= PAIRS_IN_JSON_UP_TO:
        plain["rounds_since_met"] = [[a, b, ago] for (a, b), ago in sorted(stage.rounds_since_met().items())]
    return plain


def render(status: Status) -> str:
    """Return the page: a row per pipeline and a column per stage, then the groups and the sync-graph."""
    rows = status.workers()
    lines = _table(status, rows) if rows else ["no worker has joined yet"]
    lines += [
        "",
        f"policy          {policy_of(json.loads(status.policy))}",
        f"signals         {status.signals} ({status.signals_per_second:.1f}/s), up for {status.uptime:.0f} s",
        f"groups by size  {_counts(status.groups_by_size)}",
        f"by reason       {_counts(status.groups_by_reason)}",
        f"ignored         {_counts(status.refused)}",
    ]
    if status.members is not None:
        members = status.members
        lines.append(f"members         epoch {members.epoch}: {members.reason}")
        lines.append(f"                {', '.join(f'{i} {state}' for i, state in members.states.items()) or 'none'}")
        if members.held:
            lines.append(f"waiting         {members.held}")
    if status.held:
        lines.append(f"held            {status.held} readies, until all workers have come back")
    if status.failure is not None:
        lines.append(f"FAILED          {status.failure}")
    for number, stage in enumerate(status.stages[:1] if status.depths else status.stages):
        if len(stage.active()) > 1 and any(group.number >= 0 for group in stage.groups):
            lines += ["", *_sync_graph(number, stage, status)]
    return "\n".join(lines)


def policy_of(plain: Mapping[str, Any]) -> str:
    """Return a policy's plain values in words."""
    values = ", ".join(f"{name} {value}" for name, value in plain.items() if name != "type")
    return f"{plain['type']}{': ' if values else ''}{values}"


def _table(status: Status, rows: list[WorkerStatus]) -> list[str]:
    cells = {(row.stage, row.pipeline): _cell(row, status.stages[0 if status.depths else row.stage]) for row in rows}
    pipelines = sorted({row.pipeline for row in rows})
    stages = range(len(status.stages))
    return aligned(
        [["pipeline", *(f"stage {stage}" for stage in stages)]]
        + [[str(i), *(cells.get((stage, i), "") for stage in stages)] for i in pipelines]
    )


def _cell(row: WorkerStatus, stage: StageStatus) -> str:
    text = row.state
    if row.iteration is not None:
        text += f" {row.iteration}"
    if row.staleness:
        text += f" (-{row.staleness})"
    group = next((group for group in reversed(stage.groups) if group.number == row.last_group), None)
    if group is not None:
        text += f" {{{','.join(str(pipeline) for pipeline in group.pipelines[:8])}"
        text += ",…}" if len(group.pipelines) > 8 else "}"
    if row.step_seconds is not None and row.waiting_seconds is not None:
        text += f" {row.step_seconds:.3g}s/{row.waiting_seconds:.2g}s"
    return text


def _sync_graph(number: int, stage: StageStatus, status: Status) -> list[str]:
    unit = status.looks_back[1]
    within = stage.rounds_since_connected()
    if within is None:
        parts = stage.components()
        shown = " ".join(
            f"{{{','.join(map(str, sorted(part)[:8]))}{',…' if len(part) > 8 else ''}}}" for part in parts[:8]
        )
        connected = f"{len(parts)} components: {shown}{' …' if len(parts) > 8 else ''}"
    else:
        connected = f"connected by the last {within + 1} of them"
    rho, of = _rho(stage), "the pipelines" if status.depths else f"stage {number}"
    lines = [
        f"sync-graph of {of} in the last {stage.round - stage.since + 1} {unit}: {connected}; "
        + (f"ρ {rho:.3f}" if rho is not None else "ρ needs numpy")
    ]
    rate = None if rho is None else stage.largest_learning_rate(rho)
    if rho is not None and rate is not None:
        error = network_error(rho)
        lines.append(f"  P-Reduce's theorem 1: ρ̄ {error:.3g}, for learning rates up to {rate:.3g} where L = 1")
    pipelines, met = stage.active(), stage.rounds_since_met()
    if len(pipelines) <= PAIRS_UP_TO:
        header = [f"{unit} since", *map(str, pipelines[:-1])]
        pairs = [[str(b), *(str(met.get((a, b), "-")) for a in pipelines if a < b)] for b in pipelines[1:]]
        lines += [f"  {line}" for line in aligned([header, *pairs])]
    else:
        possible = len(pipelines) * (len(pipelines) - 1) // 2
        present = set(pipelines)
        lines.append(f"  {sum(a in present and b in present for a, b in met)} of {possible} pairs met")
    return lines


def _rho(stage: StageStatus) -> float | None:
    try:
        return stage.rho()
    except ImportError:
        return None


def aligned(table: list[list[str]]) -> list[str]:
    """Return lines with the columns of ``table`` below each other."""
    width = len(table[0])
    widths = [max(len(row[column]) for row in table if column < len(row)) for column in range(width)]
    return ["  ".join(text.ljust(size) for text, size in zip(row, widths, strict=False)).rstrip() for row in table]


def _counts(counts: dict[int, int] | dict[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items()) or "none"
