"""Connectivity of a graph that workers leave, one after the other, without looking at all of it each time.

The module keeps a spanning forest of edges between workers that met. When a worker leaves, or a meeting expires, its
edges break and the tree falls into pieces; all but the largest are traversed, in turns so that the largest need not be,
and the meetings of their workers are searched for edges that join the pieces again. In forests of this kind (a few
newest groups hold most workers, in trees of logarithmic depth) the smaller pieces have O(log N) workers on average.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence


class Thinning:
    """The components of active workers that chains of meetings join.

    Args:
        active: the workers.
        meetings: rounds, and the workers that met in them; the oldest first.
    """

    def __init__(self, active: Collection[int], meetings: Sequence[tuple[int, Sequence[int]]]) -> None:
        self._tree: dict[int, dict[int, int]] = {worker: {} for worker in active}
        """Neighbours of each worker in the forest, and the meeting that made each edge."""
        self._met: dict[int, deque[int]] = {worker: deque() for worker in active}
        """Numbers of the meetings in which each worker was, the oldest first."""
        self._meetings: dict[int, tuple[int, Sequence[int]]] = {}
        self._first = self._next = 0
        self._name: dict[int, int] = {}
        self._members: dict[int, set[int]] = {}
        self._names = 0
        for worker in self._tree:
            self._call([worker])
        for made, members in meetings:
            self._enter(made, members)
        for number in reversed(range(self._first, self._next)):
            if len(self._members) == 1:
                break
            self._join(number)

    @property
    def components(self) -> int:
        """Number of components."""
        return len(self._members)

    def component(self, worker: int) -> int:
        """Return a name for the component of ``worker``, valid until the next change."""
        return self._name[worker]

    def record(self, made: int, members: Sequence[int]) -> None:
        """Record a meeting in the round ``made``, which is the newest."""
        self._enter(made, members)
        self._join(self._next - 1)

    def leave(self, worker: int) -> None:
        """Remove ``worker``; chains through it are broken."""
        ends = list(self._tree.pop(worker))
        for other in ends:
            del self._tree[other][worker]
        del self._met[worker]
        name = self._name.pop(worker)
        self._members[name].discard(worker)
        if not ends:
            del self._members[name]
        self._mend(ends)

    def expire(self, round_: int) -> None:
        """Expire meetings of ``round_`` and before, which no longer count."""
        while self._first < self._next and self._meetings[self._first][0] <= round_:
            number = self._first
            self._first += 1
            _, members = self._meetings.pop(number)
            present = [worker for worker in members if worker in self._tree]
            for worker in present:
                self._met[worker].popleft()
            for a, b in [(w, o) for w in present for o, by in self._tree[w].items() if by == number and w < o]:
                del self._tree[a][b], self._tree[b][a]
                self._mend([a, b])

    def _enter(self, made: int, members: Sequence[int]) -> None:
        self._meetings[self._next] = made, members
        for worker in members:
            if worker in self._met:
                self._met[worker].append(self._next)
        self._next += 1

    def _join(self, number: int) -> None:
        first, *others = [w for w in self._meetings[number][1] if w in self._tree] or [-1]
        for other in others:
            if self._name[first] != self._name[other]:
                self._tree[first][other] = self._tree[other][first] = number
                a, b = sorted((self._name[first], self._name[other]), key=lambda name: len(self._members[name]))
                for worker in self._members[a]:
                    self._name[worker] = b
                self._members[b] |= self._members.pop(a)

    def _mend(self, ends: Sequence[int]) -> None:
        """Mend a tree that has fallen into those that hold one of ``ends`` each: join them where possible."""
        piece_of, pieces, rest = self._pieces(ends)
        parents = list(range(len(pieces)))

        def root(piece: int) -> int:
            while parents[piece] != piece:
                piece = parents[piece]
            return piece

        apart = len(pieces) - 1
        for worker, other, number in self._edges(piece for place, piece in enumerate(pieces) if place != rest):
            if apart <= 0:
                return
            a, b = root(piece_of[worker]), root(piece_of.get(other, rest))
            if a != b:
                parents[a] = b
                self._tree[worker][other] = self._tree[other][worker] = number
                apart -= 1
        if apart <= 0:
            return
        kept, groups = root(rest), dict[int, list[int]]()
        for place, piece in enumerate(pieces):
            if root(place) != kept:
                groups.setdefault(root(place), []).extend(piece)
        for group in groups.values():
            name = self._name[group[0]]
            self._members[name] -= set(group)
            self._call(group)

    def _pieces(self, ends: Sequence[int]) -> tuple[dict[int, int], list[list[int]], int]:
        """Find the pieces that hold ``ends``, all but one traversed: return the piece of each worker, the pieces, and
        the one that was not traversed."""
        piece_of: dict[int, int] = {}
        pieces: list[list[int]] = []
        for end in ends:
            piece_of[end] = len(pieces)
            pieces.append([end])
        walks = dict.fromkeys(range(len(pieces)), 0)
        while len(walks) > 1:
            for place in list(walks):
                piece = pieces[place]
                if walks[place] == len(piece):
                    del walks[place]
                    if len(walks) == 1:
                        break
                    continue
                worker = piece[walks[place]]
                walks[place] += 1
                for other in self._tree[worker]:
                    if other not in piece_of:
                        piece_of[other] = place
                        piece.append(other)
        return piece_of, pieces, next(iter(walks), 0)

    def _edges(self, pieces: Iterable[Sequence[int]]) -> Iterator[tuple[int, int, int]]:
        """Yield edges between workers that met, starting from workers of ``pieces``, the newest first for each
        worker."""
        for piece in pieces:
            for worker in piece:
                for number in reversed(self._met[worker]):
                    for other in self._meetings[number][1]:
                        if other in self._tree and other != worker:
                            yield worker, other, number

    def _call(self, workers: Sequence[int]) -> None:
        """Make ``workers`` a component."""
        self._names += 1
        self._members[self._names] = set(workers)
        self._name |= dict.fromkeys(workers, self._names)
