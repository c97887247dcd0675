"""What an advice would gain, by simulation of what was recorded; and whether each can be followed."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import hydra
import pytest

import lightning_sdpipe.seeing
from lightning_sdpipe import ADPSGD, PHDPSGD, Decentralized, LocalSGD, PartialReduce
from lightning_sdpipe import __all__ as ALL
from lightning_sdpipe.configuration import check
from lightning_sdpipe.policies import Worker, registry
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler.rows import About
from lightning_sdpipe.seeing.detectors import compute_straggler, findings
from lightning_sdpipe.seeing.finding import Finding
from lightning_sdpipe.seeing.page import in_one_line
from lightning_sdpipe.seeing.recording import Recording, of_log
from lightning_sdpipe.seeing.what_if import advised, what_if
from lightning_sdpipe.simulate import Work, jittered, simulate
from lightning_sdpipe.sync.capabilities import capabilities_of
from lightning_sdpipe.sync.methods import method_of
from tests.recipes.test_conf import composed
from tests.seeing.recordings import Own, simulated_log

GOLDEN = Path(__file__).parent / "golden"
STEADY = jittered(0.06, 0.05)
FOLLOWS = About("here", "cpu", 0, follows_speed=True)
SLOW = Worker(0, 3)


def found_in(recording: Recording) -> dict[str, Finding]:
    return {finding.kind: finding for finding in advised(recording, findings(recording))}


@pytest.mark.parametrize(
    ("log", "kind", "override", "least", "most"),
    [
        ("stalls", "stalling", "sync=semi_decentralized", 1.2, 2.0),
        ("loading", "data_bound", "data.num_workers=4", 1.1, 1.4),
        ("cut", "unbalanced_cut", "partition=balanced", 1.03, 1.2),
    ],
)
def test_real_logs_show_what_was_done_to_their_runs_and_what_advice_gains(
    log: str, kind: str, override: str, least: float, most: float
) -> None:
    found = found_in(of_log(GOLDEN / f"{log}.jsonl"))
    assert [name for name, finding in found.items() if finding.severity != "note"] == [kind]
    (advice,) = found[kind].advice
    assert advice.override == override
    assert advice.gain is not None
    assert least <= advice.gain <= most


def log_of(
    path: Path, own: Own, policy: PolicyConfig, told: Own | None = None, about: About | None = None
) -> Recording:
    """Of a simulated run, whose workers say that they computed so long as ``told``."""

    def seconds(worker: Worker, number: int) -> float:
        phases = own(worker, number)
        return sum(phases.values()) if isinstance(phases, Mapping) else phases

    run = simulate(policy, Work(1, 4, 140, seconds, "1f1b", 1))
    about = about or About("here", "cpu", 0, 8, "1f1b", 1)
    return of_log(simulated_log(path / "log.jsonl", policy, run, told or own, about))


def slowed(worker: Worker, number: int) -> float:
    return STEADY(worker, number) * (2 if worker == SLOW else 1)


def test_the_unedited_simulation_is_the_run(tmp_path: Path) -> None:
    model = what_if(log_of(tmp_path, slowed, AllReduceModels()))
    assert model is not None
    assert model.gain() == 1
    peers = {worker: model.own[Worker(0, 0)] if worker == SLOW else own for worker, own in model.own.items()}
    assert model.gain(peers) == pytest.approx(2.0, rel=0.1)


def test_a_gain_is_given_for_what_the_strategy_can_do(tmp_path: Path) -> None:
    finding = found_in(log_of(tmp_path, slowed, AllReduceModels()))["compute_straggler"]
    gains = {advice.override: advice.gain for advice in finding.advice}
    assert gains["sync=semi_decentralized"] == pytest.approx(3.5 / 2, rel=0.1)
    assert gains["sync=all_reduce strategy.num_micro_batches=8 strategy.batch_by_speed=true"] is None
    line = in_one_line(log_of(tmp_path / "again", slowed, AllReduceModels()))
    assert re.search(
        r'let the others go on without it: SDPipeStrategy\(sync="semi_decentralized"\) \(1\.\d\d × as', line
    )


@pytest.mark.parametrize("sync", ["AllReduce", "all_reduce"])
def test_averages_of_gradients_are_simulated_however_they_were_asked_for(sync: str, tmp_path: Path) -> None:
    about = About("here", "cpu", 0, 8, "1f1b", 1, sync)
    seen = log_of(tmp_path, slowed, AllReduceModels(), about=about)
    assert what_if(replace(seen, policy={"type": "no_sync"})) is not None


@pytest.mark.parametrize(
    "policy",
    [SemiDecentralized(), PartialReduce(), LocalSGD(8), ADPSGD(), Decentralized(), PHDPSGD()],
    ids=registry.name_of,
)
def test_no_dealing_is_advised_where_the_method_refuses_it(policy: PolicyConfig, tmp_path: Path) -> None:
    """Nor what the run does already."""
    seen = replace(log_of(tmp_path, slowed, AllReduceModels()), policy=registry.to_plain(policy))
    (finding,) = compute_straggler(seen)
    dealt = capabilities_of(method_of(policy)).deals is None
    assert ('SDPipeStrategy(data="dealt")' in [each.python for each in finding.advice]) == dealt
    (finding,) = compute_straggler(replace(seen, about=dict.fromkeys(seen.series, FOLLOWS)))
    assert [each.python for each in finding.advice] == [""]


def test_no_gain_is_given_where_the_simulation_does_not_tell_what_was_measured(tmp_path: Path) -> None:
    seen = log_of(tmp_path, slowed, AllReduceModels(), told=lambda w, n: slowed(w, n) * 0.8)
    assert what_if(seen) is None
    finding = found_in(seen)["compute_straggler"]
    assert [advice.gain for advice in finding.advice] == [None, None]


@pytest.mark.parametrize(
    "about", [About("here", "cpu", 0), About("here", "cpu", 0, 8, "zero_bubble", 4)], ids=["old log", "schedule"]
)
def test_what_cannot_be_simulated_is_not(about: About, tmp_path: Path) -> None:
    assert what_if(log_of(tmp_path, slowed, AllReduceModels(), about=about)) is None


def test_a_log_does_not_choose_what_is_imported(tmp_path: Path) -> None:
    seen = log_of(tmp_path, slowed, AllReduceModels())
    assert what_if(replace(seen, policy={"type": "antigravity:Policy"})) is None
    assert what_if(replace(seen, policy={"type": "no_sync"})) is None, "it may be that of a parameter server"


def stalls(worker: Worker, number: int) -> float:
    late = random.Random(f"{worker}{number}").random() < 0.1
    return STEADY(worker, number) + (0.3 if late else 0.0)


def test_a_window_that_is_too_long_is_told_with_a_better_one(tmp_path: Path) -> None:
    found = found_in(log_of(tmp_path, stalls, SemiDecentralized(window=0.5)))
    (advice,) = found["window_long"].advice
    assert advice.override.startswith("sync.window=")
    assert advice.gain is not None
    assert advice.gain >= 1.1
    assert found["window_long"].cost is not None


def test_a_window_that_is_too_short_enforces_more_than_it_saves(tmp_path: Path) -> None:
    found = found_in(log_of(tmp_path, stalls, SemiDecentralized(window=0.0, connectivity=2)))
    assert "window_short" in found


def test_of_the_best_window_nothing_is_said(tmp_path: Path) -> None:
    assert found_in(log_of(tmp_path, STEADY, SemiDecentralized())) == {}


def overrides() -> list[str]:
    """All that the package recommends."""
    told = set()
    for path in Path(lightning_sdpipe.seeing.__file__).parent.glob("*.py"):
        for text in re.findall(r'"((?:sync|exchange|partition|strategy|data)[\w.]*=[^"]+)"', path.read_text()):
            told.add(re.sub(r"\{.*\}", "4", text))
    return sorted(told)


def test_each_override_is_one_that_the_strategy_takes() -> None:
    assert len(overrides()) >= 8
    for override in overrides():
        config = composed("trainer.devices=8", *override.split())
        check(config)
        hydra.utils.instantiate(config.strategy if not override.startswith("data.") else config.data)


def test_what_is_advised_for_a_script_is_python_that_the_strategy_takes() -> None:
    told = set()
    for path in Path(lightning_sdpipe.seeing.__file__).parent.glob("*.py"):
        told |= set(re.findall(r"""['"](SDPipeStrategy\(.+?\))['"][,\n.)]""", path.read_text()))
    assert len(told) >= 9
    for python in told:
        python = re.sub(r"\{method\}", "ADPSGD", python)
        eval(re.sub(r"\{[^}]+\}", "4", python), {name: getattr(lightning_sdpipe, name) for name in ALL})
