"""Real processes under supervision: tiny scripts in the place of a training, and a directory in that of what the
scheduler knows."""

from __future__ import annotations

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightning_sdpipe.errors import SchedulerError
from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler.client.wire import ask_status
from lightning_sdpipe.scheduler.credentials import own_keys, read_scheduler_keys, worker_keys
from lightning_sdpipe.scheduler.server.process import SchedulerProcess, SchedulerSettings, reserve_port
from lightning_sdpipe.scheduler.server.server import Endpoint
from lightning_sdpipe.supervision.output import Log, Output, Terminal
from lightning_sdpipe.supervision.rules import NO_MEMBERS, Seen, Settings
from lightning_sdpipe.supervision.supervisor import Supervisor
from tests.disks import disk_of
from tests.patience import until

ROOT = Path(__file__).parents[2]
MAIN = f"import sys; from {__name__} import main; sys.exit(main(*sys.argv[1:]))"
MUCH = 6 << 20
"""Bytes that no pipe takes, nor what waits for one."""
TOY = ROOT / "tests" / "scripts" / "toy.py"


def main(directory: str, pipelines: str, stages: str, restarts: str) -> int:
    """The supervisor in a process of its own, which tests can kill: trains are the pipelines whose toys run."""
    where = Path(directory)

    def look(asked: float) -> Seen:
        lives = {
            number: hash("-".join(pids))
            for number in range(int(pipelines))
            if len(pids := [pid for rank in range(int(stages)) if (pid := runs(where, number, rank))]) == int(stages)
        }
        told = {"lives": lives, "leader": min(lives, default=None), "update": 412, "ever": [*range(int(pipelines))]}
        return Seen(asked, msgspec.structs.replace(NO_MEMBERS, **told))

    of_scheduler = SchedulerSettings(
        int(stages),
        int(pipelines),
        registry.to_plain(SemiDecentralized()),
        endpoint=Endpoint(keys=read_scheduler_keys(own_keys()[0])),
        elastic=ElasticConfig(),
    )
    scheduler = SchedulerProcess(of_scheduler, where / "scheduler.log", keeps_port=True)
    settings = Settings(int(pipelines), int(stages), int(restarts), grace=1.0, farewell=5.0)
    command, terminal = [sys.executable, str(TOY), directory], Terminal()
    try:
        return Supervisor(settings, command, {"OMP_NUM_THREADS": "1"}, scheduler, look, where, terminal).run()
    finally:
        terminal.close()


def runs(directory: Path, pipeline: int, rank: int) -> str | None:
    """The process number of that rank, if it has said so and lives."""
    with suppress(OSError, ValueError):
        pid = str(json.loads((directory / f"runs-{pipeline}-{rank}").read_text())["pid"])
        return pid if lives(int(pid)) else None
    return None


class Run:
    """A supervisor, what it says, and the toys under it."""

    def __init__(self, directory: Path, pipelines: int, stages: int, restarts: int, **outputs: Any) -> None:
        self.directory, self.size = directory, (pipelines, stages)
        self.seen: set[int] = set()
        arguments = [str(directory), *map(str, (pipelines, stages, restarts))]
        self.process = subprocess.Popen(
            [sys.executable, "-c", MAIN, *arguments],
            cwd=ROOT,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True} | outputs,
        )
        self.out, self.err = io.BytesIO(), io.BytesIO()
        self._readers = [
            threading.Thread(target=self._copy, args=pair, daemon=True)
            for pair in ((self.process.stdout, self.out), (self.process.stderr, self.err))
            if not outputs
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _copy(source: Any, to: io.BytesIO) -> None:
        while data := os.read(source.fileno(), 4096):
            to.write(data)

    def until(self, what: Callable[[], Any]) -> Any:
        return until(what, self.lines)

    def lines(self) -> list[str]:
        said = self.err.getvalue().decode().split("\n")
        return [line.removeprefix("sdpipe: ") for line in said if line.startswith("sdpipe: ")]

    def says(self, line: str) -> str:
        return str(self.until(lambda: next((found for found in self.lines() if line in found), None)))

    def pid(self, pipeline: int, rank: int = 0) -> int:
        pid = int(self.until(lambda: runs(self.directory, pipeline, rank)))
        self.seen.add(pid)
        return pid

    def all_run(self) -> list[int]:
        return [self.pid(pipeline, rank) for pipeline in range(self.size[0]) for rank in range(self.size[1])]

    def order(self, what: str, pipeline: int | None = None, rank: int = 0) -> None:
        name = "do-all" if pipeline is None else f"do-{pipeline}-{rank}"
        (self.directory / f".{name}").write_text(what)
        (self.directory / f".{name}").rename(self.directory / name)

    def ends(self) -> int:
        code = self.process.wait()
        for reader in self._readers:
            reader.join()
        self.until(lambda: not any(lives(pid) for pid in self.seen))
        return code


def children_of(pid: int) -> set[int]:
    return {*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())}


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def supervised(
    directory: Path, pipelines: int = 3, stages: int = 1, restarts: int = 5, **outputs: Any
) -> Iterator[Run]:
    run = Run(directory, pipelines, stages, restarts, **outputs)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.wait()


pytestmark = pytest.mark.distributed


def test_a_killed_stage_comes_back_and_all_finish(tmp_path: Path) -> None:
    with supervised(tmp_path, 2, 2) as run:
        run.all_run()
        run.says("all 2 pipelines train")
        before = run.pid(1, 1)
        os.kill(before, signal.SIGKILL)
        assert run.says("pipeline 1 lost") == "pipeline 1 lost (stage 0 killed); 1 of 2 go on"
        assert run.says("pipeline 1 is back").endswith(" s, at update 412")
        assert run.pid(1, 1) != before
        told = json.loads((tmp_path / "runs-1-1").read_text())
        assert told.pop("SDPIPE_SCHEDULER").startswith("tcp://127.0.0.1:")
        assert int(told.pop("MASTER_PORT")) > 0
        del told["pid"]
        assert told == {
            "RANK": "1",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "SDPIPE_PIPELINE": "1",
        }
        run.order("exit 0")
        assert run.ends() == 0
        assert run.out.getvalue() == b"rank 0 of pipeline 0 runs\n", "the leader's first stage alone"
        log = (tmp_path / "pipeline-1.log").read_text()
        assert "started (restart 1) ---\n" in log
        assert log.count("[stage 1] rank 0 of pipeline 1 runs\n") == 2


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_word_to_the_supervisor_or_its_death_ends_all(tmp_path: Path, number: int, code: int) -> None:
    with supervised(tmp_path, 2, 2) as run:
        run.all_run()
        children = children_of(run.process.pid)
        assert len(children) == 6, "and the scheduler, and what kills the rest"
        run.seen |= children
        run.order(f"child {tmp_path / 'helper'}", 1)
        run.seen.add(int(run.until(lambda: (tmp_path / "helper").exists() and (tmp_path / "helper").read_text())))
        run.process.send_signal(number)
        assert run.ends() == code, "and what the toys have started has ended, too"


def test_who_does_not_listen_is_killed_by_a_second_word(tmp_path: Path) -> None:
    with supervised(tmp_path, 2) as run:
        run.all_run()
        run.order("deaf", 0)
        run.until(lambda: not (tmp_path / "do-0-0").exists())
        time.sleep(0.1)  # it has read the order, and obeys
        run.process.send_signal(signal.SIGINT)
        run.says("the run ends: Ctrl-C")
        run.process.send_signal(signal.SIGINT)
        assert run.ends() == 130


@pytest.mark.parametrize("told", ["nothing", "to end meanwhile"])
def test_a_killed_scheduler_starts_again_at_its_address(tmp_path: Path, told: str) -> None:
    with supervised(tmp_path, 1) as run:
        (toy,) = run.all_run()
        address = json.loads((tmp_path / "runs-0-0").read_text())["SDPIPE_SCHEDULER"]
        assert ask_status(address, credentials=worker_keys(address, None), timeout=600).failure is None, "it listens"
        children = children_of(run.process.pid)
        keeper = next(pid for pid in children if b"stay_with_child.py" in Path(f"/proc/{pid}/cmdline").read_bytes())
        (scheduler,) = children - {toy, keeper}
        os.kill(scheduler, signal.SIGKILL)
        run.says("the scheduler ended (killed); it starts again")
        if told != "nothing":
            again = run.until(lambda: children_of(run.process.pid) - {toy, keeper, scheduler})
            run.seen |= again
            run.process.send_signal(signal.SIGTERM)
            assert run.ends() == 143, "and the scheduler that began to start has ended, too"
            return
        assert ask_status(address, credentials=worker_keys(address, None), timeout=600).failure is None
        run.order("exit 0")
        assert run.ends() == 0


def test_why_a_scheduler_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    log.write_text("früher\n")
    settings = SchedulerSettings(0, 1, registry.to_plain(SemiDecentralized()))
    scheduler = SchedulerProcess(settings, log, keeps_port=True)
    refused = r"^the scheduler did not start: (?!.*did not start)num_stages=0 .*; .*log has what it printed$"
    with pytest.raises(SchedulerError, match=refused):
        scheduler.start()
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(SchedulerError, match=r"did not start: it ended without a word; .*log has"):
        scheduler.start()
    scheduler.close()


@pytest.mark.parametrize("output", ["unread", "full", "gone"])
def test_no_output_holds_up_the_supervisor_or_ends_it(tmp_path: Path, output: str) -> None:
    """A pipe that nobody reads, a full disk, and a terminal that is closed under nohup."""
    if output == "unread":
        ours, theirs = os.pipe()
    elif output == "gone":
        ours, theirs = os.openpty()
    else:
        ours, theirs = os.open(os.devnull, os.O_RDONLY), os.open("/dev/full", os.O_WRONLY)

    def leads() -> None:
        os.setsid()
        if output == "gone":
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    options: dict[str, Any] = {"stdout": theirs, "stderr": theirs, "start_new_session": False, "preexec_fn": leads}
    with supervised(tmp_path, 2, **options) as run:
        os.close(theirs)
        first = run.all_run()
        if output == "gone":
            os.close(ours)
        said = tmp_path / "supervisor.log"
        run.until(lambda: "all 2 pipelines train" in said.read_text())
        run.order(f"repeat {MUCH}", 0)
        run.until(lambda: (tmp_path / "pipeline-0.log").stat().st_size > MUCH)
        os.kill(first[1], signal.SIGKILL)
        run.until(lambda: "pipeline 1 lost" in said.read_text())
        assert run.pid(1) != first[1]
        run.process.send_signal(signal.SIGTERM)
        run.until(lambda: "the run ends: SIGTERM" in said.read_text())
        assert run.ends() == 143
        if output == "unread":
            shown = b""
            while data := os.read(ours, 1 << 16):
                shown += data
            assert b"sdpipe: all 2 pipelines train\n" in shown
    if output != "gone":
        os.close(ours)


def test_what_a_process_prints(tmp_path: Path) -> None:
    """A progress bar is shown as it is drawn, and logged in its last state."""
    source, end = os.pipe()
    shown: list[bytes] = []
    log = Log(tmp_path / "log", lambda line: None)
    output = Output(source, log, b"[stage 1] ", shown.append)
    assert output.read() is None
    bar = b"Epoch 0:  10%|# |\rEpoch 0: 100%|##|\rEpoch 0: done\n\nand a"
    os.write(end, bar)
    assert output.read() is True
    os.write(end, b" half")
    os.close(end)
    output.close()
    assert b"".join(shown) == bar + b" half"
    assert (tmp_path / "log").read_bytes() == b"[stage 1] Epoch 0: done\n[stage 1] and a half\n"
    assert output.last == b"and a half"


def test_a_log_on_a_disk_that_is_full_for_a_while(tmp_path: Path) -> None:
    said: list[str] = []
    log = Log(tmp_path / "log", said.append)
    log.write(b"one")
    with disk_of(6):
        for line in (b"two", b"three"):
            log.write(line)
    log.write(b"four")
    log.close()
    assert (tmp_path / "log").read_bytes() == b"one\ntw\n--- 2 lines could not be written ---\nfour\n"
    assert said == [f"{tmp_path / 'log'} cannot be written now (File too large); the run continues without it"]


def test_a_reserved_port_is_free_for_torchs_store_only() -> None:
    import socket

    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
        with socket.socket(socket.AF_INET6) as store:  # as torch's store listens: all addresses, reusing
            store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            store.bind(("::", port))
            store.listen()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
