"""``sdpipe trace``: writes the newest updates of a live run's workers, for a trace viewer.

The file is JSON in the Trace Event Format, which ui.perfetto.dev and chrome://tracing show. A process is a pipeline and
a thread a stage. A thread has an ``X`` for each update, which contains those of its spans. Arrows lead from a forward
to the wait of the next stage, and from a backward to that of the previous stage. Exchanges beside the training overlap
with spans, so they are ``b`` and ``e``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from lightning_sdpipe import meter
from lightning_sdpipe.command_line import Parser, seconds
from lightning_sdpipe.errors import SchedulerError, check_number, os_errors_as
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client.wire import ask
from lightning_sdpipe.scheduler.rows import MOST_UPDATES, About, SpanChunk
from lightning_sdpipe.seeing.command import add_scheduler, scheduler_of
from lightning_sdpipe.seeing.spans import Clock, Clocks, Piece, Story, deliveries, paired, read, settle

FORMAT = "sdpipe-trace/1"

Event: TypeAlias = dict[str, Any]
_BEFORE_ITS_END = 0.001
"""Microseconds before its span's end at which an arrow begins or ends."""


def main(arguments: Sequence[str]) -> None:
    """Write the trace."""
    options = _parser().parse_args(arguments)
    check_number("--updates", options.updates, f"a number from 1, at most {MOST_UPDATES}", least=1, most=MOST_UPDATES)
    address, keys, _ = scheduler_of(options.address, options.key_file)
    question = m.Ask("spans", options.updates)
    reply = ask(question, m.SpansReply, address, credentials=keys, timeout=options.timeout)
    chunks = [msgspec.msgpack.decode(data, type=SpanChunk) for data in reply.chunks]
    for workers, what in (
        (reply.missing, "did not answer in time"),
        (reply.left_out, "had more to tell than one answer holds: ask for fewer --updates"),
    ):
        if workers:
            named = ", ".join(map(str, workers))
            print(f"sdpipe trace: not in the trace, since they {what}: workers {named}", file=sys.stderr)
    trace = to_trace(chunks, dict(reply.workers))
    updates = trace["otherData"]["updates"]
    if not updates:
        raise SchedulerError(f"no worker of the run at {address} has made an update yet that could be shown")
    with os_errors_as(f"{options.output} cannot be written"):
        options.output.write_text(json.dumps(trace, allow_nan=False))
    errors = trace["otherData"]["clock_error_us"].values()
    print(
        f"{options.output}: {updates} updates of {len(errors)} workers, whose clocks are known to {max(errors):.0f} µs"
        "; open it in ui.perfetto.dev or chrome://tracing"
    )


def _parser() -> Parser:
    parser = Parser("trace", "Writes a timeline of the newest updates of a run that trains, for ui.perfetto.dev.")
    add_scheduler(parser)
    parser.add_argument(
        "--updates",
        type=int,
        default=20,
        help=f"how many of each worker's newest updates to write, up to {MOST_UPDATES}",
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("trace.json"), help="file to write")
    parser.add_argument("--timeout", type=seconds, default=10.0, help="wait for an answer")
    return parser


def to_trace(chunks: Sequence[SpanChunk], about: dict[Worker, About]) -> dict[str, Any]:
    """Return the trace file's JSON object."""
    stories = [story for story in map(read, chunks) if story.updates]
    clocks = settle(deliveries(stories))
    begun = min((clocks.of[story.worker].ahead + begin for story in stories for begin in _begins(story)), default=0.0)
    of = {worker: Clock(clock.ahead - begun, clock.error) for worker, clock in clocks.of.items()}
    events: list[Event] = []
    for story in stories:
        events += _named(story.worker, about.get(story.worker))
        events += _spans(story, of[story.worker])
        events += _beside(story, of[story.worker])
    events += _arrows(stories, of)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": _facts(stories, clocks)}


def _begins(story: Story) -> Iterator[int]:
    yield story.updates[0].begin
    yield from (begin for begin, _ in story.hidden)


def _named(worker: Worker, about: About | None) -> list[Event]:
    """Return the events that give a viewer the worker's name and place."""
    pid, tid = worker.pipeline, worker.stage
    stage = f"stage {tid}" + ("" if about is None else f" (rank {about.rank}, {about})")
    return [
        {"ph": "M", "pid": pid, "tid": tid, "name": "process_name", "args": {"name": f"pipeline {pid}"}},
        {"ph": "M", "pid": pid, "tid": tid, "name": "process_sort_index", "args": {"sort_index": pid}},
        {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": stage}},
        {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}},
    ]


def _spans(story: Story, clock: Clock) -> Iterator[Event]:
    where = {"pid": story.worker.pipeline, "tid": story.worker.stage}
    for update in story.updates:
        length = update.end - update.begin
        times = {"ts": update.begin + clock.ahead, "dur": length}
        yield {"ph": "X", **where, "name": f"update {update.number}", "cat": "update", **times}
        for phase, begin, end in sorted(update.pieces, key=lambda piece: piece.begin):
            begin, end = max(begin, update.begin), min(end, update.end)
            name = meter.PHASES[phase]
            yield {"ph": "X", **where, "name": name, "cat": name, "ts": begin + clock.ahead, "dur": end - begin}


def _beside(story: Story, clock: Clock) -> Iterator[Event]:
    worker = story.worker
    for number, span in enumerate(story.hidden):
        for ph, at in zip("be", span, strict=True):
            yield {
                "ph": ph,
                "pid": worker.pipeline,
                "tid": worker.stage,
                "id": f"{worker.stage}.{worker.pipeline}.{number}",
                "name": "exchange beside training",
                "cat": "exchange",
                "ts": at + clock.ahead,
            }


def _arrows(stories: Sequence[Story], of: dict[Worker, Clock]) -> Iterator[Event]:
    for number, (source, sent, target, received) in enumerate(paired(stories)):
        if sent.piece is None or received.piece is None:
            continue
        name = "activations" if sent.lane % 2 == 0 else "gradients"
        stop = _within(received.piece, of[target.worker])
        start = min(stop, _within(sent.piece, of[source.worker]))
        for ph, story, at in (("s", source, start), ("f", target, stop)):
            where = {"pid": story.worker.pipeline, "tid": story.worker.stage}
            event = {"ph": ph, "id": number, **where, "name": name, "cat": "link", "ts": round(at, 3)}
            yield event | ({"bp": "e"} if ph == "f" else {})


def _within(piece: Piece, clock: Clock) -> float:
    return max(piece.begin, piece.end - _BEFORE_ITS_END) + clock.ahead


def _facts(stories: Sequence[Story], clocks: Clocks) -> dict[str, Any]:
    errors = {f"stage {w.stage} of pipeline {w.pipeline}": clock.error for w, clock in sorted(clocks.of.items())}
    return {
        "format": FORMAT,
        "updates": sum(len(story.updates) for story in stories),
        "clock_error_us": errors,
        "clock_slack_us": clocks.slack,
    }
