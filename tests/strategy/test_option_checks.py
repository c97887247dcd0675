"""What can be given to the strategy, and what is refused with what to give instead."""

from __future__ import annotations

import inspect
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_sdpipe import (
    ADPSGD,
    AllReduce,
    Balanced,
    ConfigurationError,
    DiLoCo,
    EightBit,
    Exchange,
    Half,
    LocalSGD,
    NoSync,
    OneBit,
    SDPipeStrategy,
    SemiDecentralized,
    sync,
)
from lightning_sdpipe.exchange import payloads
from lightning_sdpipe.heterogeneity import Delays

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_stage": 2}, "num_stage is not an option of SDPipeStrategy; did you mean num_stages?"),
        ({"microbatches": 2}, "did you mean num_micro_batches?"),
        ({"ddp_comm_hook": print}, "ddp_comm_hook is not an option of SDPipeStrategy: sync= says what is"),
        (
            {"find_unused_parameters": True},
            "option of SDPipeStrategy: parameters without a gradient are allowed",
        ),
        ({"num_stages": "2"}, "num_stages='2' is not allowed: give int or a list of int"),
        ({"num_stages": True}, "num_stages=True is not allowed: give int or a list of int"),
        ({"log_dir": "s3://runs"}, "log_dir='s3://runs' is no directory of rank 0's machine; give one there."),
        ({"num_stages": 0}, "num_stages=0 is not allowed; use 1 or more."),
        ({"num_micro_batches": 0}, "num_micro_batches=0 is not allowed; use 1 or more."),
        ({"num_micro_batches": 2.0}, "num_micro_batches=2.0 is not allowed: give int or None."),
        ({"sync": AllReduce}, "sync=AllReduce is a class; pass an object: sync=AllReduce()."),
        ({"sync": "all_reduced"}, "sync='all_reduced' is not known; did you mean all_reduce?"),
        ({"exchange": Exchange}, "exchange=Exchange is a class; pass an object: exchange=Exchange()."),
        ({"exchange": "eightbit"}, "exchange='eightbit' is not known; did you mean eight_bit?"),
        ({"exchange": 8}, 'exchange=8 is not allowed: give Exchange or str or None, such as "eight_bit", or Ex'),
        ({"exchange": "one_bit"}, "Use Full() or Half() or EightBit(), or sync=AllReduce()"),
        (
            {"num_pipelines": 2},
            "num_pipelines is not an option of SDPipeStrategy: .* devices × num_nodes / num_stages.",
        ),
        ({"batch_size": 8}, "the loader's batch_size holds, and is that of one pipeline."),
        ({"sync": NoSync(), "exchange": Exchange(EightBit())}, "Use Full(), or sync=AllReduce(), SemiDecentralized()"),
        ({"exchange": Exchange(OneBit())}, "sync=AllReduce(), LocalSGD(every=1), DiLoCo()"),
        ({"exchange": Exchange(EightBit(feedback=True))}, "Use Full() or Half() or EightBit(), or sync=AllReduce()"),
        ({"exchange": Exchange(overlap="free")}, "or sync=LocalSGD(every=1), Decentralized()."),
        (
            {"sync": AllReduce(), "exchange": Exchange(overlap="step")},
            "Use overlap='none', or sync=SemiDecentralized()",
        ),
        ({"sync": LocalSGD(2), "exchange": Exchange(overlap="free")}, "or sync=LocalSGD(every=1), Decentralized()."),
        ({"sync": ADPSGD(), "exchange": Exchange(hierarchy="hosts")}, "Use hierarchy='flat'"),
        (
            {"sync": DiLoCo(delay=1, mix=0.5), "exchange": Exchange(overlap="step")},
            "Use overlap='none', or sync=SemiDecentralized()",
        ),
        ({"schedule": "1f1bb"}, "schedule='1f1bb' is not known; use one of ['1f1b', .*; did you mean '1f1b'?"),
        ({"partition": 3}, 'partition=3 is not allowed: give .* such as "parameters", or [3, 2]'),
        ({"partition": "parameter"}, "partition='parameter' is not known; .*; did you mean 'parameters'?"),
        (
            {"partition": "even"},
            "use one of ['auto', .*'placed'], or Balanced, or a list of int, or a list of list of int.",
        ),
        ({"partition": ["3", "2"]}, "partition=['3', '2'] is not allowed: give"),
        ({"partition": Balanced}, "partition=Balanced is a class; pass an object"),
        ({"blocks": "layers.*"}, "blocks='layers.*' is not allowed: give a list of str or None, such as ["),
        ({"delays": 0.3}, "delays=0.3 is not allowed: give Heterogeneity or None, such as Delays("),
        ({"variance_correction": "no"}, "variance_correction='no' is not allowed: give bool."),
        ({"dynamic_shapes": 1}, "dynamic_shapes=1 is not allowed: give bool."),
        (
            {"save_distributed_checkpoint": "asynch"},
            "is not known; use one of ['async'], or bool; did you mean 'async'?",
        ),
        ({"gather_module": "yes"}, "gather_module='yes' is not allowed: give bool or None."),
        (
            {"on_checkpoint_error": "continue", "save_distributed_checkpoint": True},
            "on_checkpoint_error='continue' does not go with save_distributed_checkpoint, of which every rank writes a "
            "part. Use 'stop', or leave one of the two out.",
        ),
        ({"on_nonfinite": "warn"}, "on_nonfinite='warn' is not known; use one of ['stop', 'continue']."),
        ({"timeout": 10}, "timeout=10 is not allowed: give timedelta, such as timedelta(minutes=10)."),
        ({"timeout": timedelta(0)}, "timeout=0:00:00 is not allowed; give a time above 0."),
        ({"start_method": "frok"}, "start_method='frok' is not known; .*; did you mean 'fork'?"),
        ({"schedule": "pipedream", "num_micro_batches": 4}, "which does not split mini-batches"),
        ({"stages_per_worker": 4}, "stages_per_worker=4 has no meaning with schedule='1f1b'"),
        ({"schedule": "zero_bubble"}, "needs num_stages and stages_per_worker of 2 or more; given 1 and 2."),
        *(
            ({"sync": method, "data": "dealt"}, "data='dealt' does not go with sync=")
            for method in (AllReduce(), LocalSGD(2), ADPSGD(asynchronous=False), DiLoCo())
        ),
        ({"batch_by_speed": True}, "does not go with sync=SemiDecentralized"),
        ({"batch_by_speed": True, "sync": AllReduce()}, "num_micro_batches is 1"),
        (
            {"batch_by_speed": True, "sync": AllReduce(), "schedule": "pipedream", "num_stages": 2},
            "does not go with schedule='pipedream'",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, Any], message: str) -> None:
    pattern = ".*".join(map(re.escape, message.split(".*")))
    with pytest.raises(ConfigurationError, match=pattern):
        SDPipeStrategy(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"num_stages": 2, "sync": SemiDecentralized(window=0.1), "schedule": "gpipe"},
        {"partition": [3, 2], "blocks": ("a", "b.*")},
        {"partition": OmegaConf.create([3, 2]), "blocks": OmegaConf.create(["a"])},
        {"partition": Balanced(), "delays": Delays(), "scheduler_key_file": None},
        {"save_distributed_checkpoint": "async", "timeout": timedelta(seconds=1)},
        {"start_method": "fork", "process_group_backend": "gloo"},
    ],
)
def test_what_is_right_passes(given: dict[str, Any]) -> None:
    strategy = SDPipeStrategy(**given)
    assert strategy.num_stages == given.get("num_stages", 1)


def test_names_are_those_of_the_configuration_groups() -> None:
    """Each is its class with its defaults."""
    for group, names in (("sync", sync.NAMES), ("exchange", payloads.NAMES)):
        targets = {
            path.stem: re.findall(r"_target_: .*\.(\w+)", path.read_text())[-1]
            for path in (ROOT / "conf" / group).glob("*.yaml")
            if "_target_: recipes." not in path.read_text()
        }
        assert targets == {name: kind.__name__ for name, kind in names.items()}
    for name, kind in sync.NAMES.items():
        written = OmegaConf.load(ROOT / "conf" / "sync" / f"{name}.yaml")
        assert {*written} - {"_target_"} == {*inspect.signature(kind).parameters}, name
    for name, kind in payloads.NAMES.items():
        written = OmegaConf.load(ROOT / "conf" / "exchange" / f"{name}.yaml")
        given = {*inspect.signature(kind).parameters}
        assert {*written.payload} - {"_target_"} == (given if name != "full" else set()), name
    strategy = SDPipeStrategy(sync="ad_psgd", exchange="half")
    assert (strategy.sync, strategy.exchange) == (ADPSGD(), Exchange(Half()))
