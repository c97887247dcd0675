"""Deals the batches of an epoch to pipelines by their speed: events and the time go in, leases come out.

A *batch* is number b of home shard i: the b-th that DistributedSampler's i-th replica would train. A *segment* is the
stretch of numbers between two sync points of a run (validation, a checkpoint, the end of the epoch). Its N × (stop −
start) batches are each dealt once. A segment is over when all are trained, so at a sync point all before it is done.

- A pipeline's lease ``ordinal`` is decided when the first of its workers asks; the others get the same. An empty lease,
  too, is the same for all: the stages of a pipeline must drain after the same batch.
- A batch goes to the pipeline that is predicted to finish it first, after all that it was dealt and has not trained.
  For batches of one size that minimises the end of the last one: at steady, known speeds no pipeline waits longer than
  one of its own batches takes. A pipeline takes from the head of its home shard; then from the tail of the one that
  would end last.
- Leases are half of what a pipeline is still expected to train (guided self-scheduling, Polychronopoulos and Kuck
  1987), but no less than a second of work, and no more than two, or a 256th of what it is expected to train. So a
  pipeline asks rarely, a device that slows down holds little, and a stop takes effect soon.
- When a worker stops, nothing more is dealt: the segment is over when what was dealt is trained, and ends there.
- There may be nothing for an ask: all is dealt, or others are faster. The worker then gets an empty lease, trains what
  it still holds, and asks again. That ask stays open until batches come back, others stall, or the segment is over.
- The dealer of a scheduler that was restarted in mid-epoch hears first what every stage of every pipeline was dealt:
  one stage may have heard of a lease that is still on its way to another. A lease that no stage has heard of has not
  been trained.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from lightning_sdpipe.dealing.leases import (
    START,
    Asked,
    Book,
    Books,
    Lease,
    LeaseEvent,
    Returned,
    Segment,
    Trained,
)
from lightning_sdpipe.dealing.pipeline_progress import PipelineProgress
from lightning_sdpipe.dealing.proportional import proportional_shares
from lightning_sdpipe.policies.events import Widened, Worker
from lightning_sdpipe.policies.policy import RefusedEvent

LEAST_SECONDS, MOST_SECONDS = 1.0, 2.0
"""Seconds of work in a lease, if there is enough: a pipeline asks about once in this time, or per batch."""
_MOST_PART = 256
"""Most leases for what a pipeline is still expected to train: workers keep those of a segment."""


class Dealer:
    """Deals one segment after the other to ``num_pipelines`` pipelines of ``num_stages`` stages each, unless ``depths``
    gives each its own number.

    In an elastic run there may be more pipelines than home shards: the later ones have none. When a pipeline goes, the
    last ``in_doubt`` batches that it has trained are dealt again: the others know whether their models have them.
    """

    def __init__(self, num_stages: int, num_pipelines: int, in_doubt: int = 0, depths: Sequence[int] = ()) -> None:
        self._num_stages, self._num_pipelines, self._in_doubt = num_stages, num_pipelines, in_doubt
        self._accounts = [PipelineProgress(depth) for depth in depths or [num_stages] * num_pipelines]
        self._left: list[list[range]] = [[] for _ in range(num_pipelines)]
        """Batches of each home shard that are not dealt, in order."""
        self._asking: set[int] = set()
        """Pipelines whose last ask may be open, usually few."""
        self._retired = 0
        """Batches that were trained by pipelines that have returned the rest."""
        self.segment: Segment | None = None
        self._previous: tuple[Segment, dict[int, list[Lease]], int] | None = None
        """Answers of the segment before, which may have been lost on their way, and where it ended."""
        self._restarted = self._over = self._stops = False
        self._stop = 0
        """Number at which the segment ends."""

    def on(self, event: LeaseEvent, now: float) -> list[Lease]:
        """Return the leases that follow from ``event`` at ``now``; they may answer asks that were left open.

        Raises:
            RefusedEvent: the event breaks a rule; nothing has changed.
        """
        match event:
            case Asked(worker, segment, ordinal, done):
                account = self._accounts[worker.pipeline]
                self._check_asks(worker, segment, ordinal)
                if segment != self.segment:
                    self._begin(segment, now)
                elif not account.present:
                    account.begin(now)
                account.present = True
                account.hear(worker.stage, done, now)
                account.asked = max(account.asked, ordinal)
                self._asking.add(worker.pipeline)
                self._stops |= done.stops
                return self._settle(now)
            case Trained(worker, segment, done):
                account = self._accounts[worker.pipeline]
                if segment != self.segment or not account.present:
                    return []
                account.hear(worker.stage, done, now)
                self._stops |= done.stops
                return self._settle(now)
            case Books(books):
                self._take_over(books, now)
                return self._settle(now)
            case Returned(pipeline):
                self._take_back(pipeline)
                return self._settle(now)
            case Widened(num_pipelines):
                for _ in range(num_pipelines - len(self._accounts)):
                    account = PipelineProgress(self._num_stages)
                    account.present = False  # until it asks, or brings a book
                    account.begin(now)
                    self._accounts.append(account)
                return []

    def answer(self, pipeline: int, segment: Segment, ordinal: int) -> Lease | None:
        """Return the lease that was decided for that ask, if any."""
        if segment == self.segment:
            leases = self._accounts[pipeline].leases
        else:
            previous, before, stop = self._previous or (None, {}, segment.stop)
            unknown = self._restarted and previous is None and not self._is_newer(segment)
            if segment != previous and not unknown:
                return None
            leases = before.get(pipeline, [])
            # It has all that it needs, and has not asked since. A restarted scheduler may know less than the worker.
            if ordinal == len(leases) or (self._restarted and ordinal > len(leases)):
                home, end = pipeline % self._num_pipelines, float(self._num_pipelines * stop)
                return Lease(segment, pipeline, ordinal, home, stop, stop, end, 0.0, over=True)
        return leases[ordinal] if 0 <= ordinal < len(leases) else None

    def still_training(self) -> list[int]:
        """Return the pipelines that were dealt something that not all of their stages have trained."""
        return [
            i for i, account in enumerate(self._accounts) if account.present and account.finished() < account.leased
        ]

    def behind(self) -> list[Worker]:
        """Return the workers that have yet to train what their pipelines were dealt, if others wait for that with
        nothing to train."""
        return [
            Worker(stage, pipeline)
            for pipeline in (self.still_training() if any(account.waits for account in self._accounts) else ())
            for stage in range(self._accounts[pipeline].depth)
            if self._accounts[pipeline].trained.get(stage, 0) < self._accounts[pipeline].leased
        ]

    # ---------------------------------------------------------------- segments

    def _is_newer(self, segment: Segment) -> bool:
        current = self.segment
        return (
            current is None
            or segment.run != current.run
            or (segment.epoch, segment.start) > (current.epoch, current.start)
        )

    def _check_asks(self, worker: Worker, segment: Segment, ordinal: int) -> None:
        current, account = self.segment, self._accounts[worker.pipeline]
        same_run = current is not None and segment.run == current.run
        if same_run and segment != current and not (self._over and self._is_newer(segment)):
            raise RefusedEvent(
                f"worker {worker} asked for a lease in {segment}, while {current} are dealt: the workers of a run "
                "must pause at the same batches, whatever their rank, data or clock"
            )
        known = len(account.leases) if segment == current and account.present else 0
        if ordinal > known:
            raise RefusedEvent(f"worker {worker} asked for lease {ordinal} of its pipeline, which was dealt {known}")

    def _begin(self, segment: Segment, now: float) -> None:
        if self.segment is not None:
            leases = {i: account.leases for i, account in enumerate(self._accounts)}
            self._previous = self.segment, leases, self._stop
        self.segment, self._over, self._stops, self._retired, self._stop = segment, False, False, 0, segment.stop
        self._left = [[range(segment.start, segment.stop)] for _ in range(self._num_pipelines)]
        for account in self._accounts:
            account.begin(now)

    def _take_over(self, books: Iterable[tuple[Worker, Book]], now: float) -> None:
        """Go on in the newest segment of these books. One that contradicts another is left out, and what its worker
        asks for is then refused."""
        self._restarted = True
        for _, book in books:
            if self._is_newer(book.segment):
                self.segment = book.segment
        newest, self.segment = self.segment, None
        assert newest is not None
        self._begin(newest, now)
        for worker, book in books:
            account = self._accounts[worker.pipeline]
            left, news = [list(parts) for parts in self._left], book.leases[len(account.leases) :]
            if book.segment == newest and all(
                lease.pipeline == worker.pipeline
                and lease.home < self._num_pipelines
                and _removed(left[lease.home], lease.start, lease.stop)
                for lease in news
            ):
                self._left = left
                account.leases += news
                account.leased += sum(lease.size for lease in news)
                account.present = True
                account.hear(worker.stage, book.done, now)
                self._stops |= book.done.stops
                self._over |= book.over
                self._stop = min([self._stop, *(lease.stop for lease in book.leases if lease.over)])

    def _take_back(self, pipeline: int) -> None:
        account = self._accounts[pipeline]
        trained = min(account.kept(), max(0, account.finished() - self._in_doubt))
        self._retired += trained
        for lease in account.leases:
            kept = min(lease.size, trained)
            trained -= kept
            _put_back(self._left[lease.home], lease.start + kept, lease.stop)
        account.begin(account.base)
        account.present = False
        if self._previous is not None:  # its next start has heard of none of them
            self._previous[1].pop(pipeline, None)

    # ------------------------------------------------------------------ leases

    def _settle(self, now: float) -> list[Lease]:
        """Decide the open asks, as far as they can be decided."""
        if self._stops:
            self._left = [[] for _ in self._left]
        decided: list[Lease] = []
        for pipeline in self._open():
            if not self._accounts[pipeline].waits:
                lease = None if self._over else self._lease(pipeline, self._quotas(now), now)
                decided.append(self._record(lease or self._empty(pipeline, self._over)))
        if not self._over and self._open():
            decided += self._serve_who_waits(now)
        if self._over:
            decided += [self._record(self._empty(pipeline, over=True)) for pipeline in self._open()]
        return decided

    def _open(self) -> list[int]:
        """Return the pipelines with an open ask."""
        self._asking = {pipeline for pipeline in self._asking if self._accounts[pipeline].open}
        return sorted(self._asking)

    def _serve_who_waits(self, now: float) -> list[Lease]:
        decided: list[Lease] = []
        while any(self._left):
            quotas = self._quotas(now)
            first = next((i for i in self._open() if quotas.get(i)), None)
            lease = None if first is None else self._lease(first, quotas, now)
            if lease is None:
                return decided
            decided.append(self._record(lease))
        self._over = not self.still_training()
        if self._over and self._stops:
            self._stop = self._reached()
        return decided

    def _reached(self) -> int:
        """Return the number at which a stopped segment ends: as far as it was trained, rounded up, and as far as
        workers count."""
        assert self.segment is not None
        n, start = self._num_pipelines, self.segment.start
        trained = n * start + self._retired + sum(account.leased for account in self._accounts)
        counted = (lease.end for account in self._accounts for lease in account.leases)
        return min(max(math.ceil(max(trained, *counted, 0.0) / n - 1e-9), start + 1), self.segment.stop)

    def _record(self, lease: Lease) -> Lease:
        account = self._accounts[lease.pipeline]
        _removed(self._left[lease.home], lease.start, lease.stop)
        account.leases.append(lease)
        account.leased += lease.size
        return lease

    def _lease(self, pipeline: int, quotas: Mapping[int, int], now: float) -> Lease | None:
        """Return the next batches for ``pipeline``; None if there are none for it now."""
        quota = quotas.get(pipeline, 0)
        if not quota:
            return None
        account, seconds = self._accounts[pipeline], self._accounts[pipeline].seconds
        if seconds is None:  # the speed is unknown: double until it is known
            size = min(quota, max(1, account.leased))
        else:
            least, most = math.ceil(LEAST_SECONDS / seconds), max(MOST_SECONDS / seconds, quota / _MOST_PART)
            size = min(quota, max(math.ceil(min(quota / 2, most)), least))
        home, batches = self._choose(pipeline, size, quotas, now)
        progress, advance = self._progress(pipeline, len(batches), now)
        assert self.segment is not None
        start, stop = batches.start, batches.stop
        return Lease(self.segment, pipeline, len(account.leases), home, start, stop, progress, advance)

    def _empty(self, pipeline: int, over: bool = False) -> Lease:
        account, segment = self._accounts[pipeline], self.segment
        assert segment is not None
        stop = self._stop if over else segment.stop
        end = float(self._num_pipelines * stop)
        progress = end if over else self._even(account) if not account.leases else account.leases[-1].end
        return Lease(
            segment,
            pipeline,
            len(account.leases),
            pipeline % self._num_pipelines,
            stop,
            stop,
            min(progress, end),
            0.0,
            over,
        )

    def _choose(self, pipeline: int, size: int, quotas: Mapping[int, int], now: float) -> tuple[int, range]:
        """Return at most ``size`` batches of one shard, and the shard."""
        if pipeline < self._num_pipelines and (own := self._left[pipeline]):
            return pipeline, own[0][:size]
        seconds = self._seconds()

        def end(home: int) -> float:
            owner = self._accounts[home]
            if not owner.present:
                return math.inf
            return owner.free_at(now, seconds[home]) + seconds[home] * sum(map(len, self._left[home]))

        home = max((i for i, left in enumerate(self._left) if left), key=end)
        spare = sum(map(len, self._left[home])) - quotas.get(home, 0)
        tail = self._left[home][-1]
        return home, tail[-min(size, max(1, spare)) :]

    # -------------------------------------------------------------- prediction

    def _seconds(self) -> list[float]:
        """Return the seconds per batch of each pipeline; an unknown one counts as the median of the others, at most
        :data:`START`: a longer first batch would have told."""
        known = [account.seconds for account in self._accounts if account.present and account.seconds is not None]
        typical = min(statistics.median_low(known), START) if known else START
        return [typical if account.seconds is None else account.seconds for account in self._accounts]

    def _quotas(self, now: float) -> dict[int, int]:
        """Return, for each pipeline, how many of the remaining batches it would finish before any other could. At equal
        times, a pipeline with batches of its own left comes first."""
        seconds = self._seconds()
        free = {
            (i >= self._num_pipelines or not self._left[i], i): (account.free_at(now, seconds[i]), seconds[i])
            for i, account in enumerate(self._accounts)
            if account.present
        }
        quotas = proportional_shares(sum(len(part) for parts in self._left for part in parts), free)
        return {i: quota for (_, i), quota in quotas.items()}

    def _even(self, account: PipelineProgress) -> float:
        """Return the progress before its next batch if all pipelines are equally fast."""
        assert self.segment is not None
        return float(self._num_pipelines * (self.segment.start + account.leased))

    def _progress(self, pipeline: int, size: int, now: float) -> tuple[float, float]:
        """Return the progress before the next ``size`` batches of ``pipeline``, and how much it grows with each.

        Measured speeds that differ by less than what one round of batches may hide are taken for equal.
        """
        assert self.segment is not None
        account, seconds, n = self._accounts[pipeline], self._seconds(), self._num_pipelines
        present = [i for i, other in enumerate(self._accounts) if other.present]
        rate = math.fsum(1 / seconds[i] for i in present)
        advance = rate * seconds[pipeline]
        done = self._retired + math.fsum(self._accounts[i].expected(now, seconds[i]) for i in present)
        first = n * self.segment.start + done + rate * (account.free_at(now, seconds[pipeline]) - now)
        even = self._even(account)
        if abs(first - even) <= n and abs(advance - n) * size <= n:
            first, advance = even, float(n)
        before = account.leases[-1].end if account.leases else 0.0
        end = float(n * self.segment.stop)
        first = min(max(first, before), end)
        return first, min(advance, (end - first) / size)


def _removed(parts: list[range], start: int, stop: int) -> bool:
    """Take ``start`` to ``stop`` out of the one of ``parts`` that holds them; return False if there is none."""
    if start == stop:
        return True
    for at, part in enumerate(parts):
        if part.start <= start < stop <= part.stop:
            parts[at : at + 1] = _nonempty(range(part.start, start), range(stop, part.stop))
            return True
    return False


def _put_back(parts: list[range], start: int, stop: int) -> None:
    parts[:] = sorted([*parts, *_nonempty(range(start, stop))], key=lambda part: part.start)


def _nonempty(*parts: range) -> Iterable[range]:
    return [part for part in parts if part]
