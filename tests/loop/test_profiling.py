from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler

from lightning_sdpipe.loop.loop import _profile_nothing


class Own(PassThroughProfiler):
    """Measures something after all."""


@pytest.mark.parametrize(("profiler", "spared"), [(None, True), (Own(), False), (SimpleProfiler(), False)])
def test_only_a_profiler_that_measures_nothing_is_spared(profiler: Any, spared: bool) -> None:
    trainer: Any = L.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, profiler=profiler)
    _profile_nothing(trainer)
    assert isinstance(trainer.profiler.profile("a hook"), nullcontext) is spared
    with trainer.profiler.profile("a hook"), trainer.profiler.profile("a hook within it"):
        assert list(getattr(trainer.profiler, "current_actions", {})) == (
            ["a hook", "a hook within it"] if isinstance(profiler, SimpleProfiler) else []
        )
