"""Trying a user's code in a child process, of which nothing stays but the answer."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from lightning_sdpipe.errors import ConfigurationError

_T = TypeVar("_T")
_STDERR = 2
_threads_of_parent: int | None = None


class NoAnswerError(RuntimeError):
    """The child died, or took too long: the message says which."""


def is_possible(device: torch.device) -> bool:
    """Whether what computes on ``device`` can be tried in a child: a fork must have neither an open accelerator nor,
    as on macOS, system libraries that do not survive it."""
    return sys.platform == "linux" and device.type == "cpu" and not _has_opened_an_accelerator()


def apart(work: Callable[[], bytes], seconds: float) -> bytes:
    """What ``work`` returns, called in a forked child: memory is copied as it is written to, and the rest is shared.

    The child has this thread only. The pool of OpenMP's threads that belongs to it is lost, and asking for it would
    wait for ever, so torch computes in one thread there, except within :func:`with_all_threads`.

    Args:
        work: prints as usual; what it sets does not stay.
        seconds: that it may take.

    Raises:
        NoAnswerError: the child died, or took longer.
        Exception: what ``work`` raised.
    """
    receive, send = multiprocessing.Pipe(duplex=False)
    _flush()  # else the child would print it, too
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, where there are other threads
        child = os.fork()
    if child == 0:
        _answer(work, send, seconds)
    send.close()
    try:
        with receive:
            if not receive.poll(seconds):
                raise NoAnswerError(f"it was not done within {seconds:g} s")
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


def with_all_threads(work: Callable[[], _T]) -> _T:
    """What ``work`` returns, computed with as many threads as this process had before it was forked, if it was. They
    belong to a new thread, in which ``work`` runs."""
    if _threads_of_parent is None:
        return work()
    with ThreadPoolExecutor(1, initializer=partial(torch.set_num_threads, _threads_of_parent)) as thread:
        return thread.submit(copy_context().run, work).result()


def _answer(work: Callable[[], bytes], send: Connection, seconds: float) -> None:
    """The child's life; it leaves without running what is registered for the end of the parent."""
    global _threads_of_parent
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it as well, and ends this process
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Ends it also if the parent is gone. A thread that the parent has for that (faulthandler's) is not here.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, file=_STDERR, chain=True)
        signal.setitimer(signal.ITIMER_REAL, seconds + 1)
        gc.freeze()  # a process group that was collected here would wait for threads that do not exist
        _threads_of_parent = torch.get_num_threads()
        torch.set_num_threads(1)
        send.send_bytes(_outcome(work))
        status = 0
    finally:
        _flush()
        os._exit(status)


def _outcome(work: Callable[[], bytes]) -> bytes:
    """Whether something was raised, and what was returned or raised."""
    try:
        return pickle.dumps((False, work()))
    except BaseException as error:
        if not isinstance(error, ConfigurationError):  # which says all
            error.add_note("".join(traceback.format_exception(error)))
        try:
            answer = pickle.dumps((True, error))
            pickle.loads(answer)  # raises where an exception cannot be made from its arguments
        except Exception:
            return pickle.dumps((True, RuntimeError(f"{type(error).__name__}: {error}")))
        return answer


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _has_opened_an_accelerator() -> bool:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return False
    is_initialized = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    return is_initialized is None or bool(is_initialized())
