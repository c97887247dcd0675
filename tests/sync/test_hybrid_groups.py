"""PHD-PSGD on real pipelines, compared with an emulation in one process that follows the same decisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_sdpipe import AllReduce, ConfigurationError, SDPipeStrategy
from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.heterogeneity import Delays
from lightning_sdpipe.placement.model import Block, Model
from lightning_sdpipe.placement.network import Device, Network, write_network
from lightning_sdpipe.policies import registry
from lightning_sdpipe.sync import PHDPSGD, SemiDecentralized
from lightning_sdpipe.sync.hybrid_groups import HybridGroups
from lightning_sdpipe.sync.measured_groups import on_hosts, with_measured_groups
from lightning_sdpipe.sync.methods import method_of
from lightning_sdpipe.sync.synchronizer import Replica
from lightning_sdpipe.topology.groups import ProcessGroups
from lightning_sdpipe.topology.mesh import Mesh
from tests.features.running import Regression
from tests.patience import limit
from tests.strategy.test_strategy import fit
from tests.sync.hybrid_emulation import Emulation, Job
from tests.sync.test_methods import EqualReplicas
from tests.workers import run_workers

LR, MOMENTUM = 0.05, 0.9
BATCH = 4
MEASURED = Model("a chain", (Block(0.1, 1000, 50, 50, count=2),))


def batch(pipeline: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * pipeline + number)
    x = torch.randn(BATCH, 6, generator=generator)
    return x, x.sum(1, keepdim=True) + 0.1 * pipeline


class Rows(IterableDataset[tuple[Tensor, Tensor]]):
    """Mini-batches without a length, so that pipelines may have different numbers of them."""

    def __init__(self, pipeline: int, count: int) -> None:
        self._pipeline, self._count = pipeline, count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(self._count):
            yield from zip(*batch(self._pipeline, number), strict=True)


class OwnData(Regression):
    def __init__(self, rows: list[int], uneven: bool) -> None:
        super().__init__()
        self.rows, self.uneven = rows, uneven

    def train_dataloader(self) -> DataLoader[Any]:
        pipeline = self.trainer.strategy.distributed_sampler_kwargs["rank"]  # type: ignore[attr-defined]
        count = self.rows[pipeline]
        if self.uneven:
            return DataLoader(Rows(pipeline, count), BATCH)
        x, y = (torch.cat(parts) for parts in zip(*(batch(pipeline, n) for n in range(count)), strict=True))
        return DataLoader(TensorDataset(x, y), BATCH)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR, momentum=MOMENTUM)


def loss(module: nn.Module, pipeline: int, number: int) -> Tensor:
    x, y = (tensor.to(torch.float64) for tensor in batch(pipeline, number))
    return nn.functional.mse_loss(module.net(x), y)  # type: ignore[operator]


def stages_of(count: int) -> list[list[str]]:
    blocks = {1: [[0, 1, 2, 3]], 2: [[0, 1], [2, 3]], 4: [[0], [1], [2], [3]]}[count]
    has = (0, 2, 3)
    return [[f"net.{b}.{n}" for b in own if b in has for n in ("weight", "bias")] for own in blocks]


def compare(directory: Path, stages: int, groups: list[list[int]], **options: Any) -> Emulation:
    """Trains, and emulates the same decisions."""
    own = {name: options.pop(name) for name in ("rows", "uneven", "schedule", "delays") if name in options}
    values = {name: options.pop(name) for name in ("asynchronous", "staleness", "every") if name in options}
    rows, uneven = own.get("rows", [8] * sum(map(len, groups))), own.get("uneven", False)
    strategy = SDPipeStrategy(
        stages,
        sync=PHDPSGD(groups=groups, **values),  # type: ignore[arg-type]
        schedule=own.get("schedule", "1f1b"),
        delays=own.get("delays"),
        start_method="fork",
        log_dir=directory,
    )
    module, started = OwnData(rows, uneven), OwnData(rows, uneven).double()
    fit(
        directory,
        strategy,
        stages * len(rows),
        BATCH,
        module,
        max_epochs=1,
        precision="64-true",
        callbacks=[EqualReplicas()],
        use_distributed_sampler=False,
        **options,
    )
    job = Job(
        stages_of(stages),
        groups,
        rows,
        loss,
        LR,
        MOMENTUM,
        clip=options.get("gradient_clip_val"),
        uneven=uneven,
        accumulate=options.get("accumulate_grad_batches", 1),
    )
    emulation = Emulation(started, job, directory / "scheduler.jsonl")
    for name, expected in emulation.outcome().items():
        torch.testing.assert_close(module.state_dict()[name], expected.float(), rtol=1e-6, atol=2e-7)  # as float32
    return emulation


SLOW = Delays(0.4, 0.03)


@dataclass(frozen=True)
class UnlikeSpeeds:
    """Each two pipelines are slower than the two before them."""

    def delay(self, stage: int, pipeline: int, iteration: int, during: str) -> float:
        return 0.1 * (pipeline // 2) if during == "forward" else 0.0

    def track(self, rank: int) -> None:
        return None


UNEVEN = {"rows": [5, 3, 4, 7], "uneven": True, "delays": SLOW}
PAIRS = [[0, 3], [1, 2]]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("stages", "groups", "options"),
    [
        pytest.param(2, PAIRS, {**UNEVEN, "gradient_clip_val": 0.3}, id="data that ends at other times"),
        pytest.param(2, PAIRS, {**UNEVEN, "asynchronous": True, "staleness": 2}, id="asynchronous meetings"),
        pytest.param(1, [[0, 2], [1]], {"delays": SLOW}, id="unlike groups"),
        pytest.param(
            *(2, [[0], [1], [2]], {"every": 2, "delays": SLOW, "schedule": "gpipe"}),
            id="groups of one",
            marks=pytest.mark.slow,
        ),
        pytest.param(1, PAIRS, {"accumulate_grad_batches": 2}, id="accumulation"),
    ],
)
def test_pipelines_train_what_one_process_finds_by_the_same_decisions(
    tmp_path: Path, stages: int, groups: list[list[int]], options: dict[str, Any]
) -> None:
    emulation = compare(tmp_path, stages, groups, **options)
    parts = [{tuple(own) for own in groups if {w.pipeline for w in g.members} & {*own}} for g in emulation.groups]
    assert any(len(met) > 1 for met in parts)
    assert any(g.passive for g in emulation.groups) == ("asynchronous" in options)


@pytest.mark.distributed
def test_who_is_ahead_takes_part_in_meetings_while_it_waits_for_others(tmp_path: Path) -> None:
    options = {"staleness": 2, "every": 5, "delays": UnlikeSpeeds(), "rows": [10] * 6}
    emulation = compare(tmp_path, 1, [[0, 1], [2, 3], [4, 5]], **options)
    assert any(group.standing for group in emulation.groups)


class Adam(OwnData):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.distributed
def test_one_group_of_all_is_all_reduce(tmp_path: Path) -> None:
    """Bit for bit; the pipelines of a host are a group by default."""
    outcomes = []
    options: Any = {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 0.2}
    for sync in (AllReduce(), PHDPSGD()):
        strategy = SDPipeStrategy(2, sync=sync, schedule="pipedream", start_method="fork")
        _, model = fit(tmp_path / type(sync).__name__, strategy, 4, BATCH, Adam([7, 3], True), **options)
        outcomes.append(model.state_dict())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*(o.values() for o in outcomes), strict=True))


@pytest.mark.distributed
def test_models_averaged_within_groups_are_those_of_averaged_gradients(tmp_path: Path) -> None:
    """With an optimizer that is linear in them, if the groups all meet after every step."""
    outcomes = []
    for within in ("gradients", "models"):
        strategy = SDPipeStrategy(1, sync=PHDPSGD(group_size=2, staleness=1, within=within), start_method="fork")
        _, model = fit(tmp_path / within, strategy, 4, BATCH, OwnData([6] * 4, False), callbacks=[EqualReplicas()])
        outcomes.append(nn.utils.parameters_to_vector(model.parameters()))
    torch.testing.assert_close(*outcomes, rtol=1e-4, atol=1e-6)


class Tied(OwnData):
    """Both stages hold a weight, and without a flush the last one makes an update more than the first."""

    def __init__(self, rows: list[int], uneven: bool) -> None:
        super().__init__(rows, uneven)
        one, other = nn.Linear(8, 8), nn.Linear(8, 8)
        other.weight = one.weight
        self.net = nn.Sequential(nn.Linear(6, 8), one, nn.Tanh(), other, nn.Linear(8, 1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


@pytest.mark.distributed
def test_stages_count_their_updates_alike_although_shared_weights_are_late(tmp_path: Path) -> None:
    """Groups that all meet after every step compute what all-reduce computes, in the second epoch too."""
    outcomes = []
    for sync in (AllReduce(), PHDPSGD(group_size=1, staleness=1)):
        strategy = SDPipeStrategy(2, sync=sync, schedule="pipedream", start_method="fork")
        _, model = fit(tmp_path / type(sync).__name__, strategy, 4, BATCH, Tied([5, 5], False))
        outcomes.append(model.state_dict())
    for ours, theirs in zip(*(outcome.values() for outcome in outcomes), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def refused(rank: int) -> list[str]:
    """What two workers say to gradients of different models, and to a scheduler with other groups."""
    mesh = Mesh.build(2, 1)
    groups = ProcessGroups.open(mesh, limit())
    client: Any = SimpleNamespace(policy=registry.to_json(PHDPSGD(group_size=2)))
    replica = Replica(client, groups, [], [], [], limit())
    messages = []
    together = HybridGroups(replica, PHDPSGD(group_size=2))
    together._last_meeting = 7 + rank
    together.complete([])
    with pytest.raises(WorkerFailedError) as different:
        together.finish()
    messages.append(str(different.value))
    for wrong in (PHDPSGD(groups=[[0], [1]]), PHDPSGD(group_size=1, asynchronous=True)):  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError) as others:
            HybridGroups(replica, wrong).start()
        messages.append(str(others.value))
    client.policy = registry.to_json(PHDPSGD(within="models"))
    with pytest.raises(ConfigurationError, match="within='models', and this run has within='gradients'"):
        HybridGroups(replica, PHDPSGD()).start()
    client.policy = registry.to_json(PHDPSGD())
    with pytest.raises(ConfigurationError) as asynchronous:
        HybridGroups(replica, PHDPSGD(asynchronous=True)).start()
    return [*messages, str(asynchronous.value)]


@pytest.mark.distributed
def test_different_models_are_not_trained_on_and_other_groups_are_refused() -> None:
    for different, one, other, asynchronous in run_workers(2, refused):
        assert "the last meeting with other groups was, by pipeline, {0: 7, 1: 8}" in different
        assert "Start it with --policy phd_psgd --set groups=[[0], [1]]" in one
        assert one.split("Start")[1] == other.split("Start")[1]
        assert "asynchronous=False, and this run has asynchronous=True" in asynchronous


def test_the_pipelines_of_a_host_are_a_group() -> None:
    policy = on_hosts(method_of(PHDPSGD(staleness=3)), ["a", "b", "a", "b"]).policy
    assert policy == PHDPSGD(groups=[[0, 2], [1, 3]], staleness=3)  # type: ignore[arg-type]
    for told in (PHDPSGD(group_size=1), PHDPSGD(groups=[[0], [1]]), SemiDecentralized()):  # type: ignore[arg-type]
        assert on_hosts(method_of(told), ["a", "a"]).policy == told
    unlike = on_hosts(method_of(PHDPSGD()), ["a", "a", "b"]).policy
    assert unlike == PHDPSGD(groups=[[0, 1], [2]])  # type: ignore[arg-type]


def measured(path: Path, speeds: Sequence[float], hosts: str, model: Model | None = MEASURED) -> str:
    """A network in which hosts are ten times as far apart as the devices of one."""
    devices = tuple(Device(host, index, speed) for index, (host, speed) in enumerate(zip(hosts, speeds, strict=True)))
    rates = [[1e6 if a == b else 1e5 for b in hosts] for a in hosts]
    write_network(path, Network(devices, [[0.0] * len(hosts)] * len(hosts), rates, "made up", model))
    return str(path)


def test_groups_come_from_a_measured_network(tmp_path: Path) -> None:
    near = measured(tmp_path / "near.json", [1.0] * 4, "abab")
    assert with_measured_groups(method_of(PHDPSGD(groups=near, staleness=3)), 1, False).policy == PHDPSGD(
        groups=((0, 2), (1, 3)), times=(0.2,) * 4, staleness=3
    )
    alike = measured(tmp_path / "alike.json", [1.0, 0.5, 0.5, 1.0], "aaaa")
    strategy = SDPipeStrategy(1, sync=PHDPSGD(groups=alike, group_size=2))
    assert strategy.options.method.policy == PHDPSGD(groups=((0, 3), (1, 2)), times=(0.2, 0.4, 0.4, 0.2))
    given = PHDPSGD(groups=alike, group_size=2, times=(1, 1, 9, 9))
    assert with_measured_groups(method_of(given), 1, False).policy == PHDPSGD(
        groups=((0, 1), (2, 3)), times=(1, 1, 9, 9)
    )
    staged = with_measured_groups(method_of(PHDPSGD(groups=alike, group_size=1)), 2, False).policy
    assert staged == PHDPSGD(groups=((0,), (1,)), times=(0.2, 0.2)), "half of the model, as fast as the slower stage"


def test_a_network_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    good = measured(tmp_path / "good.json", [1.0] * 3, "aab")
    bare = measured(tmp_path / "bare.json", [1.0] * 3, "aab", None)
    for policy, stages, placed, message in (
        (PHDPSGD(groups=str(tmp_path / "none.json")), 1, False, "none.json cannot be read: No such file"),
        (PHDPSGD(groups=bare), 1, False, "has 3 devices and no model.*measure -o .* --model"),
        (PHDPSGD(groups=good), 2, False, "has 3 devices.*a multiple of num_stages=2"),
        (PHDPSGD(groups=good), 1, False, "Give a group_size that divides 3"),
        (PHDPSGD(groups=good, group_size=2), 1, False, "Give a group_size that divides 3"),
        (PHDPSGD(groups=good, times=(1, 1), group_size=1), 1, False, "times has 2 values, and the file 3 pipelines"),
        (PHDPSGD(groups=good), 1, True, "leave placement out"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            with_measured_groups(method_of(policy), stages, placed)
    with pytest.raises(ConfigurationError, match="is a file that SDPipeStrategy reads"):
        PHDPSGD(groups=good).make_policy(1, 3)
    with pytest.raises(ConfigurationError, match='"auto", a file of `sdpipe measure`'):
        PHDPSGD(groups="hosts")


def test_groups_that_do_not_fit_are_refused_before_any_process_starts() -> None:
    def start(sync: PHDPSGD, **options: Any) -> None:
        L.Trainer(accelerator="cpu", devices=4, strategy=SDPipeStrategy(2, sync=sync, **options), logger=False)

    with pytest.raises(ConfigurationError, match=r"groups=\[\[0, 1\], \[2\]\] name \[2\]"):
        start(PHDPSGD(groups=[[0, 1], [2]]))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="data='dealt' does not go with sync=PHDPSGD"):
        start(PHDPSGD(group_size=1), data="dealt")
