"""The sync-graph of one stage: the workers that met in the last P rounds (SDPipe §3.3).

Nodes are the stage's active workers; the members of a group are pairwise joined by edges. Time is counted in
rounds: a round ends when as many ready signals have been answered as the stage has active workers (as the paper's
artefact counts), and a group belongs to the round in which it goes out. An edge counts in its own round and the P - 1
that follow. In the unit of the paper's text, ``"groups"``, each group is a round of its own; groups that go out
together count as one. The edges of a group that broke do not count.

Guarantee: after any sequence of calls, two active workers are in the same component if and only if a chain of active
workers joins them in which each met the next in the last P rounds, the current one included. ``record`` and
``component`` take expected O(log N) elementary steps per worker, amortised over a run; a worker that joins and a group
that broke cost one pass over the newest groups of the window, at the next question. So does the first worker that
leaves; later ones cost little (``thinning.py``).

Algorithm: workers hang in a forest whose links carry the round in which they were made, newest at the bottom; it is
kept such that climbing the links newer than round r from any worker ends at the same root exactly for those that are
connected by edges newer than r (a maximum spanning forest by recency, kept shallow by fixed ranks in no order: a parent
always outranks its child). A new edge displaces the oldest link of the cycle it closes. Counting the links per round
tells how many components are left once a round expires, without visiting them.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.policy import Unit
from lightning_sdpipe.policies.thinning import Thinning

if TYPE_CHECKING:
    import networkx as nx

Matrix = list[list[float]]


class RecencyForest:
    """Connectivity of a graph whose edges expire oldest first."""

    def __init__(self, size: int, expired: int = -1) -> None:
        self._parent = list(range(size))
        self._round = [0] * size
        # Any fixed order without structure serves: Fibonacci hashing of the index.
        self._rank = [(i * 0x9E3779B97F4A7C15 & (1 << 64) - 1, i) for i in range(size)]
        self._links_made_in: dict[int, int] = {}
        self._expired = expired
        self.links = 0

    def expire(self, round_: int) -> None:
        """Expire edges made in ``round_`` or before, which no longer count."""
        for made in range(self._expired + 1, round_ + 1):
            self.links -= self._links_made_in.pop(made, 0)
        self._expired = max(self._expired, round_)

    def root(self, node: int) -> int:
        """Return the representative of ``node``'s component."""
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
                return  # connected by newer edges already: this edge can never matter
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


class Encounter(NamedTuple):
    """Workers that count as having met in a round: in a group, or (None) because they entered the run together."""

    round: int
    members: list[int]
    group: Group | None


def components(meetings: Iterable[Encounter], active: Collection[int]) -> list[set[int]]:
    """Return ``active`` workers in components, each joined by chains of active ones that met, the largest first."""
    forest = RecencyForest(1 + max(active, default=0))
    for _, members, _ in meetings:
        _join(forest, members, active, 0)
    by_root: dict[int, set[int]] = {}
    for worker in sorted(active):
        by_root.setdefault(forest.root(worker), set()).add(worker)
    return sorted(by_root.values(), key=lambda component: (-len(component), min(component)))


def rounds_since_connected(meetings: Sequence[Encounter], active: Collection[int], now: int) -> int | None:
    """Return the least r such that ``meetings`` from round ``now`` - r on connect ``active``; None if all of them do
    not. Meetings are ordered by round."""
    forest, needed = RecencyForest(1 + max(active, default=0)), len(active) - 1
    if needed <= 0:
        return 0
    for made, members, _ in reversed(meetings):
        _join(forest, members, active, 0)
        if forest.links == needed:
            return max(0, now - made)
    return None


def rounds_since_met(meetings: Iterable[Encounter], now: int) -> dict[tuple[int, int], int]:
    """Return, for each pair that was in one group, how many rounds before ``now`` it last was; ``meetings`` come
    oldest first."""
    return {
        pair: now - made
        for made, members, group in meetings
        if group is not None
        for pair in itertools.combinations(sorted(members), 2)
    }


def spectral_radius(meetings: Iterable[Encounter], active: Collection[int]) -> float:
    """Return ρ of P-Reduce's theorem 1 for the groups among ``meetings``; the spectral gap is 1 - ρ. Needs numpy.

    0 when every group is of all; 1 when nothing mixes (or nothing has happened yet).
    """
    groups = [(members, group.weights) for _, members, group in meetings if group is not None]
    return mixing_radius(mean_mixing_matrix(groups, sorted(active)))


def _join(forest: RecencyForest, members: Sequence[int], active: Collection[int], made: int) -> None:
    present = [worker for worker in members if worker in active]
    for other in present[1:]:
        forest.link(present[0], other, made)


class SyncGraph:
    """The groups of the last ``rounds`` rounds of one stage, as connectivity over its active workers."""

    def __init__(self, num_workers: int, rounds: int, unit: Unit = "rounds") -> None:
        self.rounds = rounds
        self.unit: Unit = unit
        self.round = 0
        self.active: set[int] = set()
        self._num_workers = num_workers
        self._known: set[int] = set()
        self._history: deque[Encounter] = deque()
        """Meetings of the window, oldest first."""
        self._entering: list[int] | None = None
        """Workers that have joined since the last group, and the workers that they count as having met."""
        self._signals = 0
        self._forest = RecencyForest(num_workers, -rounds)
        self._forest_is_stale = False
        self._thinning: Thinning | None = None
        """Replaces the forest when workers have left, until the next one joins."""
        self._thinned = False
        """Whether workers have left, and none joined, since the forest was right."""
        self._expired = 0
        """Last round that no longer counts in :attr:`_thinning`."""

    def widen(self, num_workers: int) -> None:
        """Allow ``num_workers`` workers from now on."""
        self._num_workers = max(self._num_workers, num_workers)
        self._forest = RecencyForest(self._num_workers, self.round - self.rounds)
        self._is_stale()

    def join(self, worker: int) -> None:
        """Make ``worker`` a node, with the edges it had if it was one before.

        Workers enter a run with equal models, as if they had just met, so a worker that was never seen counts
        as having met one active worker (all that join before the first group: each other) in the round before
        this one. So the first window that must be connected is the first whole one (Assumption 1 of §3.3).
        """
        if worker not in self._known:
            self._known.add(worker)
            if self._entering is None or not self.active:
                self._entering = [min(self.active)] if self.active else []
                self._insert(Encounter(self.round - 1, self._entering, None))
            self._entering.append(worker)
        self.active.add(worker)
        self._is_stale()

    def leave(self, worker: int) -> None:
        """Remove the node ``worker``; chains through it are broken."""
        self.active.remove(worker)
        self._signals = min(self._signals, max(0, len(self.active) - 1))
        if self._thinning is not None:
            self._thinning.leave(worker)
        else:
            self._forest_is_stale = self._thinned = True

    def record(self, groups: Sequence[Group]) -> None:
        """Record groups of active workers that went out together."""
        self._entering = None
        for group in groups:
            members = [worker.pipeline for worker in group.members]
            self._history.append(Encounter(self.round, members, group))
            if self._thinning is not None:
                self._thinning.record(self.round, members)
            elif not self._forest_is_stale:
                _join(self._forest, members, self.active, self.round)
            self._signals += len(members) - len(group.passive)
        if self.unit == "groups":
            self.round += 1
        else:
            size = max(1, len(self.active))
            self.round += self._signals // size
            self._signals %= size
        expired = self.round - self.rounds
        self._forest.expire(expired)
        while self._history and self._history[0].round <= expired:
            self._history.popleft()

    def forget(self, sequence: int) -> bool:
        """Remove the group of that number, which broke: its members did not meet. Return False when the window has no
        such group."""
        for place, meeting in enumerate(self._history):
            if meeting.group is not None and meeting.group.sequence == sequence:
                del self._history[place]
                self._is_stale()
                return True
        return False

    @property
    def components(self) -> int:
        """Number of connected components among the active workers."""
        self._refresh()
        return len(self.active) - self._forest.links if self._thinning is None else self._thinning.components

    def component(self, worker: int) -> int:
        """Return a name for the component of ``worker``, valid until the next change."""
        self._refresh()
        return self._forest.root(worker) if self._thinning is None else self._thinning.component(worker)

    def meetings(self) -> list[Encounter]:
        """Return the meetings of the last P rounds, oldest first, which connect the stage."""
        expired = self.round - self.rounds
        return [meeting for meeting in self._history if meeting.round > expired]

    def to_networkx(self) -> nx.Graph:
        """Return the graph: nodes are the active workers; an edge has ``round``, when the two met last, and ``count``,
        how often."""
        import networkx as nx  # needed only for a look at the graph, and slow to import

        graph = nx.Graph(round=self.round, rounds=self.rounds)
        graph.add_nodes_from(sorted(self.active))
        for made, members, group in self.meetings():
            present = [worker for worker in members if worker in self.active and group is not None]
            for u, v in itertools.combinations(present, 2):
                count = graph.edges[u, v]["count"] if graph.has_edge(u, v) else 0
                graph.add_edge(u, v, round=made, count=count + 1)
        return graph

    def _insert(self, meeting: Encounter) -> None:
        """Put an entry into the history, which stays ordered by round."""
        place = len(self._history)
        while place > 0 and self._history[place - 1].round > meeting.round:
            place -= 1
        self._history.insert(place, meeting)

    def _is_stale(self) -> None:
        self._forest_is_stale = True
        self._thinning, self._thinned = None, False

    def _refresh(self) -> None:
        """Rebuild the forest for the current nodes, newest groups first, until nothing can be added."""
        expired = self.round - self.rounds
        if self._thinning is not None:
            if expired >= self._expired:
                self._expired = expired
                self._thinning.expire(expired)
                return
            self._is_stale()  # the window has become longer
        if not self._forest_is_stale:
            return
        if self._thinned:
            window = [(made, members) for made, members, _ in self._history if made > expired]
            self._thinning, self._expired = Thinning(self.active, window), expired
            return
        self._forest = RecencyForest(self._num_workers, expired)
        for made, members, _ in reversed(self._history):
            if made <= expired or self._forest.links >= len(self.active) - 1:
                break
            _join(self._forest, members, self.active, made)
        self._forest_is_stale = False


def mean_mixing_matrix(groups: Sequence[tuple[Sequence[int], Sequence[float]]], workers: Sequence[int]) -> Matrix:
    """Return the mean of W over ``groups``, each given as members and weights; the identity when there was no group.

    In a group every member's model becomes the weighted sum of all members' models; other workers keep theirs. W has
    the weights in the rows of the members and 1 on the diagonal of the others (SDPipe, equation 2, with weights 1/|S|).
    Only ``workers`` have rows; the weight of a member without a row stays with the worker that would have received it.
    """
    index = {worker: row for row, worker in enumerate(workers)}
    size, share = len(workers), 1 / max(1, len(groups))
    mean = [[float(row == column) for column in range(size)] for row in range(size)]
    for members, weights in groups:
        present = [(index[member], weight) for member, weight in zip(members, weights, strict=True) if member in index]
        for u, _ in present:
            for v, weight in present:
                mean[u][v] += share * weight
                mean[u][u] -= share * weight
    return mean


def mixing_radius(matrix: Matrix) -> float:
    """Return ρ of a matrix whose rows add up to 1: the largest modulus of its eigenvalues other than the 1 of the
    constant vector (P-Reduce §3.2, assumption (3)). It says how fast groups spread updates.

    Three workers of equal speed in groups of two give 0.5; if one is twice as slow, 0.625. This serves the analysis of
    a run, not decisions, so the scheduler needs no numpy.

    Raises:
        ImportError: numpy is not installed.
    """
    import numpy

    size = len(matrix)
    if size < 2:
        return 0.0
    # Taking 1/n off every entry makes the eigenvalue of the constant vector 0 and keeps the others.
    return float(max(abs(numpy.linalg.eigvals(numpy.array(matrix) - 1 / size))))


def network_error(rho: float) -> float:
    """Return ρ̄ = ρ/(1 − ρ) + 2√ρ/(1 − √ρ)² of P-Reduce's theorem 1, to which its bound for the network error is
    proportional; infinite at ρ = 1, where nothing mixes."""
    root = math.sqrt(rho)
    return rho / (1 - rho) + 2 * root / (1 - root) ** 2 if rho < 1.0 else math.inf


def largest_learning_rate(lipschitz: float, num_workers: int, group_size: float, rho: float) -> float:
    """Return the γ of plain SGD up to which P-Reduce's theorem 1 holds (equation 7); 0 where nothing mixes.

    It holds where ηL + 2N³η²ρ̄/P² with η = Pγ/N is at most 1. It assumes doubly stochastic mixing, so equal weights. As
    it is printed, the second term has no L², which it would need for an L other than 1 if units should agree.

    Args:
        lipschitz: L, the Lipschitz constant of the gradient.
        num_workers: N.
        group_size: P; the mean if sizes differ.
        rho: ρ, from 0 on.
    """
    a = 2 * num_workers**3 * network_error(rho) / group_size**2
    # The positive root of aη² + Lη = 1, without the difference of two large numbers.
    step = 2 / (lipschitz + math.sqrt(lipschitz**2 + 4 * a))
    return num_workers * step / group_size
