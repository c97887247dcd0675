"""The page, plain values and metrics of a run, and the web server of ``sdpipe serve``, which answers GET and changes
nothing."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import json
import math
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

import jinja2
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lightning_sdpipe.errors import SchedulerError
from lightning_sdpipe.meter import OWN, PHASES
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler.log import status_page
from lightning_sdpipe.scheduler.log.status import Status
from lightning_sdpipe.seeing.detectors import abstains, findings
from lightning_sdpipe.seeing.finding import Finding
from lightning_sdpipe.seeing.following import Follower, Totals
from lightning_sdpipe.seeing.page import MEANINGS, RECENT, recommended, said, to_plain
from lightning_sdpipe.seeing.recording import Recording

MOST_WORKERS = 256
"""Largest number of workers that each have metrics; above, those of a stage are added up."""
ALL = "all"

_COLOURS = (
    *("#b0bec5", "#8d6e63", "#43a047", "#1e88e5", "#00897b", "#d81b60", "#6d4c41"),
    *("#ffe082", "#ffcc80", "#ffab91", "#ef9a9a", "#e0e0e0", "#ce93d8"),
)

EVERY = 1.0
"""Seconds between questions to the scheduler."""
MOST_CONNECTIONS = 64
"""Largest number of connections; for one more, the oldest is closed."""
_SOON = 0.01
"""Seconds until an accepted connection counts."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class View:
    """The run that ``follower`` follows, for any thread. Each form is made once for all requests.

    Args:
        follower: asks the scheduler.
        timeout: seconds in which the scheduler must answer.
    """

    def __init__(self, follower: Follower, timeout: float) -> None:
        self._follower, self._timeout = follower, timeout
        self._lock = threading.Lock()
        self._seen: tuple[Recording, Status] | None = None
        self._found: list[Finding] | None = None
        self._made: dict[str, bytes] = {}
        self.silence = "it was not asked yet"
        """Reason why nothing new is known, if so."""

    def refresh(self) -> None:
        """Ask the scheduler."""
        with self._lock:
            try:
                self._seen, self._found, self.silence = self._follower.look(self._timeout), None, ""
            except SchedulerError as error:  # the scheduler may be restarted
                self.silence = str(error)
            self._made = {}

    def page(self) -> bytes:
        """Return the page for people."""
        return self._form("page", self._page)

    def plain(self) -> bytes:
        """Return JSON, as of ``sdpipe status --json``; ``silence`` says why it is not new."""
        return self._form("plain", self._plain)

    def metrics(self) -> bytes:
        """Return the metrics for Prometheus."""
        return self._form("metrics", self._metrics)

    def _form(self, name: str, make: Callable[[], bytes]) -> bytes:
        with self._lock:
            if self._found is None and self._seen is not None:
                self._found = findings(self._seen[0])
            made = self._made.get(name)
            if made is None:
                made = self._made[name] = make()
            return made

    def _page(self) -> bytes:
        title, seen = f"the run at {self._follower.address}", self._seen
        phases = [
            {"name": name, "colour": colour, "meaning": MEANINGS.get(name, name)}
            for name, colour in zip(PHASES, _COLOURS, strict=True)
        ]
        facts = {"title": title, "phases": phases, "silence": self.silence, "recent": RECENT}
        facts |= {"said": said, "recommended": recommended, "healthy": False}
        facts |= {"findings": (), "abstains": None, "rows": (), "page": ""}
        if seen is not None:
            recording, status = seen
            facts |= {
                "findings": self._found,
                "abstains": abstains(recording),
                "healthy": all(finding.severity == "note" for finding in self._found or ()),
                "rows": [_row(recording, worker) for worker in sorted(recording.series)],
                "page": status_page.render(status),
            }
        return _template().render(facts).encode()

    def _plain(self) -> bytes:
        plain = {} if self._seen is None else to_plain(*self._seen, self._found)
        return json.dumps(plain | {"silence": self.silence or None}, allow_nan=False).encode()

    def _metrics(self) -> bytes:
        status = None if self._seen is None else self._seen[1]
        return exposition(self._follower.totals, status, self._found or (), not self.silence)


def exposition(
    totals: Mapping[Worker, Totals], status: Status | None, found: Iterable[Finding], answers: bool
) -> bytes:
    """Return the text for Prometheus. A run whose scheduler does not answer is ``blind``."""
    registry = CollectorRegistry()
    registry.register(_Run(totals, status, list(found), answers))
    return generate_latest(registry)


class _Run(Collector):
    def __init__(
        self, totals: Mapping[Worker, Totals], status: Status | None, found: list[Finding], answers: bool
    ) -> None:
        self._totals, self._status, self._found, self._answers = totals, status, found, answers

    def collect(self) -> Iterator[Metric]:
        where = ["stage", "pipeline"]
        updates = CounterMetricFamily("sdpipe_updates", "Updates that workers have told of.", labels=where)
        phases = CounterMetricFamily(
            "sdpipe_phase_seconds", "Seconds of training threads in each phase.", labels=[*where, "phase"]
        )
        many = len(self._totals) > MOST_WORKERS
        made: defaultdict[tuple[str, str], int] = defaultdict(int)
        spent: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0] * len(PHASES))
        for worker, totals in sorted(self._totals.items()):
            key = str(worker.stage), ALL if many else str(worker.pipeline)
            made[key] += totals.updates
            spent[key] = [a + b for a, b in zip(spent[key], totals.us, strict=True)]
        for key, count in made.items():
            updates.add_metric(key, count)
            for name, us in zip(PHASES, spent[key], strict=True):
                phases.add_metric([*key, name], us / 1e6)
        yield updates
        yield phases
        groups = CounterMetricFamily("sdpipe_groups", "Groups that went out, by why.", labels=["stage", "reason"])
        for number, stage in enumerate(self._status.stages if self._status is not None else ()):
            for reason, count in sorted(stage.reasons.items()):
                groups.add_metric([str(number), reason], count)
        yield groups
        cost = GaugeMetricFamily(
            "sdpipe_finding_cost",
            "Share of all workers' time that others stood still for what was found; NaN where it cannot be told.",
            labels=["kind", "who"],
        )
        for finding in self._found:
            who = " ".join(f"{worker.stage}.{worker.pipeline}" for worker in finding.workers)
            cost.add_metric([finding.kind, who], math.nan if finding.cost is None else finding.cost.stood)
        yield cost
        blind = not self._answers or any(finding.severity == "blind" for finding in self._found)
        yield GaugeMetricFamily("sdpipe_blind", "1 if too little is known to call the run healthy.", value=blind)


def _row(recording: Recording, worker: Worker) -> dict[str, object]:
    series, about = recording.series[worker], recording.about.get(worker)
    recent = series.us[-RECENT:]
    us = [sum(phase) / len(recent) for phase in zip(*recent, strict=True)]
    whole = sum(us)
    return {
        "stage": worker.stage,
        "pipeline": worker.pipeline,
        "rank": "-" if about is None else about.rank,
        "where": "-" if about is None else str(about),
        "updates": len(series),
        "ms": whole / 1e3,
        "own": sum(us[:OWN]) / 1e3,
        "shares": [(name, 100 * part / whole) for name, part in zip(PHASES, us, strict=True) if part],
    }


def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(Path(__file__).with_name("serve.html").read_text())


def application(view: View, hosts: Collection[str], token: str | None) -> web.Application:
    """Make the application that shows ``view`` to requests that name one of ``hosts``, and the ``token`` if there is
    one.

    A page of another site that a browser is at cannot read this: its requests name the other site's host, even where
    that has been made to point here.
    """

    @web.middleware
    async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            if _name(request.headers.get("Host", "")) not in hosts:
                raise web.HTTPMisdirectedRequest(text="this host is not in the list; see --allow-host\n")
            if token is not None and not _knows(request.headers.get("Authorization", ""), token):
                raise web.HTTPUnauthorized(headers={"WWW-Authenticate": 'Basic realm="sdpipe"'})
            response = await handler(request)
        except web.HTTPException as error:
            error.headers.update(_HEADERS)
            raise
        response.headers.update(_HEADERS)
        return response

    def shows(form: Callable[[], bytes], kind: str) -> _Handler:
        async def show(_: web.Request) -> web.Response:
            return web.Response(body=await asyncio.to_thread(form), headers={"Content-Type": kind})

        return show

    async def health(_: web.Request) -> web.Response:
        silence = view.silence
        return web.Response(text=f"{silence or 'ok'}\n", status=503 if silence else 200)

    app = web.Application(middlewares=[guard], client_max_size=0)
    app.router.add_get("/", shows(view.page, "text/html; charset=utf-8"), allow_head=False)
    app.router.add_get("/status.json", shows(view.plain, "application/json"), allow_head=False)
    app.router.add_get("/metrics", shows(view.metrics, CONTENT_TYPE_LATEST), allow_head=False)
    app.router.add_get("/healthz", health, allow_head=False)
    return app


async def serve(
    view: View, host: str, port: int, hosts: Collection[str], token: str | None, opened: Callable[[str], None]
) -> None:
    """Serve until it is cancelled; ``opened`` is called with the address.

    Raises:
        OSError: the server cannot listen there.
    """
    runner = web.AppRunner(application(view, hosts, token), access_log=None, keepalive_timeout=15.0)
    await runner.setup()
    try:
        server = runner.server
        assert server is not None

        def cut() -> None:
            for oldest in server.connections[:-MOST_CONNECTIONS]:
                if oldest.transport is not None:
                    oldest.transport.abort()

        def accept() -> asyncio.Protocol:
            loop.call_later(_SOON, cut)
            return server()

        loop = asyncio.get_running_loop()
        listening = await loop.create_server(accept, host, port)
        name, number, *_ = listening.sockets[0].getsockname()
        opened(f"http://[{name}]:{number}" if ":" in name else f"http://{name}:{number}")
        try:
            while True:
                await asyncio.to_thread(view.refresh)
                await asyncio.sleep(EVERY)
        finally:
            listening.close()
    finally:
        await runner.cleanup()


def _name(host: str) -> str:
    """Return a host's name without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _knows(authorization: str, token: str) -> bool:
    """Return whether the request has the token, as ``Bearer`` or as the password of ``Basic``, which browsers ask
    for."""
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            given = base64.b64decode(given, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return False
    elif scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(given.encode(), token.encode())
