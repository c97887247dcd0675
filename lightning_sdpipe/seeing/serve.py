"""``sdpipe serve``: shows a run as a web page and as metrics for Prometheus, from a separate process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path

from lightning_sdpipe.command_line import Parser, check_installed, seconds
from lightning_sdpipe.errors import ConfigurationError, os_errors_as
from lightning_sdpipe.scheduler.credentials import check_port, is_loopback, read_private
from lightning_sdpipe.seeing.command import add_scheduler, scheduler_of
from lightning_sdpipe.seeing.following import Follower

PORT = 8420
_SHORTEST_TOKEN = 16


def main(arguments: Sequence[str]) -> None:
    """Serve the page until interrupted."""
    options = _parser().parse_args(arguments)
    check_port(f"tcp://{options.host}:{options.port}")
    token = None if options.token_file is None else _token(options.token_file)
    if token is None and not is_loopback(f"tcp://{options.host}:0"):
        raise ConfigurationError(
            f"--host {options.host} can be reached by other machines; give --token-file too, or leave it at 127.0.0.1"
        )
    check_installed("sdpipe serve", "serve", "aiohttp", "jinja2", "prometheus_client")
    from lightning_sdpipe.seeing import web

    address, keys, run = scheduler_of(options.address, options.key_file)
    follower = Follower(address, keys)
    follower.poll(options.timeout)  # reports an unreachable scheduler at once
    names = {"localhost", "127.0.0.1", "::1", options.host, socket.gethostname(), *options.allow_host}
    hosts = frozenset(name.lower() for name in names)

    title = f"the run at {address}" if run is None or not run.script else f"{Path(run.script).name} in {run.directory}"
    view = web.View(follower, options.timeout, title, None if run is None or run.log is None else Path(run.log))

    def opened(at: str) -> None:
        print(f"{at} shows the run at {address}; /status.json, /metrics and /healthz are for machines", flush=True)

    with os_errors_as(f"nothing can listen at {options.host}, port {options.port}", "give another --port"):
        asyncio.run(web.serve(view, options.host, options.port, hosts, token, opened))


def _parser() -> Parser:
    parser = Parser(
        "serve", "Shows a run in a browser, and exports its metrics to Prometheus; needs the extra `serve`."
    )
    add_scheduler(parser)
    add = parser.add_argument
    add("--port", type=int, default=PORT, help="port to listen at; 0 for any free port")
    add("--host", default="127.0.0.1", help="address to listen at; any but loopback needs --token-file")
    add(
        "--token-file",
        type=Path,
        help=f"a file, readable by you only, with the token that requests need, {_SHORTEST_TOKEN} characters or more",
    )
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another name of this machine that browsers may use; may be repeated",
    )
    add("--timeout", type=seconds, default=3.0, help="wait for an answer")
    return parser


def _token(path: Path) -> str:
    token = read_private(path, f"--token-file {path} cannot be read").decode().strip()
    if len(token) < _SHORTEST_TOKEN:
        raise ConfigurationError(
            f"the token in {path} has {len(token)} characters, and {_SHORTEST_TOKEN} are needed: "
            f"openssl rand -hex 16 > {path}"
        )
    return token
