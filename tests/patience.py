"""Tests wait for work, not for clocks: a test is stuck when its processes do nothing, however long it has taken.

While a test runs, a thread looks at what its processes do. A starved process is always about to run, so what it has run
and what it has waited for a core grow together by a second a second, whatever the load; a process that hangs uses
nothing. A test is stuck when this sum grew by less than ``SHARE`` of a core over ``SILENCE`` seconds; then the stacks
of all its processes are in the report. Of other processes only main threads count, since those of gloo and ZeroMQ wake
up all the time, and on a loaded machine each wake-up waits. For the same reason a thread that polls does so with
:func:`until`, and does not count meanwhile. So no wait in a test needs a limit of its own; half an hour (pytest's
``timeout``) is the net below.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from operator import sub
from pathlib import Path
from typing import TypeVar

import pytest

Found = TypeVar("Found")

SILENCE = 30.0  # seconds; the marker ``silent`` changes them for a test that rightly waits for a limit of the product
SHARE = 0.02  # of a core
PROCESSOR_TIME = 300.0  # seconds that this process may compute in a test; five times as many in a slow one
LONGEST = 600.0  # seconds of a limit of the product
BUSY = 0.2  # of their time that processes have waited for a core
QUIET = {
    "tests/seeing/test_who_is_slow.py::test_the_slow_worker_is_named_and_nobody_else": (
        "tests/seeing/test_golden_logs.py"
    ),
    "tests/loop/test_dealt_training.py::test_a_pipeline_that_is_dealt_nothing_is_met_all_the_same": (
        "tests/dealing/test_dealer.py::test_who_is_faster_takes_from_the_tail_of_who_would_end_last"
    ),
    "tests/worker/elastic/test_joint_batches.py::test_one_is_killed_in_a_round_and_comes_back": (
        "tests/dealing/test_joint_rounds.py"
    ),
}
"""Tests whose subject is timing, at most ten, and what tests the same without a clock. They run last and alone, and a
failure is a skip where the machine was busy, unless ``IDLE`` says in the environment that it is not."""
STACKS = "SDPIPE_TEST_STACKS"
"""In the environment, the file to which a process writes its stacks on ``SIGNAL`` (see tests/lean/sitecustomize.py)."""
SIGNAL = signal.SIGUSR2
_POLLS = "polls"  # the name of a thread meanwhile


@contextmanager
def explained(say: Callable[[], object]) -> Iterator[None]:
    """Add what ``say`` returns to the failure of a test that is stuck in the body of this context."""
    try:
        yield
    except pytest.fail.Exception as stuck:
        stuck.add_note(str(say()))
        raise


def until(holds: Callable[[], Found], say: Callable[[], object] = str) -> Found:
    """Poll until ``holds`` returns something true, and return that; a failure also says what ``say`` returns."""
    name = Path("/proc/thread-self/comm")
    before = name.read_text()
    name.write_text(_POLLS)
    try:
        with explained(say):
            while not (found := holds()):
                time.sleep(0.02)
    finally:
        name.write_text(before)
    return found


def limit(seconds: float = 20.0) -> timedelta:
    """A limit of the product, longer by as much as this test run has waited for cores so far. The test is not called
    stuck before it, since the product's own error tells more."""
    run, waited = _watch.spent
    seconds = min(LONGEST, seconds * (1 + waited / max(run, 1)))
    _watch.silence = max(_watch.silence, 1.5 * seconds)
    return timedelta(seconds=seconds)


def spent(process: int, thread: int) -> tuple[int, int]:
    """Return the nanoseconds that a thread has run, and those that it has waited for a core."""
    run, waited, _ = Path(f"/proc/{process}/task/{thread}/schedstat").read_text().split()
    return int(run), int(waited)


def descendants(process: int) -> Iterator[int]:
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # ended meanwhile
            for child in map(int, children.read_text().split()):
                yield child
                yield from descendants(child)


def _threads() -> Iterator[tuple[int, int]]:
    """Process and thread of what counts: here those of Python, of other processes the main ones."""
    for thread in threading.enumerate():
        if thread is not _watch.thread and thread.native_id is not None:
            yield os.getpid(), thread.native_id
    for process in descendants(os.getpid()):
        yield process, process


class _Watch:
    """What this process and its descendants have spent, looked at each second; ``phase`` is that of the test."""

    def __init__(self) -> None:
        self.spent = (0, 0)
        self.phase: str | None = None
        self.silence = SILENCE
        self.said: str | None = None
        self.thread: threading.Thread | None = None
        self._of_each: dict[tuple[int, int], tuple[int, int]] = {}
        self._sums: deque[tuple[float, int]] = deque()
        self.ever_stuck = False
        self._stuck = 0
        self._lock = threading.Lock()

    def start(self) -> None:
        self._terminal = os.dup(2)
        made = tempfile.NamedTemporaryFile(prefix="stacks-")  # noqa: SIM115  # as long as tests run
        self._made, self._file = made, open(made.name, "ab", buffering=0)  # noqa: SIM115  # several append
        os.environ[STACKS] = self._file.name
        os.register_at_fork(after_in_child=self._register)
        signal.signal(signal.SIGPROF, self._fail)
        self.thread = threading.Thread(target=self._run, name="patience", daemon=True)
        self.thread.start()

    def _register(self) -> None:
        """Register the signal, again for each test and in each fork, because a Trainer that ends resets all signals."""
        faulthandler.unregister(SIGNAL)  # else it takes itself for registered still
        faulthandler.register(SIGNAL, self._file, all_threads=True)

    def enter(self, phase: str, silence: float) -> None:
        self._register()
        with self._lock:
            self._sums.clear()
            self.phase, self.silence, self._stuck = phase, silence, 0

    def leave(self) -> None:
        self.phase = None

    def look(self) -> tuple[int, int]:
        """Return the nanoseconds that all threads have run or waited for a core since this process began."""
        with self._lock:
            run, waited = self.spent
            now: dict[tuple[int, int], tuple[int, int]] = {}
            for each in _threads():
                with suppress(OSError, ValueError):  # ended meanwhile
                    now[each] = spent(*each)
                    if Path(f"/proc/{each[0]}/task/{each[1]}/comm").read_text().strip() != _POLLS:
                        before = self._of_each.get(each, (0, 0))
                        run, waited = run + now[each][0] - before[0], waited + now[each][1] - before[1]
            self._of_each = now
            self.spent = run, waited
            return self.spent

    def _run(self) -> None:
        while True:
            time.sleep(1.0)
            total = sum(self.look())
            with self._lock:
                self._sums.append((time.monotonic(), total))
                while len(self._sums) > 2 and self._sums[-1][0] - self._sums[1][0] >= self.silence:
                    self._sums.popleft()
                seconds, used = (last - first for first, last in zip(self._sums[0], self._sums[-1], strict=True))
                stuck = self.phase and seconds >= self.silence and used < SHARE * seconds * 1e9
                stuck = stuck and len(self._sums) > self.silence / 2  # else this machine slept
                if stuck:
                    self._sums.clear()
            if stuck:
                self._report(f"stuck: used {used / seconds / 1e7:.2f} % of a core over {seconds:.0f} s in {self.phase}")

    def _report(self, what: str) -> None:
        """Fail the test; end this process if failing it once before had no effect."""
        self._stuck, self.ever_stuck = self._stuck + 1, True
        self.said = f"{what}\n{self._stacks()}"
        if self._stuck > 1:
            os.write(self._terminal, self.said.encode())
            for process in [*descendants(os.getpid())]:
                with suppress(OSError):
                    os.kill(process, signal.SIGKILL)
            os._exit(3)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGPROF)

    def _stacks(self) -> str:
        begin = os.stat(self._file.name).st_size
        for process in [os.getpid(), *descendants(os.getpid())]:
            with suppress(OSError):  # ended meanwhile
                command = Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")[:200]
                status = dict(line.split(":\t", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
                self._file.write(f"\nprocess {process}, {status['State'].strip()}: {command}\n".encode())
                if int(status["SigCgt"], 16) >> (SIGNAL - 1) & 1:
                    self._ask_for_stacks(process)
        return Path(self._file.name).read_bytes()[begin:].decode(errors="replace")

    def _ask_for_stacks(self, process: int) -> None:
        """Ask a process for its stacks, and wait until it has written them: those of two processes would mix."""
        sizes = [os.stat(self._file.name).st_size]
        os.kill(process, SIGNAL)
        while len(sizes) < 100 and not sizes[0] < sizes[-1] == sizes[-4:][0]:
            time.sleep(0.1)
            sizes.append(os.stat(self._file.name).st_size)

    def _fail(self, *_: object) -> None:
        if self.phase:
            said, self.said = self.said, None
            pytest.fail(said or f"computed for more than {PROCESSOR_TIME:.0f} s in {self.phase}")


_watch = _Watch()


_spent_before = pytest.StashKey[tuple[int, int]]()


def _is_quiet(item: pytest.Item) -> bool:
    return item.nodeid.partition("[")[0] in QUIET


@contextmanager
def _watched(item: pytest.Item, phase: str) -> Iterator[None]:
    marker = item.get_closest_marker("silent")
    item.stash.setdefault(_spent_before, _watch.look())
    signal.setitimer(signal.ITIMER_PROF, PROCESSOR_TIME * (5 if item.get_closest_marker("slow") else 1))
    _watch.enter(f"{phase} of {item.nodeid}", marker.args[0] if marker else SILENCE)
    try:
        yield
    finally:
        _watch.leave()
        signal.setitimer(signal.ITIMER_PROF, 0)


def pytest_configure() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it, and its children do so, too
    _watch.start()


def pytest_unconfigure() -> None:
    if _watch.ever_stuck:  # its threads may never end, and Python would wait for them
        threading.Thread(target=lambda: (time.sleep(SILENCE), os._exit(1)), daemon=True).start()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_is_quiet)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """No other process of xdist runs a test beside a quiet one."""
    run = getattr(item.config, "workerinput", {}).get("testrunuid", f"alone-{os.getpid()}")
    with Path(tempfile.gettempdir(), f"sdpipe-tests-{run}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if _is_quiet(item) else fcntl.LOCK_SH)
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and _is_quiet(item) and "IDLE" not in os.environ:
        run, waited = map(sub, _watch.look(), item.stash[_spent_before])
        if waited > BUSY * (run + waited):
            why = f"inconclusive: its processes waited for cores for {waited / (run + waited):.0%} of their time"
            report.outcome, report.longrepr = "skipped", (str(item.path), 0, why)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    with _watched(item, "setup"):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    with _watched(item, "call"):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    with _watched(item, "teardown"):
        return (yield)
