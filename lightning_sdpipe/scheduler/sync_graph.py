"""The sync-graph of one stage: who met whom in the last P rounds (SDPipe §3.3).

Nodes are the stage's active workers; the members of a group are pairwise joined by edges. Time is counted in
rounds: a round ends when as many ready signals have been answered as the stage has active workers, and a
group belongs to the round in which it goes out. An edge counts in its own round and the P - 1 that follow.

What is promised, exactly: after any sequence of calls, two active workers are in the same component if and
only if a chain of active workers joins them in which each met the next in the last P rounds, the current one
included. ``record`` and ``component`` take expected O(log N) elementary steps per worker, amortised over a
run; a worker that joins or leaves costs one pass over the newest groups of the window, at the next question.

How. Workers hang in a forest whose links carry the round in which they were made, newest at the bottom; it is
kept such that climbing the links newer than round r from any worker ends at the same root exactly for those
that are connected by edges newer than r (a maximum spanning forest by recency, kept shallow by fixed ranks
in no order: a parent always outranks its child). A new edge displaces the oldest link of the cycle it closes.
Counting the links per round tells how many components are left once a round expires, without visiting them.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lightning_sdpipe.scheduler.mixing import mean_mixing_matrix, mixing_radius

if TYPE_CHECKING:
    import networkx as nx


class RecencyForest:
    """Connectivity of a graph whose edges only ever expire oldest first."""

    def __init__(self, size: int, expired: int = -1) -> None:
        self._parent = list(range(size))
        self._round = [0] * size
        # Any fixed order without structure serves: Fibonacci hashing of the index.
        self._rank = [(i * 0x9E3779B97F4A7C15 & (1 << 64) - 1, i) for i in range(size)]
        self._links_made_in: dict[int, int] = {}
        self._expired = expired
        self.links = 0

    def expire(self, round_: int) -> None:
        """Edges made in ``round_`` or before count no longer."""
        for made in range(self._expired + 1, round_ + 1):
            self.links -= self._links_made_in.pop(made, 0)
        self._expired = max(self._expired, round_)

    def root(self, node: int) -> int:
        """The representative of ``node``'s component."""
        parent, made, expired = self._parent, self._round, self._expired
        while parent[node] != node and made[node] > expired:
            node = parent[node]
        return node

    def link(self, u: int, v: int, round_: int) -> None:
        """Add an edge made in ``round_``."""
        parent, made, rank, counts = self._parent, self._round, self._rank, self._links_made_in
        while True:
            while parent[u] != u and made[u] >= round_:
                u = parent[u]
            while parent[v] != v and made[v] >= round_:
                v = parent[v]
            if u == v:
                return  # connected by newer edges already: this one can never matter
            if rank[u] > rank[v]:
                u, v = v, u
            grandparent, displaced = parent[u], made[u]
            parent[u], made[u] = v, round_
            counts[round_] = counts.get(round_, 0) + 1
            self.links += 1
            if grandparent == u or displaced <= self._expired:
                return
            counts[displaced] -= 1
            self.links -= 1
            v, round_ = grandparent, displaced


class SyncGraph:
    """The groups of the last ``rounds`` rounds of one stage, as connectivity over its active workers."""

    def __init__(self, num_workers: int, rounds: int) -> None:
        self.rounds = rounds
        self.round = 0
        self.active: set[int] = set()
        self._num_workers = num_workers
        self._known: set[int] = set()
        self._history: deque[tuple[int, list[int]]] = deque()
        """Round and members of every group of the window, oldest first, and of first joins."""
        self._first_joins: list[list[int]] = []
        self._first_joined: list[int] | None = None
        self._signals = 0
        self._forest = RecencyForest(num_workers, -rounds)
        self._forest_is_stale = False

    def join(self, worker: int) -> None:
        """``worker`` is a node from now on, with the edges it had if it was one before.

        Workers enter a run with equal models, as if they had just met, so a worker that was never seen counts
        as having met one active worker (all that join before the first group: each other) in the round before
        this one. So the first window that must be connected is the first whole one (Assumption 1 of §3.3).
        """
        if worker not in self._known:
            self._known.add(worker)
            if self._first_joined is None or not self.active:
                self._first_joined = [min(self.active)] if self.active else []
                self._insert(self.round - 1, self._first_joined)
                self._first_joins.append(self._first_joined)
            self._first_joined.append(worker)
        self.active.add(worker)
        self._forest_is_stale = True

    def leave(self, worker: int) -> None:
        """``worker`` is no node any more; chains through it are broken."""
        self.active.remove(worker)
        self._signals = min(self._signals, max(0, len(self.active) - 1))
        self._forest_is_stale = True

    def record(self, groups: Iterable[Sequence[int]]) -> None:
        """Groups of active workers went out together."""
        self._refresh()
        self._first_joined = None
        for members in groups:
            self._history.append((self.round, list(members)))
            self._add_edges(members, self.round)
            self._signals += len(members)
        while self._signals >= len(self.active):
            self._signals -= len(self.active)
            self.round += 1
        expired = self.round - self.rounds
        self._forest.expire(expired)
        while self._history and self._history[0][0] <= expired:
            _, forgotten = self._history.popleft()
            if self._first_joins and forgotten is self._first_joins[0]:
                del self._first_joins[0]

    @property
    def components(self) -> int:
        """Number of connected components among the active workers."""
        self._refresh()
        return len(self.active) - self._forest.links

    def component(self, worker: int) -> int:
        """A name for the component of ``worker``, valid until the next change."""
        self._refresh()
        return self._forest.root(worker)

    def groups(self) -> list[tuple[int, tuple[int, ...]]]:
        """Round and members of the groups of the last P rounds, oldest first; first joins are no groups."""
        expired = self.round - self.rounds
        return [
            (round_, tuple(sorted(members)))
            for round_, members in self._history
            if round_ > expired and not any(members is entry for entry in self._first_joins)
        ]

    def connected_components(self) -> list[set[int]]:
        """The active workers by component, largest first."""
        by_root: dict[int, set[int]] = {}
        for worker in sorted(self.active):
            by_root.setdefault(self.component(worker), set()).add(worker)
        return sorted(by_root.values(), key=lambda component: (-len(component), min(component)))

    def rounds_since_met(self) -> dict[tuple[int, int], int]:
        """For each pair that was in one group in the last P rounds: how many rounds ago, 0 for this one."""
        met: dict[tuple[int, int], int] = {}
        for round_, members in self.groups():
            for pair in itertools.combinations(members, 2):
                met[pair] = self.round - round_
        return met

    def spectral_radius(self) -> float:
        """ρ of P-Reduce's theorem 1 for the groups of the last P rounds; the spectral gap is 1 - ρ.

        0 when every group is everybody; 1 when nothing mixes (or nothing has happened yet).
        """
        workers = sorted(self.active)
        return mixing_radius(mean_mixing_matrix([group for _, group in self.groups()], workers))

    def to_networkx(self) -> nx.Graph:
        """Nodes are the active workers; an edge has ``round``, when the two met last, and ``count``, how often."""
        import networkx as nx  # only those who look need it, and it is slow to import

        graph = nx.Graph(round=self.round, rounds=self.rounds)
        graph.add_nodes_from(sorted(self.active))
        for round_, members in self.groups():
            present = [worker for worker in members if worker in self.active]
            for u, v in itertools.combinations(present, 2):
                count = graph.edges[u, v]["count"] if graph.has_edge(u, v) else 0
                graph.add_edge(u, v, round=round_, count=count + 1)
        return graph

    def _insert(self, round_: int, members: list[int]) -> None:
        """Put an entry into the history, which stays ordered by round."""
        place = len(self._history)
        while place > 0 and self._history[place - 1][0] > round_:
            place -= 1
        self._history.insert(place, (round_, members))

    def _add_edges(self, members: Sequence[int], round_: int) -> None:
        link, first = self._forest.link, members[0]
        for other in members[1:]:
            link(first, other, round_)

    def _refresh(self) -> None:
        """Rebuild the forest for the current nodes, newest groups first, until nothing can be added."""
        if not self._forest_is_stale:
            return
        expired = self.round - self.rounds
        self._forest = RecencyForest(self._num_workers, expired)
        for round_, members in reversed(self._history):
            if round_ <= expired or self._forest.links >= len(self.active) - 1:
                break
            present = [worker for worker in members if worker in self.active]
            if len(present) > 1:
                self._add_edges(present, round_)
        self._forest_is_stale = False
