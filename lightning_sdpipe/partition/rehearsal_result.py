"""What a rehearsal of the user's steps says about cutting the chain: order, values that cross a cut, and refusals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from itertools import pairwise

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.backward_slice import Needs, Refusal, backward_slice
from lightning_sdpipe.partition.message import Travel
from lightning_sdpipe.partition.provenance import OUTSIDE, StepTrace
from lightning_sdpipe.partition.state_watch import METRIC, Change, Watched, metrics_of_log


@dataclass(frozen=True)
class Crossing:
    """The bytes of all values that cross a cut in one step of one micro-batch, forward and backward, and refusals of
    values that would have to cross but cannot."""

    activation_bytes: int
    gradient_bytes: int
    refusals: Sequence[Refusal]


@dataclass(frozen=True)
class RehearsalResult:
    """The traces of each step of a module; each step has traces of at least two micro-batches.

    Args:
        chain: paths of the blocks, in the order of their indices in the traces.
        traces: traces by the name of the step.
        weights: the blocks that hold each parameter and buffer.
        watched: the Python state of each step, if it was watched.
        lock_step: evaluation steps that no pipeline can run, with the number of calls of blocks that each made.
    """

    chain: Sequence[str]
    traces: Mapping[str, Sequence[StepTrace]]
    weights: Mapping[str, set[int]]
    watched: Mapping[str, Watched] = field(default_factory=dict)
    lock_step: Mapping[str, int] = field(default_factory=dict)
    _missed: dict[tuple[str, range], Change | None] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def repeated(self) -> set[int]:
        """Blocks that one step calls more than once."""
        orders = [trace.order for traces in self.traces.values() for trace in traces]
        return {block for order in orders for block in order if order.count(block) > 1}

    @cached_property
    def order(self) -> list[int]:
        """Blocks in the order in which they run; where that leaves a choice, in the order of the chain. A block that no
        step has run, perhaps by chance, stays beside its neighbour in the same ModuleList.

        Raises:
            ConfigurationError: the steps run them in different orders.
        """
        try:
            follows = in_one_order(trace.order for traces in self.traces.values() for trace in traces)
        except CycleError as error:
            circle = [self.chain[block] for block in error.args[1][:-1]]
            raise ConfigurationError(
                f"The blocks {circle} do not run in the same order in every step, and a pipeline needs one order. Name "
                "larger blocks with SDPipeStrategy(blocks=[...])."
            ) from error
        order: list[int] = []
        ready: list[int] = []
        while follows.is_active():
            for block in follows.get_ready():
                heappush(ready, block)
            order.append(heappop(ready))
            follows.done(order[-1])
        for block in range(len(self.chain)):
            if block not in order:
                order.insert(self._place(block, order), block)
        return order

    def _place(self, block: int, order: Sequence[int]) -> int:
        siblings = [other for other in order if _list_of(self.chain[other]) == _list_of(self.chain[block])]
        earlier = [other for other in siblings if other < block]
        if siblings and not earlier:
            return order.index(min(siblings))
        before = max(earlier, default=block - 1)
        return 0 if before < 0 else order.index(before) + 1

    def crossing(self, step: str, cut: int) -> Crossing:
        """Return what crosses the cut before block ``cut``, wherever else the chain is cut."""
        found = self._needs(step, range(cut, len(self.chain)))
        size = {key: size for trace in self.traces[step] for key, size in trace.sizes.items()}
        output = {key for key in size if key.block == cut - 1 and key.kind == "output"}
        extra = [leaves for leaves in found.values if not output.intersection(leaves)]
        sizes = [size[key] for key in (*output, *(next(key for key in leaves if key in size) for leaves in extra))]
        return Crossing(sum(a for a, _ in sizes), sum(g for _, g in sizes), found.refusals)

    def travel(self, step: str, spans: Sequence[range]) -> Travel:
        """Return the values that cross each cut of ``spans``.

        Raises:
            ConfigurationError: a stage needs a value that it cannot get.
        """
        logged = [each for trace in self.traces[step] for each in trace.logged]
        self._refuse_logging(step, logged, spans[-1].start)
        by_stage = [self._needs(step, span) for span in spans]
        for refusal in (refusal for found in by_stage for refusal in found.refusals):
            raise ConfigurationError(self._explain(refusal, step))
        crossing = {
            span.start: tuple(
                dict.fromkeys(
                    leaves
                    for found in by_stage[stage:]
                    for leaves in found.values
                    if any(key.block < span.start for key in leaves)
                )
            )
            for stage, span in enumerate(spans)
            if stage
        }
        changed = frozenset(key for trace in self.traces[step] for key in trace.changed)
        watched = self.watched.get(step)
        late = set() if watched is None else watched.late(spans[0].stop)
        counted = set() if watched is None else watched.counted(spans[-1].start)
        beyond = (name for name, block, at in logged if (at if block == OUTSIDE else block) >= spans[0].stop)
        metrics = {metric for name in beyond for metric in metrics_of_log(name)}
        return Travel(crossing, changed, *(tuple(sorted(names)) for names in (late, counted, metrics)))

    def _refuse_logging(self, step: str, logged: Sequence[tuple[str, int, int]], last: int) -> None:
        """Refuse logging in a block before ``last``, where the last stage begins: only the block's stage would know of
        it, and rank 0 has the last stage."""
        for name, block, _ in logged:
            if 0 <= block < last:
                raise ConfigurationError(
                    f"In {step}, block {self.chain[block]!r} logs {METRIC}{name!r}, and rank 0, which has the last "
                    "stage, would not know of it. Let the block return the value, or keep it in an attribute of its "
                    "own, and log it in the step after the block."
                )

    def readers(self, spans: Sequence[range]) -> dict[str, set[int]]:
        """Return the stages that read a parameter or buffer of another stage's block."""
        readers: dict[str, set[int]] = {}
        for step in self.traces:
            for stage, span in enumerate(spans):
                for name in self._needs(step, span).weights:
                    holders = self.weights[name]
                    if holders and not holders.intersection(span):
                        readers.setdefault(name, set()).add(stage)
        return readers

    def _needs(self, step: str, span: range) -> Needs:
        """Return what the stage needs in any of the traces except the first, before which nothing was kept."""
        traces, together = self.traces[step], Needs()
        for number in range(1, len(traces)):
            found = backward_slice(traces[: number + 1], span, span.stop == len(self.chain))
            together.values.update(found.values)
            together.weights.update(found.weights)
            together.refusals += found.refusals
        if step in self.watched:
            if (step, span) not in self._missed:
                self._missed[step, span] = self.watched[step].missed(span)
            if (change := self._missed[step, span]) is not None:
                together.refusals.append(Refusal(change.block, change.name, "user code that reads it", python=True))
        return together

    def _explain(self, refusal: Refusal, step: str) -> str:
        if refusal.python:
            where = "after the end" if refusal.block == OUTSIDE else f"in block {self.chain[refusal.block]!r}, outside"
            return (
                f"{step} changes {refusal.made_by} {where} of a stage that reads it, in this micro-batch or the next: "
                "stages run micro-batches at the same time, and what Python keeps does not travel between them. Change "
                "and read it on one stage, with partition=[...] or blocks=[...]; change it in on_train_batch_end from "
                "what all stages have (outputs['loss'], trainer.global_step); or draw from the generators of torch, "
                "NumPy and random themselves, which have a stream for each micro-batch and block."
            )
        if refusal.block == OUTSIDE:
            return (
                f"{step} keeps a value from one batch to the next. It is set ({refusal.made_by}) after the end of a "
                f"stage that needs it ({refusal.needed_by}). Let the block that needs it keep it in an attribute of "
                "its own, or keep both places on one stage with partition=[...]."
            )
        kept = ", keeps it until the next batch" if refusal.from_earlier_step else ""
        return (
            f"In {step}, block {self.chain[refusal.block]!r} makes a value ({refusal.made_by}){kept} and does not hand "
            f"it on, but {refusal.needed_by} needs it on a later stage. Let the block return it, or keep it in an "
            "attribute of its own; or keep both places on one stage with partition=[...], or name one larger block "
            "that holds them with blocks=[...]."
        )


def in_one_order(orders: Iterable[Iterable[int]]) -> TopologicalSorter[int]:
    """Return a sorter of the blocks that ran in these ``orders``.

    Raises:
        CycleError: the orders contradict each other.
    """
    follows: TopologicalSorter[int] = TopologicalSorter()
    for order in orders:
        ran = list(dict.fromkeys(order))
        for block in ran:
            follows.add(block)
        for before, after in pairwise(ran):
            follows.add(after, before)
    follows.prepare()
    return follows


def _list_of(path: str) -> str:
    """Return the ModuleList or Sequential that holds a module; the module itself if it is in none."""
    parent, _, name = path.rpartition(".")
    return parent if name.isdecimal() else path
