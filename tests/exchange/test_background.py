"""The thread that works beside the training ends when nothing can give it work any more."""

from __future__ import annotations

import gc
import threading
from functools import partial

import pytest

from lightning_sdpipe.exchange.background import Background


def test_it_does_its_jobs_in_order_and_ends_with_its_owner() -> None:
    background, done = Background("a test's work", 10), list[int]()
    jobs = [background.do(partial(done.append, i)) for i in range(3)]
    for job in jobs:
        job.wait()
    assert done == [0, 1, 2]
    (thread,) = (each for each in threading.enumerate() if each.name == "a test's work")
    del background
    gc.collect()
    thread.join()
    assert not thread.is_alive()


def test_what_a_job_raises_is_raised_where_it_is_waited_for() -> None:
    background = Background("a test's work", 10)
    failed, after = background.do(lambda: [].pop()), background.do(lambda: None)
    with pytest.raises(IndexError):
        failed.wait()
    after.wait()
