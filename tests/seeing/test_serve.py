"""``sdpipe serve``: what is shown is what the log has, to those that may look."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import math
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from lightning_sdpipe.cli import main
from lightning_sdpipe.errors import SchedulerError
from lightning_sdpipe.meter import PHASES
from lightning_sdpipe.policies import Worker
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.credentials import own_keys, read_worker_keys
from lightning_sdpipe.scheduler.log.event_log import read_log
from lightning_sdpipe.scheduler.log.status import MembersStatus
from lightning_sdpipe.scheduler.rows import About
from lightning_sdpipe.seeing import following
from lightning_sdpipe.seeing.finding import Finding
from lightning_sdpipe.seeing.following import Follower
from lightning_sdpipe.seeing.recording import of_answers, series_of
from tests.scheduler.live_scheduler import clients, serving, two_of_this_account
from tests.seeing.pages import Page
from tests.seeing.recordings import chunks, recording

web = pytest.importorskip("lightning_sdpipe.seeing.web")
parser = pytest.importorskip("prometheus_client.parser")

HOSTS = frozenset({"127.0.0.1", "localhost"})


class Samples:
    """As prometheus-client itself reads them."""

    def __init__(self, text: str) -> None:
        families = parser.text_string_to_metric_families(text)
        self.all = [sample for family in families for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        (value,) = [sample.value for sample in self.all if (sample.name, sample.labels) == (f"sdpipe_{name}", labels)]
        return float(value)


class Fixed(Follower):
    """One that has looked already, or that the scheduler does not answer."""

    def __init__(self, seen: Any = None, port: int = 9) -> None:
        super().__init__(f"tcp://127.0.0.1:{port}", None)
        self.seen = seen

    def poll(self, timeout: float) -> Any:
        if self.seen is None:
            raise SchedulerError("nothing <listens> there")
        return self.seen


@contextmanager
def at(shown: Any, token: str | None = None) -> Iterator[http.client.HTTPConnection]:
    """A connection to a server in a thread."""
    where: list[str] = []
    ready, loop = threading.Event(), asyncio.new_event_loop()

    def opened(url: str) -> None:
        where.append(url)
        ready.set()

    shown.refresh()
    task = loop.create_task(web.serve(shown, "127.0.0.1", 0, HOSTS, token, opened))
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.gather(task, return_exceptions=True)))
    thread.start()
    assert ready.wait()
    connection = http.client.HTTPConnection(where[0].removeprefix("http://"), timeout=600)
    try:
        yield connection
    finally:
        connection.close()
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        assert not thread.is_alive()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def get(
    connection: http.client.HTTPConnection, path: str, method: str = "GET", **headers: str
) -> tuple[int, str, http.client.HTTPMessage]:
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer.headers


@pytest.fixture(scope="module")
def status() -> Any:
    with serving(AllReduceModels(), 1, 2) as server:
        return Follower(server.address, None).poll(5.0)[1]


def seen(status: Any, host: str = "gpu7") -> Any:
    one, two = Worker(0, 0), Worker(0, 1)
    about = {worker: About(host, f"cuda:{worker.pipeline}", worker.pipeline) for worker in (one, two)}
    slow = chunks(two, [90.0] * 128, every=100.0)
    told = recording({one: chunks(one, [60.0] * 128, every=100.0), two: slow}, about)
    shown = web.View(Fixed((told, status)), 1.0, "train.py")
    shown.refresh()
    return shown


def test_what_is_shown_is_what_the_log_has(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with two_of_this_account(log=log) as (server, both):
        follower = Follower(server.address, read_worker_keys(own_keys()[1]))
        shown = web.View(follower, 5.0, "train.py")
        for client in both:
            client.join()
        for iteration in range(50):
            for client in both:
                client.ready(iteration)
            for client in both:
                client.group()
                client.step_ended(iteration, 0.0)
            if iteration % 20 == 0:
                shown.refresh()
        for client in both:
            client.leave()
        shown.refresh()
        found = Samples(shown.seen.metrics.decode())
        page = Page(shown.seen.page.decode())
    (record,) = read_log(log)
    for worker in (Worker(0, 0), Worker(0, 1)):
        rows = [row for update in record.updates if update.rows.worker == worker for row in update.rows.rows]
        where = {"stage": str(worker.stage), "pipeline": str(worker.pipeline)}
        assert found("updates_total", **where) == sum(row.count for row in rows) >= 49
        for number, phase in enumerate(PHASES):
            seconds = sum(row.us[number] for row in rows) / 1e6
            assert found("phase_seconds_total", phase=phase, **where) == pytest.approx(seconds, abs=1e-9)
    groups = [group for entry in record.entries for group in entry.decisions]
    assert len(groups) == 50
    for reason in {group.reason for group in groups}:
        assert found("groups_total", stage="0", reason=reason) == sum(group.reason == reason for group in groups)
    assert found("blind") == 0
    assert any("too short to tell" in word for word in page.words)


def test_a_scheduler_that_was_started_again_is_followed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(AllReduceModels(), 1, 1) as server, clients(server.address, Worker(0, 0)) as (client,):
        follower = Follower(server.address, None)
        follower._next = 99  # of the one before
        follower.totals[Worker(0, 0)] = [1000] * (1 + len(PHASES))
        client.join()
        for iteration in range(2 * following.KEPT + 10):
            client.step_ended(iteration, 0.0)
        client.leave()
        seen, _ = follower.poll(5.0)
        assert follower.totals[Worker(0, 0)][0] == 1000 + 2 * following.KEPT + 9
        assert following.KEPT <= len(seen.series[Worker(0, 0)]) < 2 * following.KEPT
        assert seen.lost == ""
        known = len(seen.series[Worker(0, 0)])
        (more,) = chunks(Worker(0, 0), [60.0] * 8, life=seen.series[Worker(0, 0)].life)
        follower._add(more)
        assert len(seen.series[Worker(0, 0)]) == known, "a page that is being made is of one moment"
        follower._next = (follower._next or 0) - 1
        assert follower.poll(5.0)[0].lost == ""


def test_a_pipeline_is_lost_until_its_next_start_joins(status: Any) -> None:
    one, two = Worker(0, 0), Worker(0, 1)
    series = series_of([*chunks(one, [60.0] * 8, life=5), *chunks(two, [60.0] * 8, life=6)])
    reply = m.RowsReply(10.0, (), 0, 0, ())
    lost = series[two].ends[-1]
    for letters, lives, expected in (
        ("ca", {0: 5}, {two: lost}),  # it gets a state
        ("ca", {0: 5, 1: 7}, {two: lost}),  # it is a member
        ("cc", {0: 5, 1: 7}, {}),
        ("ca", {0: 5, 1: 6}, {}),  # it validates
    ):
        stage = replace(status.stages[0], states=letters, joined=[9.0, 1.0], silent=[0.0, 0.0])
        members = MembersStatus(2, "", 0, {0: "leads", 1: ""}, "", lives, [0, 1], [], None)
        told = of_answers(replace(status, stages=[stage], members=members), reply, series, "", [0.0])
        assert told.gone == expected, (letters, lives)


def test_a_page_has_findings_and_bars_and_takes_nothing_for_markup(status: Any) -> None:
    text = seen(status, "<script>alert(1)</script>").seen.page.decode()
    page = Page(text)
    assert "<script>alert(1)</script>, cuda:1" in page.words
    assert any("1.50 × as slow as its peers" in word for word in page.words)
    assert 'class="finding critical"' in text
    assert any(word.startswith("→ ") for word in page.words), "what to do"
    assert any("others waited 15.0 %" in word for word in page.words)
    assert "<title>forward 40.0 ms, 40.0 %</title>" in text
    Page(web.View(Fixed(), 1.0, "train.py").seen.page.decode())


def test_a_scheduler_that_is_silent_for_long_does_not_look_healthy(status: Any) -> None:
    follower = Fixed(seen(status).seen.told)
    shown = web.View(follower, 1.0, "train.py")
    with at(shown) as connection:
        assert get(connection, "/healthz")[:2] == (200, "ok\n")
        follower.seen = None
        shown.refresh()
        assert get(connection, "/healthz")[:2] == (200, "ok\n"), "it may be restarted"
        shown._heard -= web.UNHEARD
        shown.refresh()
        silence = "nothing listens at tcp://127.0.0.1:9 any more: the run is over, or its machine is down"
        assert get(connection, "/healthz")[:2] == (503, f"{silence}\n")
        assert Samples(get(connection, "/metrics")[1])("blind") == 1
        plain = json.loads(get(connection, "/status.json")[1])
        assert plain["silence"] == silence
        assert plain["findings"][0]["kind"] == "compute_straggler"
        words = Page(get(connection, "/")[1]).words
        assert silence in words
        assert not any("healthy" in word for word in words if "background" not in word and "border" not in word)


def test_a_scheduler_that_answers_slowly_is_not_called_gone(status: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as slow:
        follower = Fixed(seen(status).seen.told, slow.getsockname()[1])
        shown = web.View(follower, 1.0, "train.py")
        shown.refresh()
        follower.seen = None
        shown.refresh()
    assert shown.seen.silence == "the scheduler is slow to answer (nothing <listens> there)"
    assert shown.seen.alarm == ""


@pytest.mark.parametrize(("kept", "state"), [(1.0, "finished"), (0.5, "the log ends while 4 workers took part")])
def test_a_run_whose_scheduler_has_left_is_told_from_its_log(
    kept: float, state: str, status: Any, tmp_path: Path
) -> None:
    whole = (Path(__file__).parent / "golden" / "straggler.jsonl").read_bytes()
    (tmp_path / "log.jsonl").write_bytes(whole[: int(len(whole) * kept)])
    follower = Fixed(seen(status).seen.told)
    shown = web.View(follower, 1.0, "train.py", tmp_path / "log.jsonl")
    shown.refresh()
    follower.seen = None
    shown._heard -= web.UNHEARD
    shown.refresh()
    assert shown.seen.view["state"] == state
    assert bool(shown.seen.silence) == bool(shown.seen.alarm) == (state != "finished")


def test_only_get_only_known_hosts_and_nothing_for_other_sites(status: Any) -> None:
    with at(seen(status)) as connection:
        code, _, headers = get(connection, "/")
        assert code == 200
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        for path in ("/", "/status.json", "/metrics", "/healthz"):
            for host in ("evil.example", "evil.example:8420", ""):
                assert get(connection, path, Host=host)[0] == 421
            assert get(connection, path, Host="LOCALHOST:1")[0] == 200
            assert get(connection, path, "POST")[0] == 405
        assert get(connection, "/", "HEAD")[0] == 405
        code, _, headers = get(connection, "/etc/passwd")
        assert (code, headers["Cache-Control"]) == (404, "no-store")


def test_a_token_is_asked_for(status: Any) -> None:
    token = "0123456789abcdef"
    with at(seen(status), token) as connection:
        code, text, headers = get(connection, "/metrics")
        assert (code, headers["WWW-Authenticate"]) == (401, 'Basic realm="sdpipe"')
        assert "sdpipe_" not in text
        for given, expected in (
            (f"Bearer {token}", 200),
            (f"Bearer {token}x", 401),
            ("Bearer", 401),
            (f"Digest {token}", 401),
            ("Basic " + base64.b64encode(f"me:{token}".encode()).decode(), 200),
            ("Basic " + base64.b64encode(b"me:\xff").decode(), 401),
            ("Basic ???", 401),
        ):
            assert get(connection, "/metrics", Authorization=given)[0] == expected, given


def test_of_many_connections_the_oldest_are_cut(status: Any) -> None:
    with at(seen(status)) as connection, ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection((connection.host, connection.port)))
            for _ in range(web.MOST_CONNECTIONS + 8)
        ]
        assert get(connection, "/healthz")[0] == 200
        cut = 0
        for one in idle:
            one.settimeout(0.2)
            try:
                cut += one.recv(1) == b""
            except ConnectionResetError:
                cut += 1
            except TimeoutError:
                break
        assert cut == 9


def test_many_workers_are_added_up_by_stage() -> None:
    us = [500_000 if phase == "forward" else 0 for phase in PHASES]
    totals = {Worker(j, i): [3, *us] for j in range(2) for i in range(200)}
    found = Samples(web.Seen("", None, totals, "").metrics.decode())
    assert found("updates_total", stage="1", pipeline="all") == 600
    assert found("phase_seconds_total", stage="1", pipeline="all", phase="forward") == 100
    assert len(found.all) == 2 * (1 + len(PHASES)) + 1


def test_findings_have_a_cost_or_none(status: Any) -> None:
    """What others stood still, in the gauge."""
    found = Samples(seen(status).seen.metrics.decode())
    assert found("finding_cost", kind="compute_straggler", who="0.1") == pytest.approx(0.15)
    unknown = web.Seen("", None, {}, "")
    unknown.found = [Finding("blind", "blind", (), 0.0, "too little")]
    assert math.isnan(Samples(unknown.metrics.decode())("finding_cost", kind="blind", who=""))


def test_what_cannot_be_served_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = tmp_path / "token"

    def refused(*arguments: str) -> str:
        assert main(["serve", "tcp://127.0.0.1:1", *arguments, "--timeout", "0.2"]) == 2
        return capsys.readouterr().err

    assert "give --token-file too" in refused("--host", "0.0.0.0")
    assert "give --token-file too" in refused("--host", "node7.cluster")
    assert "cannot be read: No such file" in refused("--token-file", str(token))
    token.write_text("short\n")
    token.chmod(0o644)
    assert f"chmod 600 {token}" in refused("--token-file", str(token))
    token.chmod(0o600)
    assert "has 5 characters" in refused("--token-file", str(token))
    assert "did not answer within" in refused()
    with (
        two_of_this_account() as (server, _),
        socket.create_server(("127.0.0.1", 0)) as taken,
    ):
        port = str(taken.getsockname()[1])
        assert main(["serve", server.address, "--port", port]) == 2
        assert f"port {port} (" in capsys.readouterr().err


@pytest.mark.distributed
def test_it_is_a_process_of_its_own_that_ends_when_told_to() -> None:
    with two_of_this_account() as (server, _):
        command = [sys.executable, "-m", "lightning_sdpipe.cli", "serve", server.address, "--port", "0"]
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if these tests run in a background
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        signal.signal(signal.SIGINT, before)
        with process:
            try:
                assert process.stdout is not None
                url = process.stdout.readline().partition(" ")[0]
                connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=600)
                Page(get(connection, "/")[1])
                connection.close()
                process.send_signal(signal.SIGINT)
                assert process.wait() == -signal.SIGINT, "a shell makes 130 of it"
            finally:
                process.kill()
