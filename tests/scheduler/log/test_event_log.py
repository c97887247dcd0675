"""The log of events and decisions: what it keeps, and that its policy decides the same again."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_sdpipe.cli import main
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.heterogeneity import Delays
from lightning_sdpipe.policies import Decision, Event, Joined, PolicyConfig, Ready, Tick, Worker, registry
from lightning_sdpipe.policies.ad_psgd import ADPSGD
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.local_sgd import LocalSGD, NoSync
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler.log import event_log
from lightning_sdpipe.scheduler.log.event_log import Beginning, Entry, EventLog, read_log
from lightning_sdpipe.simulate import Work, jittered, simulate

W = Worker


def beginning(config: PolicyConfig, stages: int = 1, pipelines: int = 2) -> Beginning:
    return Beginning(registry.to_plain(config), stages, pipelines, 0.0, "now")


def write(path: Path, config: PolicyConfig, entries: list[tuple[float, Event, list[Decision]]], *mesh: int) -> None:
    log = EventLog(path)
    log.open(beginning(config, *mesh))
    for entry in entries:
        log.write(Entry(*entry))
    log.close()


@pytest.mark.parametrize(
    "config",
    [
        SemiDecentralized(),
        SemiDecentralized(window=0.3, connectivity=3, connectivity_unit="groups", max_group=2),
        SemiDecentralized(window="paper", min_group=3),
        AllReduceModels(),
        LocalSGD(every=3),
        ADPSGD(seed=4),
        ADPSGD(asynchronous=True),
        NoSync(),
    ],
    ids=lambda config: str(config)[:60],
)
def test_a_recorded_log_gives_the_same_decisions(config: PolicyConfig, tmp_path: Path) -> None:
    work = Work(2, 5, 30, jittered(1.0, 0.1), heterogeneity=Delays(0.2, 3.0))
    run = simulate(config, work)
    path = tmp_path / "log.jsonl"
    write(path, config, run.entries, 2, 5)
    (record,) = read_log(path)
    assert path.stat().st_mode & 0o022 == 0, "others do not write it"
    assert [(entry.at, entry.event, entry.decisions) for entry in record.entries] == run.entries
    assert list(record.differences()) == []
    assert main(["replay", str(path)]) == 0


def test_a_policy_that_decides_otherwise_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = simulate(AllReduceModels(), Work(1, 2, 3))
    path = tmp_path / "log.jsonl"
    write(path, LocalSGD(every=2), run.entries)
    (record,) = read_log(path)
    first = next(record.differences())
    assert isinstance(first.entry.event, Ready)
    assert main(["replay", str(path)]) == 1
    page = capsys.readouterr().out
    assert "recorded  []\n" in page
    assert "now       [Group(members=(Worker(stage=0, pipeline=" in page


def test_a_scheduler_that_is_started_again_goes_on_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.jsonl"
    write(path, NoSync(), [(1.0, Joined(W(0, 0)), [])])
    write(path, AllReduceModels(), [(7.0, Joined(W(0, 1)), [])])
    path.write_bytes(path.read_bytes() + b'{"at":8.0,"ev')  # it was killed in the middle of a line
    first, second = read_log(path)
    assert (first.beginning.policy["type"], second.beginning.policy["type"]) == ("no_sync", "all_reduce")
    assert [entry.at for entry in first.entries + second.entries] == [1.0, 7.0]


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    for text, message in (
        ("", "has no line"),
        ("{}\n", "line 1 of"),
        ('{"format":"sdpipe-log/2"}\n', "log of format sdpipe-log/3 .*sdpipe-log/2"),
        ('{"at":1.0,"event":{"type":"ready"}}\n', "line 1"),
    ):
        (tmp_path / "wrong").write_text(text)
        with pytest.raises(ConfigurationError, match=message):
            read_log(tmp_path / "wrong")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_log(tmp_path / "missing")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        EventLog(tmp_path / "wrong" / "log").open(beginning(NoSync()))


def test_a_full_disk_ends_the_log_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(Path("/dev/full"))
    log.open(beginning(NoSync()))
    log.write(Entry(1.0, Tick()))
    assert "ends here: No space left on device" in caplog.text


def test_a_log_stays_within_its_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    run = simulate(NoSync(), Work(1, 2, 40, jittered(1.0, 0.1)))
    log = EventLog(path, limit=6000)
    log.open(beginning(NoSync()))
    sizes, halves = [], []
    for entry in run.entries:
        log.write(Entry(*entry))
        sizes.append(sum(file.stat().st_size for file in tmp_path.iterdir()))
        halves.append(event_log.before(path).exists())
    log.close()
    assert 3000 < max(sizes) <= 6000
    (record,) = read_log(path)
    assert record.beginning.after > 0, "the oldest events are gone"
    assert record.events == len(run.entries)
    assert [entry.event for entry in record.entries] == [event for _, event, _ in run.entries][record.beginning.after :]
    assert main(["replay", str(path)]) == 2
    said = capsys.readouterr()
    assert f"its first {record.beginning.after} events are in no file any more" in said.out
    assert "nothing of" in said.err

    two = tmp_path / "two.jsonl"
    log = EventLog(two, limit=3 * sizes[halves.index(True)])
    log.open(beginning(NoSync()))
    for entry in run.entries[: halves.index(True) + 20]:
        log.write(Entry(*entry))
    log.close()
    (record,) = read_log(two)
    assert len(record.entries) == halves.index(True) + 20
    write(two, NoSync(), run.entries[:5])
    assert [len(record.entries) for record in read_log(two)] == [halves.index(True) + 20, 5], "another scheduler"
    assert main(["replay", str(two)]) == 0


def test_a_scheduler_goes_on_behind_whole_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log.jsonl"
    write(path, NoSync(), [(1.0, Tick(), [])])
    whole = path.read_bytes()
    for half in (b"x", b"{" * 200_000):
        path.write_bytes(whole + half)
        write(path, NoSync(), [(1.0, Tick(), [])])
        assert path.read_bytes() == whole + whole
    assert f"{path} ends with half a line of 200000 bytes, which is cut off" in caplog.text
