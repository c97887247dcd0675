"""Backward slices of traced steps: the values that have to travel to a stage, and those that cannot.

The traces of :class:`~lightning_sdpipe.partition.provenance.ProvenanceTracer` are read backwards. A stage needs the
values that its blocks read, the values that user code between blocks up to the end of the stage turns into Python
values, and, on the last stage, those that the step returns, logs and keeps. Every stage runs the user code between
blocks itself, so a value made there needs its operands. A value made in an earlier stage's block must be one that the
block hands on: a leaf of its effects. A value that is written into a tensor on this stage is needed, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_sdpipe.partition.message import LeafKey
from lightning_sdpipe.partition.provenance import OUTSIDE, Gradient, StepTrace, Storage, TensorKey, Use, Value, Write

Leaves = tuple[LeafKey, ...]
_HANDED_ON = ("output", "extend", "update", "replace")


@dataclass(frozen=True)
class Refusal:
    """A value that a stage needs and cannot get."""

    block: int  # the block that made it; OUTSIDE for user code between blocks
    made_by: str
    needed_by: str
    from_earlier_step: bool = False
    python: bool = False  # whether it is a Python value rather than a tensor


@dataclass
class Needs:
    """The needs of a stage: values from earlier stages' blocks, each given by all leaves that hand it on, with their
    use; weights that the stage reads; and values that it cannot get."""

    values: dict[Leaves, str] = field(default_factory=dict)
    weights: set[str] = field(default_factory=set)
    refusals: list[Refusal] = field(default_factory=list)


def backward_slice(traces: Sequence[StepTrace], span: range, last: bool) -> Needs:
    """Return what the stage with the blocks ``span`` needs for the last step in ``traces``; the steps run in order."""
    return _Search(traces, span, last).found


class _Search:
    def __init__(self, traces: Sequence[StepTrace], span: range, last: bool) -> None:
        self.found = Needs()
        self._traces = traces
        self._span = span
        self._last = last
        self._seen: set[Value] = set()
        self._leaves = [_leaves_by_storage(trace) for trace in traces]
        trace = traces[-1]
        for block in span:
            for values, operation in trace.reads.get(block, ()):
                self._need(values, operation)
        for use in trace.python_reads:
            if last or use.position < span.stop:
                self._need(use.values, f"user code between blocks ({use.what})")
        if last:
            for use in trace.results:
                self._need(use.values, use.what)
        writes = [use for use in trace.writes if last or use.position < span.stop]
        found = -1
        while found < len(self.found.values):
            found = len(self.found.values)
            for use in writes:
                self._write(use)

    def _need(self, values: Sequence[Value], use: str) -> None:
        todo = list(values)
        while todo:
            value = todo.pop()
            if value not in self._seen:
                self._seen.add(value)
                todo += self._resolve(value, use)

    def _resolve(self, value: Value, use: str) -> Sequence[Value]:
        """Note where ``value`` comes from, and return the other values that it depends on."""
        write, now = value.write, len(self._traces) - 1
        if write.step < now and not self._last and self._kept_too_late(value):
            self.found.refusals.append(Refusal(OUTSIDE, write.name, use, from_earlier_step=True))
            return ()
        if write.origin == "weight":
            self.found.weights.add(write.name)
        elif write.origin == "operation" and write.block == OUTSIDE:
            self._passed_on(value, use)
            if write.step < now and not self._last and write.position >= self._span.stop:
                self.found.refusals.append(Refusal(OUTSIDE, write.name, use, from_earlier_step=True))
            else:
                return write.reads
        elif write.origin == "given":
            self._passed_on(value, use)
        elif not (write.origin == "unseen" and write.step < now):  # else a constant
            self._made_in_a_block(value, write, use, write.step < now)
        return ()

    def _kept_too_late(self, value: Value) -> bool:
        """Return whether only user code beyond the end of this stage kept the value for the next step."""
        kept = self._traces[value.write.step].kept
        if not kept or value.storage not in kept[max(kept)]:
            return False
        reached = [position for position in kept if position <= self._span.stop]
        return bool(reached) and value.storage not in kept[max(reached)]

    def _write(self, use: Use) -> None:
        """Note the need for values that are written into a tensor that this stage has."""
        target, *others = use.values
        if self._is_here(target):
            missing = [value for value in others if not self._is_here(value)]
            self._need(missing, f"user code between blocks ({use.what})")

    def _is_here(self, value: Value) -> bool:
        """Return whether this stage has the value, given the values found to travel so far."""
        todo, done = [value], set[Value]()
        while todo:
            value = todo.pop()
            if value in done:
                continue
            done.add(value)
            write = value.write
            if write.origin != "operation":
                continue
            if write.block == OUTSIDE:
                todo += write.reads
            elif write.block < self._span.start:
                leaves = self._handed_on(value, write)
                boundary = any(key.block == self._span.start - 1 and key.kind == "output" for key in leaves)
                if not boundary and leaves not in self.found.values:
                    return False
        return True

    def _passed_on(self, value: Value, use: str) -> None:
        """Note where earlier blocks return a value that user code gave them, or put it into a container: its reader may
        have got it from there."""
        leaves = [
            key
            for key, leaf in self._leaves[-1].get(value.storage, ())
            if leaf == value and key.kind in _HANDED_ON and key.block < self._span.start
        ]
        if leaves:
            self.found.values.setdefault(self._as_of_now(leaves), use)

    def _made_in_a_block(self, value: Value, write: Write, use: str, earlier_step: bool) -> None:
        if write.block in self._span or (self._last and write.block >= self._span.start):
            return
        leaves = self._handed_on(value, write) if write.block < self._span.start else ()
        if leaves:
            self.found.values.setdefault(leaves, use)
        else:
            self.found.refusals.append(Refusal(write.block, write.name, use, earlier_step))

    def _handed_on(self, value: Value, write: Write) -> Leaves:
        """Return all leaves by which blocks before this stage hand on the value, or else its base, if the view was not
        taken in those blocks."""
        candidates = [
            (key, leaf) for key, leaf in self._leaves[write.step].get(value.storage, ()) if leaf.write is write
        ]
        todo, done = [(value.place, value.gradient)], set[tuple[TensorKey, Gradient]]()
        while todo:
            here = todo.pop()
            if here in done:
                continue
            done.add(here)
            place, gradient = here
            same = [
                key
                for key, leaf in candidates
                if leaf.place == place and (leaf.gradient == gradient or (leaf.gradient is None and _is_leaf(gradient)))
            ]
            if any(key.block < self._span.start for key in same):
                return self._as_of_now(same)
            todo += (
                (place, gradient)
                for block, place, gradient in value.storage.aliases.get(place, ())
                if block == OUTSIDE or block >= self._span.start
            )
        return ()

    def _as_of_now(self, leaves: Sequence[LeafKey]) -> Leaves:
        """Return these leaves with all others that hold the same value in the last trace."""
        trace = self._traces[-1]
        now = {trace.leaves[key] for key in leaves if key in trace.leaves}
        every = {*leaves, *(key for key, value in trace.leaves.items() if value in now)}
        return tuple(sorted(every, key=lambda key: (key.block, repr(key))))


def _leaves_by_storage(trace: StepTrace) -> dict[Storage, list[tuple[LeafKey, Value]]]:
    found: dict[Storage, list[tuple[LeafKey, Value]]] = {}
    for key, value in trace.leaves.items():
        found.setdefault(value.storage, []).append((key, value))
    return found


def _is_leaf(gradient: Gradient) -> bool:
    """Return whether user code has made the value require a gradient."""
    return gradient is not None and gradient[0] == "leaf"
