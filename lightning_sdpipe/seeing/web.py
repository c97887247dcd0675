"""Web server of ``sdpipe serve``: it answers GET, and changes nothing."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
from collections.abc import Awaitable, Callable, Collection

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from lightning_sdpipe.seeing.view import View

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
