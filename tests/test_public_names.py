"""Names that users import, or write into a configuration: they stay where they are when modules move."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_sdpipe.exchange import payloads
from lightning_sdpipe.sync.methods import METHODS

ROOT = Path(__file__).parents[1]

PUBLIC = {
    "lightning_sdpipe": (
        *("SDPipeStrategy", "SDPipeWeightAveraging", "RunMetrics", "ConfigurationError", "Balanced", "Exchange"),
        *("Full", "Half", "EightBit", "OneBit"),
        *("ADPSGD", "AllReduce", "Decentralized", "DiLoCo", "LocalSGD", "NoSync"),
        *("PHDPSGD", "PartialReduce", "SemiDecentralized"),
    ),
    "lightning_sdpipe.strategy": ("SDPipeStrategy",),
    "lightning_sdpipe.sync": (
        *("ADPSGD", "AllReduce", "Decentralized", "DiLoCo", "LocalSGD", "NoSync"),
        *("PHDPSGD", "PartialReduce", "SemiDecentralized"),
    ),
    "lightning_sdpipe.sync.model_averaging": ("ModelAveraging",),
    "lightning_sdpipe.sync.synchronizer": ("Replica", "Synchronizer"),
    "lightning_sdpipe.topology.groups": ("Replicas",),
    "lightning_sdpipe.p2p": ("receive", "receive_bytes", "send", "send_bytes"),
    "lightning_sdpipe.exchange.buckets": ("FlatBucket",),
    "lightning_sdpipe.optim": ("FrozenVariance", "VarianceCorrection"),
    "lightning_sdpipe.exchange.payloads": ("EightBit", "ErrorFeedback", "Full", "Half", "OneBit", "Payload"),
    "lightning_sdpipe.exchange.moving": ("Mover", "Pending", "finish", "pieces_of", "tag_of"),
    "lightning_sdpipe.exchange.transfers": ("begin",),
    "lightning_sdpipe.policies": (
        *("Decision", "Event", "Group", "GroupPolicy", "Participants", "Policy", "PolicyConfig", "Reason"),
        *("RefusedEvent", "Worker", "check_integer", "refusal"),
        *("Joined", "Left", "Lost", "Progress", "Ready", "Restarted", "Tick"),
    ),
    "lightning_sdpipe.policies.policy": ("PolicyConfig",),
    "lightning_sdpipe.policies.semi_decentralized": ("SemiDecentralized",),
    "lightning_sdpipe.policies.sync_graph": (),
    "lightning_sdpipe.heterogeneity": ("Delays", "EmulatedBlock", "Heterogeneity", "Slowed", "Static", "Trace"),
    "lightning_sdpipe.heterogeneity.delays": ("Delays",),
    "lightning_sdpipe.heterogeneity.slowdowns": ("Slowed", "Static", "Trace"),
    "lightning_sdpipe.simulate": ("Pipelines", "Run", "Schedule", "Work", "jittered", "simulate"),
    "lightning_sdpipe.configuration": ("check",),
    "lightning_sdpipe.sweep": ("SweepTable",),
    "lightning_sdpipe.pipeline.data": ("stand_in",),
    "lightning_sdpipe.errors": ("ConfigurationError", "NonFiniteError", "SchedulerError", "WorkerFailedError"),
    "lightning_sdpipe.cli": ("main",),
}

PROGRAMS = (  # python -m
    "lightning_sdpipe.checkpoints.consolidate",
    "lightning_sdpipe.cli",
    "lightning_sdpipe.scheduler",
)


@pytest.mark.parametrize("module", PUBLIC)
def test_names_of_users_stay(module: str) -> None:
    missing = [name for name in PUBLIC[module] if not hasattr(import_module(module), name)]
    assert missing == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_stay(program: str) -> None:
    found = find_spec(program)
    assert found is not None
    assert found.submodule_search_locations is None or find_spec(f"{program}.__main__") is not None


def test_the_package_lists_its_names() -> None:
    package, derived = import_module("lightning_sdpipe"), [*METHODS, *payloads.NAMES.values()]
    assert {*PUBLIC["lightning_sdpipe"], *(kind.__name__ for kind in derived)} == {*package.__all__}
    assert all(getattr(package, kind.__name__) is kind for kind in derived)


def test_a_name_that_has_left_says_what_to_use() -> None:
    with pytest.raises(ImportError, match=r"HetPipe has left lightning_sdpipe: .* use SemiDecentralized\(window=inf\)"):
        from lightning_sdpipe import HetPipe  # noqa: F401


def test_configurations_name_what_is_there() -> None:
    """Every ``_target_`` of the package in ``conf/``."""
    lines = [line for path in (ROOT / "conf").rglob("*.yaml") for line in path.read_text().splitlines()]
    targets = {
        line.partition("_target_:")[2].split()[0].rstrip(",}") for line in lines if "_target_: lightning_sdpipe" in line
    }
    assert targets
    for target in targets:
        module, _, name = target.rpartition(".")
        derived = {
            kind.__name__ for kind in (METHODS if module == "lightning_sdpipe.sync" else payloads.NAMES.values())
        }
        assert name in {*PUBLIC.get(module, ()), *derived}, f"{target} is not in the list of public names"
