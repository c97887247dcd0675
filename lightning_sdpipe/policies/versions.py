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
(b) Every wait for it ends. Node i waits only for nodes that compute, because it meets those that are ready at once;
    when all are ready, they can all meet, after which V_k[i] = n_i and no worker is behind another.
(c) Node i waits only until each node behind it has finished its current step.

V is a lower bound: the model contains at least that. A node that leaves keeps its vector, for it returns with its model
or a newer one. A node that was lost may return with another's model, so it gets the minimum of its own vector and those
of the participants. Its last meeting may have broken off, so after a loss, as after a restart of the scheduler, every
vector is taken to be as old as the bound allows. After any of this the bound may be exceeded until the next boundary of
the node that is ahead, where it waits.

The scheduler hears of every step anyway, so this costs O(nodes) per signal and no message.
"""

from __future__ import annotations

from collections.abc import Collection


class Versions:
    """The vectors of ``size`` nodes; ``bound`` is s. With None only steps are counted: no node waits for another."""

    def __init__(self, size: int, bound: int | None) -> None:
        self.bound = bound
        self._active: set[int] = set()
        self._steps = [0] * size
        self._rows: list[list[int] | None] = [None] * size
        """Rows V_k of the nodes seen so far."""
        self._arriving: dict[int, list[int]] = {}
        """What the model of a computing node will contain when it has finished its step."""
        self._lost: set[int] = set()
        self._doubt = 0
        """Age that is assumed of nodes seen for the first time."""
        self._least: list[int] | None = None
        """Minimum of the active rows, while it is known: kept, since many nodes join in a row."""

    def joins(self, node: int) -> None:
        """Add ``node``, which takes part from now on."""
        if self.bound is None:
            return
        own = self._rows[node]
        if self._least is None and self._active:
            self._least = _least([self._row(other) for other in self._active])
        if own is None or node in self._lost:
            known = [row for row in (self._least, own) if row is not None]
            if self._doubt or not known:
                known.append([n - self._doubt for n in self._steps])
            own = _least(known)
            own[node] = self._steps[node]
        self._least = _least([own] if self._least is None else [self._least, own])
        self._rows[node] = own
        self._lost.discard(node)
        self._active.add(node)

    def leaves(self, node: int, lost: bool = False) -> None:
        """Remove ``node``, so that no worker waits for it; ``lost`` if it may come back with another model."""
        if self.bound is None:
            return
        self._least = None
        self._active.discard(node)
        self._arriving.pop(node, None)
        if lost:
            self._lost.add(node)

    def stepped(self, node: int) -> None:
        """Note that ``node`` has finished a step."""
        self._steps[node] += 1
        if self.bound is None:
            return
        row, arriving = self._row(node), self._arriving.pop(node, None)
        if arriving is not None:
            row[:] = map(max, row, arriving)
        if arriving is not None or len(self._active) <= 1:  # else another node's entry is the least in this column
            self._least = None
        row[node] = self._steps[node]

    def met(self, nodes: Collection[int], computing: Collection[int] = ()) -> None:
        """Note that all of these averaged; nodes that were ``computing`` contain the average from the end of their
        step on."""
        if self.bound is None:
            return
        self._least = None
        newest = list(map(max, zip(*(self._row(node) for node in (*nodes, *computing)), strict=True)))
        for node in nodes:
            self._row(node)[:] = newest
        for node in computing:
            self._arriving[node] = list(map(max, newest, self._arriving.get(node, newest)))

    def doubted(self) -> None:
        """Doubt all versions, since the past is not known: every model may be as old as the bound allows."""
        if self.bound is None:
            return
        self._least, self._doubt = None, self.bound
        for node, own in enumerate(self._rows):
            if own is not None:
                own[:] = [n - self.bound * (i != node) for i, n in enumerate(self._steps)]

    def behind(self, node: int, after: Collection[int] = ()) -> set[int]:
        """Return the nodes that ``node`` has to meet before its next step, once it has met all of ``after``."""
        if self.bound is None:
            return set()
        oldest = self._steps[node] + 1 - self.bound
        return {
            other for other in self._active if other != node and other not in after and self._row(other)[node] < oldest
        }

    def contained(self, node: int, of: int) -> int:
        """Return ``V_node[of]``."""
        return self._row(node)[of]

    def steps(self, node: int) -> int:
        """Return how many steps ``node`` has finished."""
        return self._steps[node]

    @property
    def lag(self) -> int:
        """Largest n_i - V_k[i] among the nodes that take part."""
        return max((self._steps[i] - self._row(k)[i] for i in self._active for k in self._active), default=0)

    def _row(self, node: int) -> list[int]:
        row = self._rows[node]
        assert row is not None, f"node {node} has never taken part"
        return row


def _least(rows: list[list[int]]) -> list[int]:
    return list(map(min, *rows)) if len(rows) > 1 else list(rows[0])
