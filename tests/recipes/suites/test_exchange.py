"""Exchanges on slow links are timed beside full precision; the numbers are not judged here."""

from __future__ import annotations

import pytest

from lightning_sdpipe.errors import ConfigurationError
from recipes.suites import exchange
from recipes.suites.exchange import ablations, busy_link, slow_links
from tests.recipes.composed import parameters_of


@pytest.mark.distributed
def test_links_that_the_kernel_slows_down(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("suite.slow_links.elements={1gbit: 5000}", "suite.slow_links.rates_mbit={1gbit: 1000}")
    arguments = ("suite.only=[slow_links]", *small, "suite.slow_links.repeats=2")
    rows, ratios = exchange.run(**parameters_of("exchange", *arguments))
    if not rows:
        pytest.skip(capsys.readouterr().err.strip())
    assert {row["what"] for row in rows} == {"full", "half", "eight_bit", "one_bit", "pair8", "ring8"}
    assert all(row["ms"] > 0 for row in rows)
    assert ratios["eight_bit/full/1gbit"]["goal"] == slow_links.GOALS["1gbit"]["eight_bit"]


@pytest.mark.distributed
def test_memory_is_counted_in_copies_of_the_model() -> None:
    small = [f"suite.copies.{value}" for value in ("compared=[ring/eight_bit]", "blocks=2", "repeats=1")]
    rows, ratios = exchange.run(**parameters_of("exchange", "suite.only=[copies]", *small))
    assert [row["what"] for row in rows] == ["nosync", "ring/eight_bit"]
    assert all(row["peak_mib"] > 0 for row in rows)
    assert set(ratios) == {"memory/ring/eight_bit"}


@pytest.mark.distributed
def test_parts_of_an_exchange_on_links_that_the_kernel_slows_down(capsys: pytest.CaptureFixture[str]) -> None:
    small = [f"suite.ablations.{value}" for value in ("elements=200000", "tensors=4", "repeats=3")]
    rows, ratios = exchange.run(**parameters_of("exchange", "suite.only=[ablations]", *small))
    if not rows:
        pytest.skip(capsys.readouterr().err.strip())
    assert {row["what"] for row in rows} == set(ablations.CASES)
    assert set(ratios) == {*ablations.COMPARED, "bytes/hierarchy"}
    assert ratios["bytes/hierarchy"]["value"] == pytest.approx(4.0, rel=0.15)  # packets that are sent again count, too


@pytest.mark.distributed
def test_trainings_on_links_that_the_kernel_slows_down(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("parameters=128", "compute_seconds=0.01", "steps=2", "warm_up=1", "repeats=1")
    arguments = [f"suite.slow_trainings.{value}" for value in (*small, "compared=[ddp_fp16,all_reduce/one_bit]")]
    rows, ratios = exchange.run(**parameters_of("exchange", "suite.only=[slow_trainings]", *arguments))
    if not rows:
        pytest.skip(capsys.readouterr().err.strip())
    theirs, ours = sorted(rows, key=lambda row: str(row["what"]), reverse=True)
    assert theirs["bytes_per_step"] == 0 < ours["bytes_per_step"]
    assert set(ratios) == {"best/ddp_fp16"}
    assert ratios["best/ddp_fp16"]["value"] == ours["samples_per_s"] / theirs["samples_per_s"]


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("slow_trainings", "compared=[ddp]"),
        ("slow_trainings", "steps=0"),
        ("slow_trainings", "warm_up=0"),
        ("copies", "compared=[ddp]"),
    ],
)
def test_trainings_that_there_are_not_are_refused(part: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"suite\.{part}"):
        exchange.run(**parameters_of("exchange", f"suite.only=[{part}]", f"suite.{part}.{value}"))


@pytest.mark.distributed
def test_pipelines_on_busy_links() -> None:
    small = {
        "num_stages": 1,
        "num_pipelines": 2,
        "num_micro_batches": 1,
        "micro_batch_seconds": 0.02,
        "num_parameters": 1000,
        "iterations": 4,
        "warm_up": 1,
        "repeats": 1,
    }
    arguments = (f"suite.busy_link.{name}={value}" for name, value in small.items())
    left_out = ("~suite.busy_link.exchanges.step", "~suite.busy_link.exchanges.eight_bit")
    delays = "suite.busy_link.delays.scale=0.1"
    rows, ratios = exchange.run(**parameters_of("exchange", "suite.only=[busy_link]", delays, *arguments, *left_out))
    speeds = {(row["what"], row["busy_links"]): row["samples_per_s"] for row in rows if "samples_per_s" in row}
    for kind, suffix in busy_link.LINKS.items():
        for name, (key, goal) in busy_link.KEYS.items():
            assert ratios[key + suffix]["value"] == speeds[name, kind] / speeds["nosync", kind]
            assert ratios[key + suffix]["goal"] == (None if suffix else goal)


def test_a_part_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'codec' is not a part of suite=exchange; there are codecs"):
        exchange.run(**parameters_of("exchange", "suite.only=[codec]"))
