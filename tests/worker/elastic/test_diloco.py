"""DiLoCo of the pipelines that are there, on real processes that are killed in every phase of a round."""

from __future__ import annotations

import json
import os
import zlib
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.exchange.outer_model import Nesterov
from lightning_sdpipe.exchange.outer_state import NewBase, OuterRoundsModel, OuterState
from lightning_sdpipe.exchange.payloads import EightBit, Full, OneBit
from lightning_sdpipe.membership.members import Met
from lightning_sdpipe.sync import DiLoCo, LocalSGD
from lightning_sdpipe.sync.outer_rounds_averaging import meet
from recipes.harness import pipelines
from tests.worker.elastic.jobs import SAMPLES, ElasticRun, die_in, elastic_run, fit

pytestmark = pytest.mark.distributed


def note_bases() -> None:
    """Write down each base that this process trains from, and the number of the round that has made it."""
    diary, adopt = pipelines.Diary(), OuterState.adopt

    def adopts(state: OuterState, new: NewBase, tensors: Sequence[Tensor], *sent: Any) -> None:
        before = state.rounds
        adopt(state, new, tensors, *sent)
        digest = zlib.crc32(b"".join(tensor.numpy().tobytes() for tensor in state.codec.state()))
        made = state.rounds != before and bool(new.moved) and not new.received
        diary.say(base=state.rounds, digest=digest, behind=bool(new.received), made=made)

    OuterState.adopt = adopts  # type: ignore[method-assign]


PHASES = {"begun": ("make", False), "made": ("make", True), "adopted": ("adopt", True)}
"""Of a round: before it sends its part, when it has sent it, or when it has the new base."""


def train(directory: Path, sync: Any, exchange: Exchange, phase: str = "", rank: int = 0) -> None:
    if phase and int(os.environ["RANK"]) == rank:
        name, after = PHASES[phase]
        die_in(OuterState, name, 3, after)
    os.environ["SDPIPE_HOST"] = "aab"[int(os.environ["SDPIPE_PIPELINE"])]
    note_bases()
    fit(directory, SAMPLES, {"sync": sync, "exchange": exchange})


def check(run: ElasticRun, pipelines: list[int]) -> int:
    """That a round's base is the same wherever it is adopted; how many were."""
    seen: dict[int, set[int]] = {}
    for pipeline in pipelines:
        for start in run.rows(pipeline, 0):
            for row in start:
                if row.get("made"):
                    seen.setdefault(row["base"], set()).add(row["digest"])
    assert {len(digests) for digests in seen.values()} == {1}, seen
    return len(seen)


def check_that_what_died_is_trained_by_others(run: ElasticRun, died: int) -> None:
    """What the first start of ``died`` trained after its last round counts as if it had not."""
    rows = run.rows(died, 0)[0]
    last = max((number for number, row in enumerate(rows) if "base" in row), default=0)
    epoch = rows[-1].get("epoch", 0)  # at the end of the one before, all met
    lost = Counter(sample for row in rows[last:] if row.get("epoch") == epoch for sample in row.get("trained", ()))
    kept = run.trained()[epoch] - lost
    assert lost
    assert set(kept) == set(range(SAMPLES)), sorted(set(range(SAMPLES)) - set(kept))


@pytest.mark.parametrize(
    ("sync", "exchange", "phase", "stages"),
    [
        (DiLoCo(every=4, weights="samples"), Exchange(hierarchy="hosts"), "begun", 1),
        (DiLoCo(every=4, delay=3), Exchange(EightBit(), overlap="step"), "adopted", 1),
        (LocalSGD(every=4), Exchange(OneBit()), "made", 2),
    ],
    ids=["all by machines and samples", "eight bits beside the next steps", "plain means in one bit in two stages"],
)
def test_one_is_killed_in_a_round_and_comes_back(
    tmp_path: Path, sync: Any, exchange: Exchange, phase: str, stages: int
) -> None:
    with elastic_run(tmp_path, stages, 3) as run:
        run.lose_and_regain(partial(train, tmp_path, sync, exchange, phase), partial(train, tmp_path, sync, exchange))
        run.finish_well(sync=sync, exchange=exchange)
        assert check(run, [0, 1, 2]) > 4
        if phase == "begun":  # else the new base may have it
            check_that_what_died_is_trained_by_others(run, 2)


class MetBarriers:
    """Barriers at which two pipelines are, the other with a base of its own and what it says of itself."""

    def __init__(self, of_other: list[float]) -> None:
        self.of_other, self.weights = of_other, dict[int, float]()

    def meet(self, says: bytes) -> Met:
        other = json.dumps(self.of_other).encode() if says[:1] == b"[" else says
        return Met(0, "pause", (3, 5), (says, other), 0)

    def weighted_sum(self, tensors: Any, met: Met, weights: dict[int, float]) -> bool:
        self.weights = weights
        return True


@pytest.mark.parametrize(
    ("samples", "weights"), [(None, {3: 0.5, 5: 0.5}), (6.0, {3: 0.75, 5: 0.25}), (0.0, {3: 0.0, 5: 1.0})]
)
def test_all_that_meet_weigh_as_their_method_says(samples: float | None, weights: dict[int, float]) -> None:
    barriers: Any = MetBarriers([0, 4, 1 if samples is None else 2.0])
    codec, model = OuterRoundsModel(Full(), 3, Nesterov(), 0.0), [torch.arange(4.0)]
    codec.begin(model)
    state = OuterState(codec)
    state.samples = samples
    meet(barriers, state, model, 4)
    assert (barriers.weights, state.rounds) == (weights, 1)
