"""Tries a user's code in a child process, which leaves nothing behind but the answer."""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import gc
import multiprocessing
import os
import pickle
import platform
import signal
import stat
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_sdpipe import openmp
from lightning_sdpipe.errors import ConfigurationError

_T = TypeVar("_T")
_STDERR = 2
_PR_SET_PDEATHSIG = 1
_TOLD_AFTER = 10.0  # seconds
_STUCK_AFTER = 30.0  # seconds without work in which all threads wait for locks
_LOOKS_EVERY = 1.0  # seconds
_FUTEX = {"x86_64": "202", "aarch64": "98"}  # numbers of the system call with which threads wait for a lock
_in_a_child = False  # then its parent logs what is waited for


class NoAnswerError(RuntimeError):
    """No child could be started, or it died or took too long; the message says which."""


def apart(work: Callable[[], _T], seconds: float) -> _T:
    """Call ``work`` in a forked child and return its result, which must be picklable. Memory is copied on write. Files
    and folders that are open for reading are reopened in the child at the same position; pipes, sockets and files that
    are only written to are shared.

    The child has only this thread, and torch computes there on the CPU, with as many threads as here: an accelerator
    that is open here cannot be used there. A lock that another thread holds at this moment stays locked in the child,
    which is given up if all of its threads wait for locks and do nothing else for 30 s. After 10 s the log says what is
    waited for. The child ends with its parent.

    Args:
        work: the function to call. It prints as usual; its changes are lost.
        seconds: limit of time.

    Raises:
        NoAnswerError: this system is not Linux, or the child died, exceeded the limit, or waited for a lock forever.
        Exception: the exception that ``work`` raised.
    """
    if sys.platform != "linux":  # as on macOS, system libraries do not survive a fork
        raise NoAnswerError(f"there is none on {sys.platform}")
    receive, send = multiprocessing.Pipe(duplex=False)
    _flush()  # else the child would print it, too
    openmp.end_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, about a fork beside other threads
        child = os.fork()
    if child == 0:
        _answer(work, send, seconds)
    send.close()
    try:
        with receive:
            _wait(child, receive, seconds)
            raised, answer = pickle.loads(receive.recv_bytes())
    except EOFError:
        os.kill(child, signal.SIGKILL)  # unless it has ended
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        raise NoAnswerError(f"the process that tried it ended with status {code}") from None
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    os.waitpid(child, 0)
    if raised:
        raise answer
    return answer  # type: ignore[no-any-return]


def _wait(child: int, answer: Connection, seconds: float) -> None:
    """Wait for the child's answer.

    Raises:
        NoAnswerError: the child exceeded the limit, or is stuck at a lock.
    """
    began = worked = time.monotonic()
    done, told = (0, 0), _in_a_child
    while not answer.poll(min(_LOOKS_EVERY, max(began + seconds - time.monotonic(), 0.0))):
        now = time.monotonic()
        if now >= began + seconds:
            raise NoAnswerError(f"it was not done within {seconds:g} s")
        before, done = done, _work_of(child)
        if done != before or not _waits_for_locks(child):
            worked = now
        if now - worked >= _STUCK_AFTER:
            raise NoAnswerError(
                f"all threads waited for a lock, and nothing else happened, for {_STUCK_AFTER:g} s: another thread of "
                "this process, which a child does not have, held the lock. Start threads and pools when training "
                "begins, not before"
            )
        if now - began >= _TOLD_AFTER and not told:
            told = True
            doing = "is computing or reading" if done != before else "is waiting for something outside"
            rank_zero_info(
                f"Rank 0 waits for a child process ({child}), which tries your data loaders and, before stages are "
                f"planned, your steps; it {doing if worked == now else 'is waiting for a lock'}."
            )


def _work_of(process: int) -> tuple[int, int]:
    """Return the ticks of processor time that a process and its descendants have used, and the bytes that they have
    read."""
    try:
        used = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        read = Path(f"/proc/{process}/io").read_text().split()[1]  # from files, pipes and sockets alike
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return 0, 0  # the process is about to end
    theirs = [_work_of(int(child)) for child in children]
    return int(used[11]) + int(used[12]) + sum(t for t, _ in theirs), int(read) + sum(r for _, r in theirs)


def _waits_for_locks(process: int) -> bool:
    """Return whether every thread of a process is known to be waiting for a lock."""

    def waits(thread: Path) -> bool:
        waits_in = (thread / "wchan").read_text()
        if waits_in not in ("", "0"):
            return waits_in.startswith("futex")
        return (thread / "syscall").read_text().split()[0] == _FUTEX.get(platform.machine())

    try:
        return all(waits(thread) for thread in Path(f"/proc/{process}/task").iterdir())
    except OSError:
        return False


def _reopen_files() -> None:
    """Give this process its own position in every file and folder that it has open for reading; those that cannot be
    reopened stay shared. Files opened for writing only stay shared, or parent and child would overwrite each other."""
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            kind, flags = os.fstat(number).st_mode, fcntl.fcntl(number, fcntl.F_GETFL)
            reads = flags & os.O_ACCMODE != os.O_WRONLY
            if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)) or not reads or number <= _STDERR:
                continue
            anew = os.open(f"/proc/self/fd/{number}", flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC))
        except OSError:  # the folder that was listed, which is closed by now, or a file that this user may not open
            continue
        os.lseek(anew, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(anew, number, inheritable=os.get_inheritable(number))
        os.close(anew)


def _answer(work: Callable[[], object], send: Connection, seconds: float) -> None:
    """Run the child; it exits without the parent's exit handlers."""
    global _in_a_child
    status, _in_a_child = 1, True
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives it, too, and ends this process
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # faulthandler's thread, which would print the stacks at a timeout, is not in the child.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, file=_STDERR, chain=True)
        signal.setitimer(signal.ITIMER_REAL, seconds + 1)
        _reopen_files()
        gc.freeze()  # a process group collected here would wait for threads that do not exist
        send.send_bytes(_outcome(work))
        status = 0
    finally:
        _flush()
        os._exit(status)


def _outcome(work: Callable[[], object]) -> bytes:
    """Return, pickled, whether ``work`` raised, and what it returned or raised."""
    try:
        return pickle.dumps((False, work()))
    except BaseException as error:
        if not isinstance(error, ConfigurationError):  # its message is complete
            error.add_note("".join(traceback.format_exception(error)))
        try:
            answer = pickle.dumps((True, error))
            pickle.loads(answer)  # raises if the exception cannot be rebuilt from its arguments
        except Exception:
            return pickle.dumps((True, RuntimeError(f"{type(error).__name__}: {error}")))
        return answer


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
