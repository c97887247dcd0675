"""Hosts of tests, as far as the network is concerned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from recipes.harness import namespaces


@contextmanager
def hosts(count: int) -> Iterator[list[str]]:
    """:func:`recipes.harness.namespaces.hosts`. Skips the test where they cannot be made."""
    try:
        with namespaces.hosts(count) as names:
            yield names
    except namespaces.NotAllowed as reason:
        pytest.skip(str(reason))
