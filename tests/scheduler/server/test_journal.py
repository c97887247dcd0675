"""The scheduler's journal when its process or its disk fails: it is right, or it is void."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

from lightning_sdpipe.dealing.dealer import Dealer
from lightning_sdpipe.dealing.leases import Asked, Done, Lease, Returned, Segment, Told, Trained
from lightning_sdpipe.policies import Worker
from lightning_sdpipe.scheduler.log.event_log import Entry
from lightning_sdpipe.scheduler.server.journal import Journal
from tests.scheduler.server.test_leases import A, B, play, restored


@pytest.fixture
def here() -> Iterator[Path]:
    """A directory in memory, where there is one: on a disk, each of thousands of renames takes milliseconds."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        yield Path(directory)


FIRST, FOLLOWING = Segment(5, 0, 0, 3), Segment(5, 0, 3, 6)


def survives(path: Path, dealt: list[Lease], goes_on: bool = True) -> bool:
    """Whether another scheduler knows what was ``dealt`` last; if not, it must know nothing at all. And it goes on."""
    journal, dealer = Journal(path, 1, 2), Dealer(1, 2)
    for event in journal.open():
        dealer.on(event, 9.0)
    if dealer.segment is None:
        assert path.read_bytes().count(b"\n") == 1
    elif dealt and dealer.segment != dealt[-1].segment:
        assert dealt[-1].over, "the next segment has begun, and nobody has heard of it"
        assert dealer.segment == FOLLOWING
    elif dealt:
        assert dealer.answer(dealt[-1].pipeline, dealt[-1].segment, dealt[-1].ordinal) == dealt[-1]
    if not goes_on:
        journal.close()
        return dealer.segment is not None
    after = Segment(5, 1, 0, 4)
    lease = Lease(after, 0, 0, 0, 0, 1, 0.0, 2.0)
    journal.write(Entry(9.0, Asked(A, after, 0, Done(0)), leases=[lease]))
    journal.close()
    assert restored(path).answer(0, after, 0) == lease
    return dealer.segment is not None


def steps(path: Path) -> Iterator[list[Lease]]:
    """What a scheduler with a journal there has answered, after each event of two segments; in each, one pipeline goes
    and comes back."""
    journal, dealer = Journal(path, 1, 2), Dealer(1, 2)
    journal.open()
    answered: list[Lease] = []
    for segment in (FIRST, FOLLOWING):
        books: dict[Worker, list[Lease]] = {A: [], B: []}
        yield answered + play(journal, dealer, *[Told(worker, segment, (), False, Done(0)) for worker in (A, B)])
        waiting = [A, B]
        for turn in count():
            if turn == 3:
                play(journal, dealer, Trained(B, segment, Done(0)), Returned(B.pipeline))
                books[B] = []
            worker = waiting[turn % len(waiting)]
            asks = Asked(worker, segment, len(books[worker]), Done(sum(lease.size for lease in books[worker])))
            for lease in play(journal, dealer, asks):
                answered.append(lease)
                books[Worker(0, lease.pipeline)].append(lease)
            yield [*answered]
            waiting = [worker for worker, book in books.items() if not (book and book[-1].over)]
            if not waiting:
                break
    journal.close()


def test_a_journal_that_is_cut_anywhere_is_right_or_void(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, cut = here / "journal", here / "cut"
    answered = {}
    for dealt in steps(path):
        answered[path.read_bytes() if path.exists() else b""] = dealt
    final = max(answered, key=len)
    known = 0
    for length in range(len(final) + 1):
        cut.write_bytes(final[:length])
        whole = final[: final[:length].rfind(b"\n") + 1]
        known += survives(cut, answered.get(whole, []), not length % 10)
    assert known > len(final) // 2
    assert "ends with half a line" in caplog.text
    cut.write_bytes(final[:400] + b"\0" * 100 + final[500:])
    assert not survives(cut, [])
    assert "is damaged" in caplog.text
    cut.write_bytes(final.replace(b'"boot":"', b'"boot":"another'))
    assert not survives(cut, [])
    assert "was written before this machine was started" in caplog.text


def test_a_full_disk_leaves_a_void_journal_until_there_is_space(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The system refuses to let files grow, from some byte on: it takes what still fits of a line, then nothing."""
    path, limits = here / "journal", resource.getrlimit(resource.RLIMIT_FSIZE)
    *_, dealt = steps(path)
    kept = []
    whole = path.stat().st_size
    for size in [*range(0, whole, 3), whole]:
        path.unlink()
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            *_, dealt = steps(path)
            restarted = restored(path).segment  # with a disk that is full still
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        kept.append(survives(path, dealt))
        assert kept[-1] == (restarted is not None)
        assert not path.with_name("journal.new").exists()
    assert kept == [*[False] * (len(kept) - 1), True], "with less than all of it there is nothing"
    assert "is void until the run's next sync point: File too large" in caplog.text


def test_a_journal_that_cannot_even_be_emptied_is_named(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = here / "journal"

    def broken(*arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.MonkeyPatch.context() as patched:
        for dealt in steps(path):
            if len(dealt) == 2:
                patched.setattr(os, "write", broken)
                patched.setattr(os, "truncate", broken)
    assert "cannot be written (Input/output error), nor emptied (Input/output error): delete it" in caplog.text


def test_a_journal_of_a_scheduler_that_was_killed_at_any_moment_is_right(here: Path) -> None:
    """Before and after each call that changes a file."""
    path, calls = here / "journal", 0
    said = here / "said"
    while True:
        path.unlink(missing_ok=True)
        said.unlink(missing_ok=True)
        pid = os.fork()
        if not pid:
            left = count(calls, -1)

            def dying(call: Callable[..., Any], left: Iterator[int] = left) -> Callable[..., Any]:
                def change(*arguments: Any, **options: Any) -> Any:
                    if not next(left):
                        os.kill(os.getpid(), signal.SIGKILL)
                    result = call(*arguments, **options)
                    if not next(left):
                        os.kill(os.getpid(), signal.SIGKILL)
                    return result

                return change

            for name in ("write", "replace", "ftruncate", "open"):
                setattr(os, name, dying(getattr(os, name)))
            for dealt in steps(path):
                said.write_bytes(msgspec.json.encode(dealt))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if not status:
            break
        calls += 1
        survives(path, msgspec.json.decode(said.read_bytes(), type=list[Lease]) if said.exists() else [])
    assert calls > 20
