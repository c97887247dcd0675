"""The page, plain values and metrics of a run, and the web server of ``sdpipe serve``, which answers only GET and
changes nothing."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import json
import math
import socket
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lightning_sdpipe.errors import ConfigurationError, SchedulerError
from lightning_sdpipe.meter import PHASES
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler.credentials import host_and_port
from lightning_sdpipe.scheduler.log import status_page
from lightning_sdpipe.scheduler.log.status import Status
from lightning_sdpipe.seeing.detectors import findings
from lightning_sdpipe.seeing.finding import Finding
from lightning_sdpipe.seeing.following import Follower
from lightning_sdpipe.seeing.html import SCRIPT, page
from lightning_sdpipe.seeing.page import to_plain
from lightning_sdpipe.seeing.recording import Recording, of_log

MOST_WORKERS = 256
"""Largest number of workers with their own metrics; with more, a stage's are added up."""
ALL = "all"

EVERY = 1.0
"""Seconds between questions to the scheduler."""
MOST_CONNECTIONS = 64
"""Largest number of connections; beyond it, the oldest is closed."""
_SOON = 0.01
"""Seconds until an accepted connection counts."""
UNHEARD = 30.0
"""Seconds without an answer from the scheduler that raise an alarm."""
_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_HASH}'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(eq=False)
class Seen(Collector):
    """A run as its scheduler last told it. ``silence`` says why the last question had no answer, if so, and
    ``unheard`` how many seconds ago the last answer came. Each form is made once for all requests."""

    title: str
    told: tuple[Recording, Status] | None
    totals: Mapping[Worker, list[int]]
    silence: str
    unheard: float = 0.0

    @property
    def alarm(self) -> str:
        """Why the run needs attention; empty if it does not."""
        state = "unknown" if self.told is None else self.told[0].state
        if state.startswith(("failed", "stopped")):
            return state
        return self.silence if self.unheard > UNHEARD and state != "finished" else ""

    @cached_property
    def found(self) -> list[Finding]:
        """The findings in the recording."""
        return [] if self.told is None else findings(self.told[0])

    @cached_property
    def view(self) -> dict[str, Any]:
        """The view of the run; empty if nothing is known."""
        return {} if self.told is None else to_plain(*self.told, self.found)

    @cached_property
    def page(self) -> bytes:
        """The web page."""
        if self.told is None:
            return page(self.title, {}, silence=self.silence, live=True)
        recording, status = self.told
        scheduler = status_page.render(status)
        return page(self.title, self.view, recording, silence=self.silence, scheduler=scheduler, live=True)

    @cached_property
    def plain(self) -> bytes:
        """JSON as from ``sdpipe status --json``; ``silence`` says why it is old."""
        return json.dumps(self.view | {"silence": self.silence or None}, allow_nan=False).encode()

    @cached_property
    def metrics(self) -> bytes:
        """Metrics for Prometheus, as text. A run whose scheduler does not answer is ``blind``."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        where = ["stage", "pipeline"]
        updates = CounterMetricFamily("sdpipe_updates", "Updates that workers have told of.", labels=where)
        phases = CounterMetricFamily(
            "sdpipe_phase_seconds", "Seconds of training threads in each phase.", labels=[*where, "phase"]
        )
        many = len(self.totals) > MOST_WORKERS
        sums: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0] * (1 + len(PHASES)))
        for worker, totals in sorted(self.totals.items()):
            key = str(worker.stage), ALL if many else str(worker.pipeline)
            sums[key] = [a + b for a, b in zip(sums[key], totals, strict=True)]
        for key, (count, *spent) in sums.items():
            updates.add_metric(key, count)
            for name, us in zip(PHASES, spent, strict=True):
                phases.add_metric([*key, name], us / 1e6)
        yield updates
        yield phases
        groups = CounterMetricFamily("sdpipe_groups", "Groups that went out, by why.", labels=["stage", "reason"])
        for number, stage in enumerate(() if self.told is None else self.told[1].stages):
            for reason, count in sorted(stage.reasons.items()):
                groups.add_metric([str(number), reason], count)
        yield groups
        cost = GaugeMetricFamily(
            "sdpipe_finding_cost",
            "Share of all workers' time that others stood still for what was found; NaN where it cannot be told.",
            labels=["kind", "who"],
        )
        for finding in self.found:
            who = " ".join(f"{worker.stage}.{worker.pipeline}" for worker in finding.workers)
            cost.add_metric([finding.kind, who], math.nan if finding.cost is None else finding.cost.stood)
        yield cost
        blind = bool(self.alarm) or any(finding.severity == "blind" for finding in self.found)
        yield GaugeMetricFamily("sdpipe_blind", "1 if too little is known to call the run healthy.", value=blind)


class View:
    """The run that ``follower`` follows; any thread may read ``seen``.

    Args:
        follower: asks the scheduler.
        timeout: seconds in which the scheduler must answer each question.
        title: name of the run.
        log: file on this machine with the scheduler's log, which tells how the run ended.
    """

    def __init__(self, follower: Follower, timeout: float, title: str, log: Path | None = None) -> None:
        self._follower, self._timeout, self._title, self._log = follower, timeout, title, log
        self._heard = time.monotonic()
        self.seen = Seen(title, None, {}, "it was not asked yet")

    def refresh(self) -> None:
        """Ask the scheduler, and replace ``seen``."""
        told, silence = self.seen.told, ""
        try:
            told = self._follower.poll(self._timeout)
            self._heard = time.monotonic()
        except SchedulerError as error:
            silence = f"the scheduler is slow to answer ({error})"
            if _refuses(self._follower.address):  # the run is over, or the scheduler is being restarted
                silence = (
                    f"nothing listens at {self._follower.address} any more: the run is over, or its machine is down"
                )
                if told is not None and self._log is not None and not told[0].over:
                    with contextlib.suppress(ConfigurationError):  # the log is gone
                        told = of_log(self._log), told[1]
                if told is not None and told[0].state == "finished":
                    silence = ""
        totals = {worker: [*sums] for worker, sums in self._follower.totals.items()}
        self.seen = Seen(self._title, told, totals, silence, time.monotonic() - self._heard)


def application(view: View, hosts: Collection[str], token: str | None) -> web.Application:
    """Make the application that shows ``view`` to requests that name one of ``hosts`` and have the ``token``, if there
    is one.

    Another site's page in the same browser cannot read this: its requests name the other site's host, even if that name
    has been made to point here.
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

    def shows(form: str, kind: str) -> _Handler:
        async def show(_: web.Request) -> web.Response:
            body: bytes = await asyncio.to_thread(getattr, view.seen, form)
            return web.Response(body=body, headers={"Content-Type": kind})

        return show

    async def health(_: web.Request) -> web.Response:
        alarm = view.seen.alarm
        return web.Response(text=f"{alarm or 'ok'}\n", status=503 if alarm else 200)

    app = web.Application(middlewares=[guard], client_max_size=0)
    app.router.add_get("/", shows("page", "text/html; charset=utf-8"), allow_head=False)
    app.router.add_get("/status.json", shows("plain", "application/json"), allow_head=False)
    app.router.add_get("/metrics", shows("metrics", CONTENT_TYPE_LATEST), allow_head=False)
    app.router.add_get("/healthz", health, allow_head=False)
    return app


async def serve(
    view: View, host: str, port: int, hosts: Collection[str], token: str | None, opened: Callable[[str], None]
) -> None:
    """Serve until cancelled; call ``opened`` with the address.

    Raises:
        OSError: the server cannot listen at this address.
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


def _refuses(address: str) -> bool:
    """Return whether it is certain that no program listens at ``address``."""
    host, port = host_and_port(address)
    try:
        socket.create_connection((host, int(port)), EVERY).close()
    except (OSError, ValueError) as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def _name(host: str) -> str:
    """Return a host's name without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _knows(authorization: str, token: str) -> bool:
    """Return whether the request has the token, as ``Bearer`` or as the password of ``Basic``, for which browsers
    ask."""
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            given = base64.b64decode(given, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return False
    elif scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(given.encode(), token.encode())
