from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torchmetrics import MeanMetric

from lightning_sdpipe.lightning_results import value_of_batch
from lightning_sdpipe.pipeline.stage_runner import StepLog


def test_micro_batches_are_combined_by_their_samples() -> None:
    log, logged = StepLog(), {}
    for weight, loss in ((0.75, 1.0), (0.25, 5.0)):
        record = log.record(weight)
        record("loss", torch.tensor(loss), True, on_step=True)
        record("largest", loss, reduce_fx="max")
        record("count", loss, reduce_fx=torch.sum)
        record("own", loss, batch_size=1)
        record("array", np.float32(loss))

    def take(name: str, value: Any, **options: Any) -> None:
        logged[name] = float(value), options

    log.replay(take)
    assert logged["loss"] == (2.0, {"batch_size": None, "prog_bar": True, "on_step": True, "sync_dist": True})
    assert logged["largest"][0] == 5.0
    assert logged["count"][0] == 6.0
    assert logged["array"][0] == 2.0
    assert logged["own"][0] == pytest.approx(3.0)
    assert logged["own"][1]["batch_size"] == 2


def test_a_name_that_is_logged_twice_is_logged_twice() -> None:
    log, logged = StepLog(), []
    for weight, losses in ((0.75, (1.0, 10.0)), (0.25, (5.0, 50.0))):
        record = log.record(weight)
        for loss in losses:
            record("loss", loss)
    log.replay(lambda name, value, **_: logged.append((name, float(value))))
    assert logged == [("loss", 2.0), ("loss", 20.0)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "max"])
def test_one_micro_batch_and_several_are_logged_in_the_same_type(dtype: torch.dtype, reduce_fx: str) -> None:
    """Which of the two it is may differ between the ranks that reduce the value afterwards."""
    accumulated = []
    for count in (1, 3):
        log = StepLog()
        for _ in range(count):
            log.record(1 / count)("loss", torch.tensor(1 / 3, dtype=dtype), reduce_fx=reduce_fx)

        def take(name: str, value: Any, *, batch_size: Any, **options: Any) -> None:
            metadata = _Metadata("training_step", name, on_step=False, on_epoch=True, reduce_fx=reduce_fx)
            metadata.sync = _Sync(False)
            metric = _ResultMetric(metadata, is_tensor=True)
            metric.update(value, 1)
            accumulated.append(metric.value)

        log.replay(take)
    one, several = accumulated
    assert one.dtype == several.dtype
    if reduce_fx != "sum":
        torch.testing.assert_close(one, several, rtol=1e-6, atol=0)


def test_metrics_show_the_mean_over_micro_batches_of_a_step() -> None:
    log, metric, shown = StepLog(), MeanMetric(), []
    for weight, value in ((0.75, 1.0), (0.25, 5.0)):
        metric(value)
        log.record(weight)("metric", metric, on_step=True)
    log.replay(lambda name, value, **_: shown.append((value is metric, value_of_batch(value))))
    assert shown == [(True, 2.0)]
    assert metric.compute() == 3.0, "which counts each update"
