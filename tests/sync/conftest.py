"""What tests of methods in threads share."""

from __future__ import annotations

import pytest

from tests.sync.stage import Stage


@pytest.fixture(scope="module")
def stage(request: pytest.FixtureRequest) -> Stage:
    """As many replicas as the module's ``N`` says."""
    return Stage(request.module.N)
