"""Mean gradients by section, between pipelines of 1, 2 and 3 stages as threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe.exchange.sectioned import OwnSections, SectionedRounds
from tests.exchange.threads import Crew, together

OWNERS = [(0, 0, 0), (0, 0, 1), (0, 1, 2)]
WORKERS = [(stage, pipeline) for pipeline in range(3) for stage in range(pipeline + 1)]
SIZES = [(5, 3), (7,), (2, 2)]  # of the parameter of each section


def gradient(pipeline: int, section: int, round_: int) -> Tensor:
    return torch.randn(SIZES[section], generator=torch.Generator().manual_seed(100 * round_ + 10 * pipeline + section))


@pytest.mark.parametrize(("resting", "weights"), [(None, (1.0, 1.0, 1.0)), (1, (1.0, 1.0, 1.0)), (1, (3.0, 4.0, 5.0))])
def test_each_section_is_averaged_among_its_owners(resting: int | None, weights: tuple[float, ...]) -> None:
    crews = [Crew(3) for _ in OWNERS]

    def work(number: int) -> Any:
        stage, pipeline = WORKERS[number]
        own = {s: crews[s].replicas(pipeline) for s, owners in enumerate(OWNERS) if owners[pipeline] == stage}
        held = {s: nn.Parameter(torch.zeros(SIZES[s])) for s in sorted(own, reverse=True)}
        copy = nn.Parameter(torch.zeros(4))  # of another stage's, which that one speaks for
        sections = OwnSections(own, {parameter: s for s, parameter in held.items()}, {})
        rounds = SectionedRounds([copy, *held.values()], sections, 2**20, True)
        rounds.weight = weights[pipeline]
        outcomes = []
        for round_ in range(3):
            gradients = [torch.full((4,), 7.0), *(gradient(pipeline, s, round_) for s in held)]
            trains = pipeline != resting
            if trains and round_ != 1:  # the backward tells of some of them
                rounds.gradient_ready(1, gradients[1])
            rounds.complete(gradients if trains else [None] * len(gradients), trains)
            outcome = rounds.wait()
            assert outcome.members == (3 if resting is None else 2)
            outcomes.append(dict(zip(held, outcome.gradients[1:], strict=True)))
            assert outcome.gradients[0] is (gradients[0] if trains else None)
        assert rounds.nbytes == sum(parameter.nbytes for parameter in held.values())
        return outcomes

    found = together(len(WORKERS), work)
    for (stage, pipeline), outcomes in zip(WORKERS, found, strict=True):
        for round_, means in enumerate(outcomes):
            assert sorted(means) == [s for s, owners in enumerate(OWNERS) if owners[pipeline] == stage]
            for section, mean in means.items():
                there = [i for i in range(3) if i != resting]
                total = sum(weights[i] * gradient(i, section, round_) for i in there)
                torch.testing.assert_close(mean, total / sum(weights[i] for i in there), rtol=0, atol=1e-6)


def test_what_is_not_finite_is_told_on_its_section() -> None:
    crews = [Crew(2) for _ in range(2)]

    def work(pipeline: int) -> Any:
        held = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
        own = OwnSections({s: crews[s].replicas(pipeline) for s in range(2)}, {p: s for s, p in enumerate(held)}, {})
        rounds = SectionedRounds(held, own, 2**20, True)
        rounds.complete([torch.ones(3), torch.full((3,), torch.nan if pipeline else 1.0)])
        return rounds.wait().nonfinite

    assert together(2, work) == [[1], [1]]
