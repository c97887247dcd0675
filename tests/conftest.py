"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("shared host", deadline=None)  # where an example may wait long for a core
settings.register_profile("long", deadline=None, max_examples=10_000)  # --hypothesis-profile=long, before a release
settings.load_profile("shared host")
torch.set_num_threads(1)  # test files run side by side, and threads of small tensors would only wait for each other


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Lightning keeps seeds and ports in the environment, where the next test would find them."""
    before = dict(os.environ)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(before)
