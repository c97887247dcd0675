"""Cuts by counted work: architectures of transformers are cut about evenly, and what cannot be is said."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition import rehearsal
from lightning_sdpipe.partition.costs import CPU as RATES
from lightning_sdpipe.partition.costs import Costs
from lightning_sdpipe.partition.cut_step import CutModel
from lightning_sdpipe.partition.message import Layout, Message
from lightning_sdpipe.partition.ownership import assign_owners, keep_only, parameters_held
from lightning_sdpipe.partition.pipeline_cut import PipelineCut
from lightning_sdpipe.partition.plan import Plan, plans
from lightning_sdpipe.partition.rehearsal import StepCalls
from lightning_sdpipe.partition.rehearsal_result import RehearsalResult
from tests.partition.architectures import SAMPLE, build
from tests.partition.cutting import Stepping
from tests.partition.families import ResNet

CPU = torch.device("cpu")
MUCH = 0.75


def cut_of(
    module: nn.Module,
    batches: Sequence[Any],
    num_stages: int = 2,
    partition: Any = "auto",
    memory: float = float("inf"),
) -> tuple[Plan, list[int]]:
    """The plan, as a run makes it, and the number of traced runs of each chain that was rehearsed."""
    step = StepCalls("training_step", [(batch, ()) for batch in batches], True)
    runs = []

    def rehearse(chain: Sequence[str]) -> RehearsalResult:
        found = rehearsal.rehearse(module, chain, [step], CPU)
        runs.append(len(found.traces["training_step"]))
        return found

    def count() -> Costs:
        return rehearsal.count(module, step, RATES, CPU)

    (made,) = plans(module, [PipelineCut(num_stages, partition)], None, None, rehearse, count, memory)
    return made, runs


def test_too_many_stages_are_refused_with_the_largest_number_that_is_possible() -> None:
    module, batches = Stepping(ResNet(), lambda whole, batch: whole(batch).mean()), [torch.ones(2, 3, 16, 16)]
    with pytest.raises(ConfigurationError, match=r"num_stages=99 .* blocks, model\.conv1 … model\.fc\.") as refused:
        cut_of(module, batches, 99)
    most = int(str(refused.value).partition("Use at most ")[2].partition(",")[0])
    cut_of(module, batches, most)


# ---------------------------------------------------------------------------- architectures


def seconds_of_stages(module: Stepping, cut: Plan, batches: Sequence[Any], repeats: int = 6) -> list[float]:
    """The processor time of each stage's forward and backward of one batch: the least of a few."""
    modules = [copy.deepcopy(module) for _ in cut.spans]
    owners = assign_owners(module, cut.chain, cut.module_spans, readers=cut.readers)
    for stage, own in enumerate(modules):
        keep_only(own, owners, stage, CPU)
    cuts = [CutModel(own, cut.chain, [span], CPU) for own, span in zip(modules, cut.module_spans, strict=True)]
    least = [math.inf] * len(cuts)
    try:
        for number in range(repeats):
            batch = batches[number % len(batches)]
            seconds = _seconds(modules, cuts, cut, batch, number)
            least = [min(pair) for pair in zip(least, seconds, strict=True)]
    finally:
        for each in reversed(cuts):
            each.restore()
    return least


def _seconds(modules: Sequence[Stepping], cuts: Sequence[CutModel], cut: Plan, batch: Any, number: int) -> list[float]:
    seconds, outcomes, received = [], [], []
    message: Message | None = None
    for own, running, span in zip(modules, cuts, cut.module_spans, strict=True):
        running.streams.begin(0, number)
        begin = time.process_time()
        outcome = running.run(span, partial(own.training_step, batch), message, cut.travel["training_step"])
        seconds.append(time.process_time() - begin)
        outcomes.append(outcome)
        if isinstance(outcome, Message):
            arrived = [t.detach().clone().requires_grad_(t.requires_grad) for t in outcome.tensors]
            received.append(arrived)
            message = Message(arrived, outcome.numbers, Layout.decode(outcome.layout.encode()))
    for stage in reversed(range(len(cuts))):
        begin = time.process_time()
        if isinstance(outcome := outcomes[stage], Message):
            grads = [(t, a.grad) for t, a in zip(outcome.tensors, received[stage], strict=True) if a.grad is not None]
            torch.autograd.backward([t for t, _ in grads], [gradient for _, gradient in grads])
        else:
            outcome.backward()  # type: ignore[no-untyped-call]
        seconds[stage] += time.process_time() - begin
    return seconds


def largest_stage(module: nn.Module, cut: Plan) -> float:
    """The share of the stage that holds most of all parameters; Adam's states are twice as many bytes."""
    owners = assign_owners(module, cut.chain, cut.module_spans, readers=cut.readers)
    held = [parameters_held(module, owners, stage) for stage in range(len(cut.spans))]
    return max(held) / sum(p.numel() for p in module.parameters())


def cut_by_counted_work(name: str) -> tuple[nn.Module, Plan, list[Any], float]:
    """The module, its cut into two stages, the batches of the rehearsal, and the processor time that it took."""
    model, batch = build(name)
    module, batches = Stepping(model, lambda own, given: own(**given).loss), [batch(1), batch(3)]
    begin = time.process_time()
    cut, runs = cut_of(module, batches)
    assert runs == [2], "one chain is rehearsed, and settles at once"
    return module, cut, batches, time.process_time() - begin


def outcome_of(name: str) -> tuple[float, float, float, str]:
    """The largest shares of measured time and of bytes, the time of planning in steps, and the note."""
    module, cut, batches, planning = cut_by_counted_work(name)
    steps = []
    for number in range(4):
        begin = time.process_time()
        module.training_step(batches[number % 2]).backward()
        steps.append(time.process_time() - begin)
        module.zero_grad()
    seconds = seconds_of_stages(module, cut, batches)
    return max(seconds) / sum(seconds), largest_stage(module, cut), planning / median(steps), cut.note


@pytest.mark.parametrize(
    "name",
    [
        "BertForMaskedLM",
        "BartForConditionalGeneration",  # the encoder costs half, and has no list that is longest
        "SwinForImageClassification",  # one stage of the network costs half, another holds most
        "SqueezeBertForMaskedLM",
        "VisionTextDualEncoderModel",  # containers lie at unlike depths
        "PoolFormerForImageClassification",
    ],
)
def test_an_architecture_is_cut_about_evenly(name: str) -> None:
    module, cut, *_ = cut_by_counted_work(name)
    assert largest_stage(module, cut) <= MUCH
    assert not cut.note, "no stage has more than three quarters of the counted work"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_sample_is_cut_about_evenly(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = {name: outcome_of(name) for name in SAMPLE}
    with capsys.disabled():
        for name, (seconds, held, planning, note) in outcomes.items():
            print(f"{name:45} time {seconds:.2f}  bytes {held:.2f}  planning {planning:5.1f} steps  {note[:60]}")
    slow = [name for name, (seconds, *_) in outcomes.items() if seconds > MUCH]
    large = [name for name, (_, held, *_) in outcomes.items() if held > MUCH]
    assert len(slow) <= 0.05 * len(outcomes), slow
    assert len(large) <= 0.10 * len(outcomes), large
    assert all(outcomes[name][3] for name in slow), "it is said why"
    assert median(planning for _, _, planning, _ in outcomes.values()) <= 25


# ------------------------------------------------------------------------------------ classes


class Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())  # type: ignore[no-any-return]


class Encoder(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Named(nn.Module):
    """Layers that are in no container."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = (Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.fourth(self.third(self.second(self.first(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Runs some of its modules."""

    def __init__(self, runs: Callable[[Any, Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self.runs = runs

    def training_step(self, x: Tensor) -> Tensor:
        return self.runs(self, x).square().mean()


BATCHES = [torch.randn(4, 8, generator=torch.Generator().manual_seed(number)) for number in range(2)]


def stages_of(model: Model, num_stages: int = 2, **options: Any) -> list[list[str]]:
    cut, _ = cut_of(model, BATCHES, num_stages, **options)
    return [[path for block in cut.blocks[span.start : span.stop] for path in block] for span in cut.spans]


def test_a_container_that_the_step_does_not_use_draws_no_cut() -> None:
    spare = nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)])
    model = Model(lambda own, x: own.encoder(x), spare=spare, encoder=Named())
    first, second = stages_of(model)
    assert [path for path in first if "encoder" in path] == ["encoder.first", "encoder.second"]
    assert [path for path in second if "encoder" in path] == ["encoder.third", "encoder.fourth"]


@pytest.mark.parametrize("heavy", ["tower", "decoder"])
def test_a_container_that_costs_more_than_half_is_opened(heavy: str) -> None:
    modules: dict[str, nn.Module] = {"tower": Encoder(2), "decoder": Encoder(2), heavy: Encoder(6)}
    first, second = stages_of(Model(lambda own, x: own.decoder(own.tower(x)), **modules))
    cut = [path for path in (*first, *second) if path.startswith(f"{heavy}.layers")]
    assert len(cut) == 6
    assert first[-1].startswith(heavy)
    assert second[0].startswith(heavy)


def test_a_module_that_is_not_called_itself_is_opened() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Layer(), Layer()

    model = Model(lambda own, x: own.parts.two(own.parts.one(x)), parts=Parts())
    assert stages_of(model) == [["parts.one"], ["parts.two"]]


KEPT: list[Tensor] = []


class Keeping(Layer):
    def forward(self, x: Tensor) -> Tensor:
        KEPT[:] = [x * 2]
        return super().forward(x)


class Taking(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + KEPT[0])


def test_another_cut_is_taken_where_the_fastest_is_refused() -> None:
    layers = nn.Sequential(Layer(), Keeping(), Taking(), Layer())
    model = Model(lambda own, x: own.layers(x), layers=layers)
    assert sorted(map(len, stages_of(model))) == [1, 3]
    with pytest.raises(Exception, match=r"layers\.1' makes a value"):
        cut_of(model, BATCHES, partition="uniform")


def test_what_is_not_divided_is_said() -> None:
    model = Model(
        lambda own, x: own.head(own.shared(own.shared(own.shared(own.entry(x))))),
        entry=nn.Linear(8, 8), shared=Layer(), head=nn.Linear(8, 8),
    )  # fmt: skip
    cut, _ = cut_of(model, BATCHES)
    assert "on stage 1 of 2. Block 'head', with what is computed before it outside of blocks" in cut.note
    assert "runs more than once" in cut.note
    assert not cut_of(Model(lambda own, x: own.encoder(x), encoder=Encoder()), BATCHES)[0].note


def test_memory_comes_first_where_a_stage_would_not_fit() -> None:
    large = [nn.Linear(8, 400), nn.Linear(400, 8), nn.Linear(8, 400), nn.Linear(400, 8)]
    model = Model(lambda own, x: own.layers(x), layers=nn.Sequential(*[Layer() for _ in range(8)], *large))
    assert len(stages_of(model)[0]) < 8
    fits = 4 * sum(p.nbytes for layer in large[:3] for p in layer.parameters())
    for first in (stages_of(model, memory=fits)[0], stages_of(model, memory=1)[0]):
        assert len(first) >= 9


def test_a_model_that_no_step_runs_is_cut_by_bytes() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(100, 100), *[nn.Linear(100, 10) for _ in range(4)], nn.Linear(100, 50))
    (made,) = plans(model, [PipelineCut(2)])
    assert made.spans == (range(1), range(1, 6))


def test_pipelines_of_unlike_depths_share_a_chain() -> None:
    model = Model(lambda own, x: own.encoder(x), encoder=Encoder(6))
    step = StepCalls("training_step", [(batch, ()) for batch in BATCHES], True)
    made = plans(
        model,
        [PipelineCut(depth, pipeline=number) for number, depth in enumerate((1, 2, 3))],
        None,
        None,
        partial(rehearsal.rehearse, model, steps=[step], device=CPU),
        partial(rehearsal.count, model, step, RATES, CPU),
    )
    assert [[len(span) for span in each.spans] for each in made] == [[6], [3, 3], [2, 2, 2]]
    assert len({each.chain for each in made}) == 1
