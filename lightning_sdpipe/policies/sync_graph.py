"""The sync-graph of one stage: the workers that met in the last P rounds (SDPipe §3.3).

Nodes are the stage's active workers; the members of a group are pairwise joined by edges. Time is counted in
rounds: a round ends when as many ready signals have been answered as the stage has active workers (as the paper's
artefact counts), and a group belongs to the round in which it goes out. An edge counts in its own round and the P - 1
that follow. In the unit of the paper's text, ``"groups"``, each group is a round of its own; groups that go out
together count as one. The edges of a group that broke do not count.

Guarantee: after any sequence of calls, two active workers are in the same component if and only if a chain of active
workers joins them in which each met the next in the last P rounds, the current one included.

Algorithm: disjoint sets of workers. Recording a meeting merges the sets of its members. Once meetings have expired, a
worker has joined or left, or a group broke, the next query rebuilds the sets from the newest meeting back until all
workers are in one: O(N) steps for each round of the window, so O(P) for each ready signal where rounds are counted in
signals.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.policy import Unit

Matrix = list[list[float]]


class Sets:
    """Disjoint sets of nodes, which begin with one node each and are merged."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}
        self.merged = 0
        """Number of nodes less the number of sets."""

    def root(self, node: int) -> int:
        """Return the representative of the set of ``node``."""
        parent = self._parent
        while (above := parent.get(node, node)) != node:
            parent[node] = node = parent.get(above, above)  # halves the path
        return node

    def merge(self, nodes: Sequence[int]) -> None:
        """Merge the sets of all ``nodes``."""
        for other in nodes[1:]:
            a, b = self.root(nodes[0]), self.root(other)
            if a != b:
                self._parent[b] = a
                self.merged += 1


class Encounter(NamedTuple):
    """Workers that count as having met in a round: in a group, or (None) because they entered the run together."""

    round: int
    members: list[int]
    group: Group | None


def components(meetings: Iterable[Encounter], active: Collection[int]) -> list[set[int]]:
    """Return ``active`` workers in components, each joined by chains of active ones that met, the largest first."""
    sets = Sets()
    for _, members, _ in meetings:
        sets.merge([worker for worker in members if worker in active])
    by_root: dict[int, set[int]] = {}
    for worker in sorted(active):
        by_root.setdefault(sets.root(worker), set()).add(worker)
    return sorted(by_root.values(), key=lambda component: (-len(component), min(component)))


def rounds_since_connected(meetings: Sequence[Encounter], active: Collection[int], now: int) -> int | None:
    """Return the least r such that ``meetings`` from round ``now`` - r on connect ``active``; None if all of them do
    not. Meetings are ordered by round."""
    sets, needed = Sets(), len(active) - 1
    if needed <= 0:
        return 0
    for made, members, _ in reversed(meetings):
        sets.merge([worker for worker in members if worker in active])
        if sets.merged == needed:
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

    0 when every group has all workers; 1 when nothing mixes (or nothing has happened yet).
    """
    groups = [(members, group.weights) for _, members, group in meetings if group is not None]
    return mixing_radius(mean_mixing_matrix(groups, sorted(active)))


class SyncGraph:
    """The groups of the last ``rounds`` rounds of one stage, as connectivity over its active workers."""

    def __init__(self, rounds: int, unit: Unit = "rounds") -> None:
        self.rounds = rounds
        self.unit: Unit = unit
        self.round = 0
        self.active: set[int] = set()
        self._known: set[int] = set()
        self._history: deque[Encounter] = deque()
        """Meetings of the window, oldest first."""
        self._entering: list[int] | None = None
        """Workers that have joined since the last group, and the workers that they count as having met."""
        self._signals = 0
        self._sets: Sets | None = None
        """Workers by components; None if they must be rebuilt."""

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
        self._sets = None

    def leave(self, worker: int) -> None:
        """Remove the node ``worker``; chains through it are broken."""
        self.active.remove(worker)
        self._signals = min(self._signals, max(0, len(self.active) - 1))
        self._sets = None

    def record(self, groups: Sequence[Group]) -> None:
        """Record groups of active workers that went out together."""
        self._entering = None
        for group in groups:
            members = [worker.pipeline for worker in group.members]
            self._history.append(Encounter(self.round, members, group))
            if self._sets is not None:
                self._sets.merge([worker for worker in members if worker in self.active])
            self._signals += len(members) - len(group.passive)
        if self.unit == "groups":
            self.round += 1
        else:
            size = max(1, len(self.active))
            self.round += self._signals // size
            self._signals %= size
        while self._history and self._history[0].round <= self.round - self.rounds:
            self._history.popleft()
            self._sets = None

    def forget_last(self, worker: int) -> bool:
        """Remove the last group of ``worker``, which was lost, since its members may not have met. Return False when
        the window has none."""
        for place in range(len(self._history) - 1, -1, -1):
            if self._history[place].group is not None and worker in self._history[place].members:
                del self._history[place]
                self._sets = None
                return True
        return False

    @property
    def components(self) -> int:
        """Number of connected components among the active workers."""
        return len(self.active) - self._components().merged

    def component(self, worker: int) -> int:
        """Return a name for the component of ``worker``, valid until the next change."""
        return self._components().root(worker)

    def meetings(self) -> list[Encounter]:
        """Return the meetings of the last P rounds, oldest first, which connect the stage."""
        expired = self.round - self.rounds
        return [meeting for meeting in self._history if meeting.round > expired]

    def _insert(self, meeting: Encounter) -> None:
        """Put an entry into the history, which stays ordered by round."""
        place = len(self._history)
        while place > 0 and self._history[place - 1].round > meeting.round:
            place -= 1
        self._history.insert(place, meeting)

    def _components(self) -> Sets:
        if self._sets is None:
            self._sets, expired = Sets(), self.round - self.rounds
            for made, members, _ in reversed(self._history):
                if made <= expired or self._sets.merged >= len(self.active) - 1:
                    break
                self._sets.merge([worker for worker in members if worker in self.active])
        return self._sets


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

    It holds where ηL + 2N³η²ρ̄/P² with η = Pγ/N is at most 1. It assumes doubly stochastic mixing, hence equal weights.
    As printed, the second term lacks the L² that its units would require for an L other than 1.

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
