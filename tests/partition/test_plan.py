from collections.abc import Callable
from itertools import pairwise

import pytest
from torch import nn

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.pipeline_cut import Balanced, PipelineCut, in_flight
from lightning_sdpipe.partition.plan import Plan, check, check_same_chain, plan, plans
from lightning_sdpipe.partition.profile import BlockProfile
from tests.partition.families import ResNet


def chain(*widths: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(a, b, bias=False) for a, b in pairwise(widths)])


def test_modules_of_one_block_stay_together() -> None:
    made = plan(ResNet(), 2, [1, 4])
    assert made.spans == (range(1), range(1, 5))
    assert made.chain[:4] == ("conv1", "bn1", "layer1.0", "layer1.1")
    assert made.module_spans == (range(3), range(3, 7))


def test_parameters_are_balanced() -> None:
    model = chain(10, 10, 1, 1, 1, 1)
    assert plan(model, 2, "uniform").spans == (range(3), range(3, 5))
    assert plan(model, 2, "parameters").spans == (range(1), range(1, 5))


def test_another_chain_than_that_of_rank_0_is_refused_with_both_sides() -> None:
    blocks = plan(chain(3, 3, 3), 2).blocks
    check_same_chain(chain(3, 3, 3), blocks, [9, 9])
    with pytest.raises(
        ConfigurationError, match=r"chain is 0 … 1 \(2\): 1 has 9 parameters on rank 0, and has 12 here"
    ):
        check_same_chain(chain(3, 3, 4), blocks, [9, 9])
    with pytest.raises(ConfigurationError, match="1 has 9 parameters on rank 0, and is missing here"):
        check_same_chain(chain(3, 3), blocks, [9, 9])


def test_too_many_sections_are_refused_before_any_process() -> None:
    cuts = [PipelineCut(60, "uniform", pipeline=0), PipelineCut(63, "uniform", pipeline=1)]
    with pytest.raises(ConfigurationError, match=r"divide the chain into .* sections, and at most 64"):
        check(chain(*[1] * 141), None, cuts)
    check(chain(*[1] * 141), None, cuts[:1])


def measured(blocks: object) -> list[BlockProfile]:
    return [BlockProfile(1, 2, size, size) for size in (10**9, 10**9, 0, 0, 0, 10**9)]


@pytest.mark.parametrize(
    ("partition", "first"),
    [
        ("balanced", 3),
        (Balanced(), 3),
        (Balanced([2.0, 1.0]), 4),
        (Balanced([0.5, 1.0]), 2),
        (Balanced([0.5, 1.0], bandwidth=1e8), 3),  # the cut after two blocks takes too long
    ],
)
def test_times_speeds_and_transfers_are_balanced(partition: Balanced, first: int) -> None:
    made = plan(chain(*[1] * 7), 2, partition, measure=measured)
    assert made.spans == (range(first), range(first, 6))


def test_an_output_that_cannot_travel_is_not_cut_after() -> None:
    def some_stay(blocks: object) -> list[BlockProfile]:
        return [BlockProfile(1, 2, None if i == 1 else 0, 0) for i in range(4)]

    assert plan(chain(*[1] * 5), 2, "balanced", measure=some_stay).spans == (range(1), range(1, 4))


def heavy(blocks: object) -> list[BlockProfile]:
    """Six blocks of 4 bytes of parameters, of which those of the first three keep 8 bytes of a micro-batch."""
    return [BlockProfile(1, 2, 0, 0, 4, 4, 8 if block < 3 else 0) for block in range(6)]


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "memory", "first"),
    [
        ("1f1b", 4, [1000, 1000], 3),
        ("1f1b", 4, [70, 1000], 2),  # a block takes 4 + 4 + 8, and 2 · 8
        ("gpipe", 4, [70, 1000], 1),  # or 4 · 8
        ("gpipe", 1, [70, 1000], 2),
        ("pipedream", 1, [80, 1000], 2),  # or 2 · 8, and 2 · 4 of weights
        ("pipedream", 1, [79, 1000], 1),
    ],
)
def test_a_stage_gets_what_fits_into_its_device(
    schedule: str, micro_batches: int, memory: list[float], first: int
) -> None:
    stages = in_flight(schedule, 2, micro_batches)
    made = plan(chain(*[1] * 7), 2, Balanced(memory=memory), measure=heavy, in_flight=stages)
    assert made.spans == (range(first), range(first, 6))


def test_what_does_not_fit_is_refused_before_it_is_measured() -> None:
    model = chain(*[1] * 7)  # 6 blocks of 4 bytes, 16 with gradients and Adam's state: 48 on either of two stages

    def measure(blocks: object) -> list[BlockProfile]:
        raise AssertionError("the model was loaded")

    with pytest.raises(ConfigurationError, match=r"stage 0 .* needs 48 bytes where there are 40 bytes: 8 bytes too"):
        plan(model, 2, Balanced(memory=[40, 40]), measure=measure, in_flight=in_flight("1f1b", 2, 2))
    with pytest.raises(AssertionError, match="loaded"):
        plan(model, 2, Balanced(memory=[40, 40], optimizer_state=0), measure=measure, in_flight=in_flight("1f1b", 2, 2))


def test_schedules_of_which_memory_is_not_known_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="what schedule='zero_bubble' keeps in memory"):
        in_flight("zero_bubble", 2, 2)
    with pytest.raises(ConfigurationError, match="what schedule='interleaved_1f1b' keeps in memory"):
        SDPipeStrategy(2, schedule="interleaved_1f1b", partition=Balanced(memory=[1, 1]))


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ("equal", "partition='equal' is not known"),
        ([1, 1, 1], "does not cut 4 blocks"),
        (Balanced([1.0]), "names 1 devices for num_stages=2"),
        (Balanced(memory=[1.0]), "memory=.* names 1 devices for num_stages=2"),
        ("balanced", "needs a batch"),
    ],
)
def test_what_does_not_fit_is_refused(partition: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan(chain(*[1] * 5), 2, partition)  # type: ignore[arg-type]


def test_a_bandwidth_must_be_positive() -> None:
    with pytest.raises(ConfigurationError, match="bandwidth=0"):
        Balanced(bandwidth=0)
    with pytest.raises(ConfigurationError, match="optimizer_state=-1"):
        Balanced(optimizer_state=-1)


def test_pipelines_have_one_chain_and_cuts_of_their_own() -> None:
    cuts = [PipelineCut(1, "balanced"), PipelineCut(2, Balanced(speeds=[1, 3])), PipelineCut(3, [1, 4, 1])]
    made = plans(chain(*[1] * 7), cuts, measure=lambda blocks: [BlockProfile(1, 1, 0, 0) for _ in blocks])
    assert [each.spans for each in made] == [(range(6),), (range(1), range(1, 6)), (range(1), range(1, 5), range(5, 6))]
    assert len({each.blocks for each in made}) == 1


def test_a_chain_is_tried_apart_only_if_another_one_may_be_tried_after_it() -> None:
    apart: list[list[Plan]] = []

    def attempt(work: Callable[[], list[Plan]]) -> list[Plan]:
        apart.append([])
        apart[-1].extend(made := work())
        return made

    model = nn.Module()  # which can be opened further
    model.first, model.second = nn.Linear(4, 4), nn.ModuleDict({"down": nn.Linear(4, 8), "up": nn.Linear(8, 4)})
    for num_stages, succeeds in ((2, True), (3, False)):
        made = plan(model, num_stages, "uniform", attempt=attempt)
        assert apart.pop() == [made] * succeeds
    assert plan(chain(*[1] * 7), 2, "uniform", attempt=attempt).spans == (range(3), range(3, 6))
    assert apart == []


def test_heavy_modules_that_are_opened_give_more_blocks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 1, 4))
    check(model, None, [PipelineCut(4, "auto")])
    for partition, num_stages in (("uniform", 4), ("auto", 10)):
        with pytest.raises(ConfigurationError, match=f"num_stages={num_stages} is more than the model's"):
            check(model, None, [PipelineCut(num_stages, partition)])  # type: ignore[arg-type]


def test_a_cut_that_is_none_is_refused_with_its_pipeline() -> None:
    cuts = [PipelineCut(1, pipeline=0), PipelineCut(7, pipeline=1)]
    for refuses in (lambda: check(chain(*[1] * 7), None, cuts), lambda: plans(chain(*[1] * 7), cuts)):
        with pytest.raises(
            ConfigurationError, match=r"pipeline 1: num_stages=7 is more than .* 6 blocks, 0 … 5. Use at most 6"
        ):
            refuses()
    with pytest.raises(ConfigurationError, match=r"pipeline 2: partition=\[2, 3\] does not cut 6 blocks"):
        check(chain(*[1] * 7), None, [PipelineCut(2, [2, 3], pipeline=2)])
