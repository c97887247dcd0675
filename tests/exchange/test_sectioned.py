"""Mean gradients by section, between pipelines of 1, 2 and 3 stages as threads."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe.exchange.background import Overlapped
from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.exchange.moving import GroupMean, Mover, finish
from lightning_sdpipe.exchange.outer_model import OuterModel
from lightning_sdpipe.exchange.payloads import EightBit, OneBit
from lightning_sdpipe.exchange.references import OwnReference
from lightning_sdpipe.exchange.ring_mean import RingCopies, RingMean
from lightning_sdpipe.exchange.sectioned import OwnSections, SectionedMover, SectionedRounds
from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.policies.decentralized import as_ring
from lightning_sdpipe.topology.groups import Replicas
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


LENGTHS = [(5, 40), (300,), (7, 1)]  # of the tensors of each section
Averaged = Callable[[list[np.ndarray], Group], list[np.ndarray]]


def groups(count: int, equal: bool = False) -> list[Group]:
    """At random, one after the other."""
    draw, found = random.Random(5), list[Group]()
    while len(found) < count:
        pipelines = sorted(draw.sample(range(3), draw.randint(1, 3)))
        raw = [1.0 if equal else draw.random() + 0.1 for _ in pipelines]
        weights = tuple(w / sum(raw) for w in raw)
        found.append(Group(tuple(Worker(0, i) for i in pipelines), weights, len(found), "drawn"))
    return found


def of_means(models: list[np.ndarray], group: Group) -> list[np.ndarray]:
    weights = {w.pipeline: weight for w, weight in zip(group.members, group.weights, strict=True)}
    mean = sum(weight * models[i] for i, weight in weights.items())
    return [mean if i in weights else model for i, model in enumerate(models)]


def run(
    make: Callable[[Replicas], Mover],
    meetings: Sequence[Group],
    exchange: Callable[[Mover, Sequence[Tensor], Group], object] = lambda mover, ts, group: finish(
        mover.start(ts, group)
    ),
) -> tuple[list[list[list[np.ndarray]]], list[int]]:
    """Of each section, by pipeline, its tensors after ``meetings``; and the bytes that each worker sent."""
    crews = [Crew(3) for _ in OWNERS]

    def work(number: int) -> Any:
        stage, pipeline = WORKERS[number]
        own = {s: crews[s].replicas(pipeline) for s, owners in enumerate(OWNERS) if owners[pipeline] == stage}
        held = {s: [start(pipeline, s, part) for part in range(len(LENGTHS[s]))] for s in own}
        mover = SectionedMover([make(replicas) for replicas in own.values()], lambda: [len(held[s]) for s in own])
        for group in meetings:
            if Worker(0, pipeline) in group.members:
                exchange(mover, [tensor for s in own for tensor in held[s]], group)
        return held, sum(replicas.traffic.bytes for replicas in own.values())

    found = together(len(WORKERS), work)
    by_section: list[list[list[np.ndarray]]] = [[[] for _ in range(3)] for _ in OWNERS]
    for (_, pipeline), (held, _) in zip(WORKERS, found, strict=True):
        for s, tensors in held.items():
            by_section[s][pipeline] = [tensor.numpy() for tensor in tensors]
    return by_section, [sent for _, sent in found]


def start(pipeline: int, section: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * part + 10 * pipeline + section)
    return torch.randn(LENGTHS[section][part], generator=generator)


def expected(meetings: Sequence[Group], averaged: Averaged = of_means) -> list[list[list[np.ndarray]]]:
    """The same, in float64 and one process."""
    found = []
    for s, lengths in enumerate(LENGTHS):
        parts = []
        for part in range(len(lengths)):
            models = [start(i, s, part).double().numpy() for i in range(3)]
            for group in meetings:
                models = averaged(models, group)
            parts.append(models)
        found.append([[models[i] for models in parts] for i in range(3)])
    return found


def assert_close(found: list[list[list[np.ndarray]]], wanted: list[list[list[np.ndarray]]], atol: float) -> None:
    for section, of_section in zip(found, wanted, strict=True):
        for tensors, models in zip(section, of_section, strict=True):
            for tensor, model in zip(tensors, models, strict=True):
                np.testing.assert_allclose(tensor, model, rtol=0, atol=atol)


def test_models_are_averaged_by_section_among_the_members_of_each_group() -> None:
    meetings = groups(30)
    found, sent = run(GroupMean, meetings)
    assert_close(found, expected(meetings), 1e-6)
    for number, (stage, pipeline) in enumerate(WORKERS):
        own = [s for s, owners in enumerate(OWNERS) if owners[pipeline] == stage]
        sizes = [len(group.members) for group in meetings if Worker(0, pipeline) in group.members]
        whole = 4 * sum(sum(LENGTHS[s]) for s in own)
        share = sum(2 * (k - 1) / k * whole for k in sizes)
        assert abs(sent[number] - share) <= 4 * len(sizes) * sum(len(LENGTHS[s]) for s in own) * 2


def test_means_of_sections_may_come_during_the_next_step_and_in_few_bits() -> None:
    meetings, beside = groups(12, equal=True), {}

    def late(mover: Mover, tensors: Sequence[Tensor], group: Group) -> None:
        overlapped = beside.setdefault(id(mover), Overlapped(mover, 20.0))
        overlapped.begin(tensors, group)
        overlapped.end()

    found, _ = run(lambda replicas: EncodedMean(replicas, OwnReference(EightBit(block=8)), None), meetings, late)
    for s, section in enumerate(found):  # messages of 8 bits leave the mean where it is
        for part in range(len(LENGTHS[s])):
            before = np.mean([start(i, s, part).double().numpy() for i in range(3)], 0)
            np.testing.assert_allclose(np.mean([tensors[part] for tensors in section], 0), before, rtol=0, atol=1e-6)


def test_a_ring_goes_by_sections_too() -> None:
    together_ = [Group(tuple(Worker(0, i) for i in range(3)), (1 / 3,) * 3, k, "all") for k in range(5)]
    meetings = [as_ring(group) for group in together_]
    found, _ = run(lambda replicas: RingMean(replicas, RingCopies(None, replicas.pipeline)), meetings)
    assert_close(found, expected(meetings), 1e-6)  # in a ring of three all are neighbours


def test_models_of_one_bit_end_with_the_same_bits_on_all_workers_of_a_section() -> None:
    crews, everybody = [Crew(3) for _ in OWNERS], tuple(Worker(0, i) for i in range(3))

    def work(number: int) -> Any:
        stage, pipeline = WORKERS[number]
        own = {s: crews[s].replicas(pipeline) for s, owners in enumerate(OWNERS) if owners[pipeline] == stage}
        codings = {s: OuterModel(OneBit(block=16), pipeline) for s in own}
        held = {s: [torch.zeros(length) for length in LENGTHS[s]] for s in own}
        for s, coding in codings.items():
            coding.begin(held[s])
        movers = [EncodedMean(replicas, codings[s], None) for s, replicas in own.items()]
        mover = SectionedMover(movers, lambda: [len(held[s]) for s in own])
        for meeting in range(6):
            for s, tensors in held.items():
                for part, tensor in enumerate(tensors):
                    tensor.add_(start(pipeline, s, part))  # each trains in a direction of its own
            group = Group(everybody, (1 / 3,) * 3, meeting, "all")
            finish(mover.start([tensor for s in own for tensor in held[s]], group))
        return held

    found = together(len(WORKERS), work)
    for s, owners in enumerate(OWNERS):
        first, *others = (found[WORKERS.index((stage, pipeline))][s] for pipeline, stage in enumerate(owners))
        for other in others:
            assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
        assert all(bool(tensor.abs().max() > 0.5) for tensor in first), "it moved as its replicas did"
