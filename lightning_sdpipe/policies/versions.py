"""Vectors of versions behind ``staleness=``: a bound on the age of what a model contains.

Nodes take steps and average: they are the pipelines of a stage, or groups of them. ``V_k[i]`` is the newest step of
node i that k's model contains, ``n_i = V_i[i]`` the number of steps that it has finished. When nodes meet, each has the
element-wise maximum of all their vectors. Node i may begin its next step if

    n_i + 1 - V_k[i] ≤ s    for every other node k that takes part;

else the k for which this does not hold are *behind* i, and i waits until it has met them. This is what PHD-PSGD §6
leaves as future work, with the bound of stale synchronous parallel (Ho et al. 2013) put on what a model contains
instead of on how far apart two workers are. It follows that

(a) n_i - V_k[i] ≤ s always, among nodes that take part without a break: i's number grows by 1 where the bound held
    before, and V never falls.
(b) Waiting for it ends. Node i waits only for nodes that compute, because it meets those that are ready at once; when
    all are ready, they can all meet, after which V_k[i] = n_i and no worker is behind another.
(c) It waits no longer than until each node behind it has finished the step that it was in.

V is a lower bound: the model contains at least that. A node that leaves keeps its vector, for it returns with its model
or a newer one. A node that was lost may have another's model by then, so it gets the minimum of its own vector and
those of the participants. When one is lost, its last meeting may have broken off, so every vector is taken to be as old
as the bound allows, and so after a restart of the scheduler. After any of this the bound may be exceeded until the next
boundary of the node that is ahead, where it waits.

The scheduler hears of every step anyway, so this costs O(nodes) per signal and no message.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class _Stepped:
    node: int


@dataclass(frozen=True)
class _Met:
    nodes: tuple[int, ...]
    computing: tuple[int, ...]


@dataclass(frozen=True)
class _Joined:
    node: int


@dataclass(frozen=True)
class _Left:
    node: int
    lost: bool


@dataclass(frozen=True)
class _Doubted:
    by: int


_Change = _Stepped | _Met | _Joined | _Left | _Doubted


class _State:
    """The vectors at one moment."""

    def __init__(self, size: int) -> None:
        self.active: set[int] = set()
        self.steps = [0] * size
        self.rows: list[list[int] | None] = [None] * size
        """Rows of the nodes that were ever seen."""
        self.arriving: dict[int, list[int]] = {}
        """The contents of the model of a computing node when it has finished its step."""
        self.lost: set[int] = set()
        self.doubt = 0
        """Largest age of nodes that are seen for the first time."""
        self._least: list[int] | None = None
        """Minimum of the active rows, while it is known: many nodes join one after the other."""

    def widen(self, size: int) -> None:
        more = size - len(self.steps)
        if more <= 0:
            return
        self.steps += [0] * more
        self.rows += [None] * more
        for row in (*self.rows, *self.arriving.values(), self._least):
            if row is not None:
                row += [0] * more

    def row(self, node: int) -> list[int]:
        row = self.rows[node]
        assert row is not None, f"node {node} has never taken part"
        return row

    def apply(self, change: _Change) -> None:
        match change:
            case _Stepped(node) if node not in self.arriving and len(self.active) > 1:
                pass  # another node's entry is the least in this column
            case _Joined(_):
                pass
            case _:
                self._least = None
        match change:
            case _Stepped(node):
                self.steps[node] += 1
                row = self.row(node)
                if node in self.arriving:
                    row[:] = map(max, row, self.arriving.pop(node))
                row[node] = self.steps[node]
            case _Met(nodes, computing):
                newest = self.merged([*nodes, *computing])
                for node in nodes:
                    self.row(node)[:] = newest
                for node in computing:
                    self.arriving[node] = list(map(max, newest, self.arriving.get(node, newest)))
            case _Joined(node):
                self._join(node)
            case _Left(node, lost):
                self.active.discard(node)
                self.arriving.pop(node, None)
                if lost:
                    self.lost.add(node)
            case _Doubted(by):
                self.doubt = by
                for node, own in enumerate(self.rows):
                    if own is not None:
                        own[:] = [n - by * (i != node) for i, n in enumerate(self.steps)]

    def merged(self, nodes: Iterable[int]) -> list[int]:
        return list(map(max, *rows)) if len(rows := [self.row(node) for node in nodes]) > 1 else list(rows[0])

    def _join(self, node: int) -> None:
        own = self.rows[node]
        if self._least is None and self.active:
            self._least = _least([self.row(other) for other in self.active])
        if own is None or node in self.lost:
            known = [row for row in (self._least, own) if row is not None]
            if self.doubt or not known:
                known.append([n - self.doubt for n in self.steps])
            own = _least(known)
            own[node] = self.steps[node]
        self._least = _least([own] if self._least is None else [self._least, own])
        self.rows[node] = own
        self.lost.discard(node)
        self.active.add(node)


def _least(rows: list[list[int]]) -> list[int]:
    return list(map(min, *rows)) if len(rows) > 1 else list(rows[0])


class Versions:
    """The vectors of ``size`` nodes; ``bound`` is s. With None only steps are counted: no node waits for another."""

    def __init__(self, size: int, bound: int | None) -> None:
        self.bound = bound
        self._now = _State(size)

    def widen(self, size: int) -> None:
        """Allow ``size`` nodes from now on."""
        self._now.widen(size)

    def joins(self, node: int) -> None:
        """Add ``node``, which takes part from now on."""
        self._change(_Joined(node))

    def leaves(self, node: int, lost: bool = False) -> None:
        """Remove ``node``, for which no worker waits any more; ``lost`` if it may come back with another model."""
        self._change(_Left(node, lost))

    def stepped(self, node: int) -> None:
        """Note that ``node`` has finished a step."""
        self._change(_Stepped(node))

    def met(self, nodes: Collection[int], computing: Collection[int] = ()) -> None:
        """Note that all of these averaged; nodes that were ``computing`` contain the average from the end of their
        step on."""
        self._change(_Met(tuple(nodes), tuple(computing)))

    def doubted(self) -> None:
        """Doubt all versions, since the past is not known: every model may be as old as the bound allows."""
        if self.bound is not None:
            self._change(_Doubted(self.bound))

    def behind(self, node: int, after: Collection[int] = ()) -> set[int]:
        """Return the nodes that ``node`` has to meet before its next step, once it has met all of ``after``."""
        if self.bound is None:
            return set()
        state, oldest = self._now, self._now.steps[node] + 1 - self.bound
        return {
            other for other in state.active if other != node and other not in after and state.row(other)[node] < oldest
        }

    def contained(self, node: int, of: int) -> int:
        """Return ``V_node[of]``."""
        return self._now.row(node)[of]

    def steps(self, node: int) -> int:
        """Return how many steps ``node`` has finished."""
        return self._now.steps[node]

    @property
    def lag(self) -> int:
        """Largest n_i - V_k[i] among the nodes that take part."""
        state = self._now
        return max((state.steps[i] - state.row(k)[i] for i in state.active for k in state.active), default=0)

    def _change(self, change: _Change) -> None:
        if self.bound is None:
            if isinstance(change, _Stepped):
                self._now.steps[change.node] += 1
            return
        self._now.apply(change)
