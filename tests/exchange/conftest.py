"""What tests of exchanges in threads share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_sdpipe.exchange import encoded_mean, moving
from tests.exchange.threads import Crew


@pytest.fixture(scope="module")
def crew(request: pytest.FixtureRequest) -> Crew:
    """As many workers as the module's ``N`` says."""
    return Crew(request.module.N)


@pytest.fixture(scope="module")
def short_pieces(request: pytest.FixtureRequest) -> Iterator[None]:
    """As many values as the module's ``PIECE`` says; those of ``HALVED`` values are sent in halves, if it has that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moving, "PIECE", request.module.PIECE)
        patch.setattr(encoded_mean, "WORTH_HALVING", getattr(request.module, "HALVED", encoded_mean.WORTH_HALVING))
        yield
