"""Several workers as threads of this process, each with a gloo group of its own over one store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from lightning_sdpipe.topology.groups import Replicas
from tests.patience import explained, limit

_names = count()


class Crew:
    """Workers 0 to N − 1, whose groups are made once and serve several tests.

    Args:
        size: N.
        timeout: seconds of every transfer, if one is to end by it.
    """

    def __init__(self, size: int, timeout: float | None = None) -> None:
        self.size = size
        self._store = dist.HashStore()
        self._timeout = timedelta(seconds=timeout) if timeout else limit()
        self.groups = self.open()

    def open(self) -> list[Any]:
        """A process group for each worker, of which torch.distributed has no name."""
        store = dist.PrefixStore(f"{next(_names)}", self._store)

        def make(rank: int) -> Any:
            return dist.ProcessGroupGloo(store, rank, self.size, self._timeout)

        return together(self.size, make)

    def replicas(self, rank: int) -> Replicas:
        return Replicas(self.groups[rank], range(self.size), 0, rank)


def together(size: int, work: Callable[[int], Any]) -> list[Any]:
    """What ``work(rank)`` returns in each of as many threads; raises what the first failing one raised."""
    outcomes: list[Any] = [None] * size
    failures: list[BaseException | None] = [None] * size

    def run(rank: int) -> None:
        try:
            with torch.no_grad():
                outcomes[rank] = work(rank)
        except BaseException as error:  # raised below, where the test sees it
            failures[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    with explained(lambda: [error for error in failures if error]):
        for thread in threads:
            thread.join()
    for failure in failures:
        if failure is not None:
            raise failure
    return outcomes
