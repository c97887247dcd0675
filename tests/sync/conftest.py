"""What tests of methods in threads share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.exchange.threads import one_thread
from tests.sync.stage import Stage


@pytest.fixture(scope="module")
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """As many replicas as the module's ``N`` says."""
    with one_thread():
        yield Stage(request.module.N)
