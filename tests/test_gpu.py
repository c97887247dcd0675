"""Trials on a GPU (``make gpu``), which the CPU does at a small size so that they are alive. What was measured on a GPU
is printed, and written to ``gpu-report.md``."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import accelerator, gpu
from tests.features.running import as_torchrun
from tests.workers import free_port, run_workers

GPUS = torch.cuda.device_count()  # which does not open them: forked processes will
Report = Callable[[str, str], None]


CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="no CUDA")])
EVERYWHERE = pytest.mark.parametrize("kind", ["cpu", accelerator.NAME, CUDA], indirect=True)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == accelerator.NAME:
        try:
            accelerator.build()
        except accelerator.CannotBuildError as error:
            pytest.skip(f"the fake accelerator cannot be built: {error}")
    return str(request.param)


@pytest.fixture(scope="module")
def measured() -> Iterator[dict[str, str]]:
    rows: dict[str, str] = {}
    yield rows
    if rows:
        head = f"torch {torch.__version__}, CUDA {torch.version.cuda}, {platform.platform()}, {GPUS} GPU(s)"
        table = "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
        Path(os.environ.get("SDPIPE_GPU_REPORT", "gpu-report.md")).write_text(f"{head}\n\n{table}\n")
        print(f"\n{head}\n{table}")


@pytest.fixture
def report(kind: str, measured: dict[str, str]) -> Report:
    return (lambda name, value: measured.update({name: value})) if kind == "cuda" else lambda name, value: None


def on_ranks(count: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    return run_workers(count, _alone, free_port(), count, work, arguments)


def _alone(rank: int, port: int, count: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    dist.destroy_process_group()  # the strategy opens its own
    os.environ["OMP_NUM_THREADS"] = "1"  # Lightning would take more, which wait for ever in a process that was forked
    return as_torchrun(rank, port, count, work, arguments)


pytestmark = pytest.mark.distributed


@EVERYWHERE
def test_streams_of_random_numbers(kind: str) -> None:
    run_workers(1, gpu.draw, kind)


@EVERYWHERE
def test_payloads_are_read_alike_everywhere(kind: str, report: Report) -> None:
    (rates,) = run_workers(1, gpu.encode, kind)
    for name, rate in rates:
        report(name, f"{rate:.2f} · 10⁹ values/s")


@EVERYWHERE
def test_messages_go_through_pinned_memory(kind: str, report: Report) -> None:
    rates = run_workers(2, gpu.pass_on, kind)
    report("messages over gloo", f"{min(rates):.2f} GB/s")


@pytest.mark.parametrize("kind", ["cpu", CUDA], indirect=True)
@pytest.mark.parametrize("model", gpu.MODELS)
def test_two_stages_on_one_device_beside_one_and_ddp(kind: str, model: str, tmp_path: Path, report: Report) -> None:
    (ddp,) = on_ranks(1, gpu.train, kind, model, 1, True, True, tmp_path)
    (whole,) = on_ranks(1, gpu.train, kind, model, 1, False, True, tmp_path)
    pair = on_ranks(2, gpu.train, kind, model, 2, False, True, tmp_path)
    steps = gpu.SIZES[kind].steps
    for found in (ddp, whole, *pair):
        assert len(found["losses"]) == steps
    assert pair[0]["losses"] == pair[1]["losses"], "all stages are told the loss"
    assert pair[0]["losses"][0] == pytest.approx(whole["losses"][0], rel=0.05)
    for name, found in (("DDP, 1 process", [ddp]), ("1 × 1", [whole]), ("2 stages, one GPU, gloo", pair)):
        rate, memory = found[0]["samples/s"], " + ".join(f"{rank['MiB']:.0f}" for rank in found)
        report(f"{model}, bf16-mixed, {name}", f"{rate:.1f} samples/s, {memory} MiB")


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="NCCL wants a GPU for each process")
def test_two_stages_over_nccl(measured: dict[str, str], tmp_path: Path) -> None:
    pair = on_ranks(2, gpu.train, "cuda", "BERT-base", 2, False, False, tmp_path)
    measured["BERT-base, bf16-mixed, 2 stages, 2 GPUs, NCCL"] = f"{pair[0]['samples/s']:.1f} samples/s"
    assert pair[0]["losses"] == pair[1]["losses"]
