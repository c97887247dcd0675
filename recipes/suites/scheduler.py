"""Cost of the scheduler beside a bare ZeroMQ echo, and growth of its policy's cost.

All clients of a stage finish an iteration together, the worst case: every client sends its ready in one burst, and the
burst ends when all are answered. The floor is an echo, a ROUTER that returns every message of a ready's size to its
sender, in the same bursts and in rotated order, encrypted like ours. Three policies bound a scheduler's work in such a
burst: all workers in one group, random pairs, and each worker in its own group (T = 0).

Rates are signals per second of the server's processor time, input/output thread included, which one core could sustain;
the benchmark's clients are slower than that.
"""

from __future__ import annotations

import math
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from subprocess import PIPE, Popen

import zmq

from lightning_sdpipe.membership.members import FIXED
from lightning_sdpipe.policies.ad_psgd import ADPSGD
from lightning_sdpipe.policies.events import Joined, Ready, Tick, Worker
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client.wire import use_keys
from lightning_sdpipe.scheduler.credentials import WorkerKeys, make_keys
from lightning_sdpipe.scheduler.server.process import SchedulerProcess
from recipes.suites.grid import Goal, Ratios, Row, in_turn, ratios, versus

ECHO = """
import sys
import zmq
with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
    router.set_hwm(0)
    router.curve_server = True
    router.curve_publickey, router.curve_secretkey = (line.strip().encode() for line in sys.stdin)
    router.bind("tcp://127.0.0.1:*")
    print(router.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
    while True:
        router.send_multipart(router.recv_multipart())
"""
POLICIES: dict[str, PolicyConfig] = {
    "one group": SemiDecentralized(window=math.inf),
    "pairs": ADPSGD(seed=0),
    "alone": SemiDecentralized(window=0.0, connectivity=None),
}
KINDS = {"one group": "", "pairs": "_pairs", "alone": "_alone"}
"""The suffix of keys for each policy."""
LOWER_IS_BETTER = frozenset({*(f"echo{kind}_{p}" for kind in KINDS.values() for p in ("p50", "p99")), "policy_growth"})
PATIENCE_MS = 30_000


def run(
    *, clients: Sequence[int], signals: int, policy_sizes: Sequence[int], repeats: int, seed: int
) -> tuple[list[Row], Ratios]:
    """Return rows and ratios of the whole suite.

    Args:
        clients: numbers of clients of one stage.
        signals: number of signals in one measurement.
        policy_sizes: numbers of pipelines of the pure policy; growth is relative to the first.
        repeats: repeats of each measurement.
        seed: seed of all randomness.
    """
    rows = [row for count in clients for row in _service(count, signals, repeats, seed)]
    goals: dict[str, Goal] = {}
    for count in clients:
        for kind, suffix in KINDS.items():
            for p, value in (("p50", 2.0), ("p99", 4.0)):
                meaning = f"last ready of a group to its group, {kind}, {count} clients: ours over the echo's"
                goals[f"echo{suffix}_{p}/{count}"] = versus(meaning, f"{p}_us", kind, "echo", value, clients=count)
            if count == max(clients):
                meaning = f"signals per second of one core, {kind}, {count} clients: ours over the echo's"
                goals[f"echo_rate{suffix}"] = versus(meaning, "signals_per_core_s", kind, "echo", 0.5, clients=count)
    for repeat, size in in_turn(policy_sizes, repeats):
        cost = 1e6 * _policy_cost(size, random.Random(f"{seed}/{repeat}/{size}"))
        row = {"what": "policy", "clients": size, "repeat": repeat, "us_per_signal": cost}
        rows.append(row | {"us_by_log": cost / math.log(size)})
    smallest, *larger = policy_sizes
    for size in larger:
        meaning = f"pure policy: cost per signal, by log N, at {size} over {smallest} pipelines"
        above, below = ({"what": "policy", "clients": count} for count in (size, smallest))
        goals[f"policy_growth/{size}"] = Goal(meaning, "us_by_log", above, below, 1.0)
    return rows, ratios(rows, goals)


def _service(count: int, signals: int, repeats: int, seed: int) -> list[Row]:
    rows: list[Row] = []
    with ExitStack() as stack:
        order = ["echo", *POLICIES]
        servers = {kind: stack.enter_context(server_of(kind, count)) for kind in order}
        random.Random(seed).shuffle(order)
        for repeat, kind in in_turn(order, repeats):
            with connected(kind, count, servers[kind], session=repeat) as bursts:
                bursts.repeat(max(5, 1000 // count))  # connections and caches
                row = {"what": kind, "clients": count, "repeat": repeat}
                rows.append(row | bursts.repeat(signals // count))
    return rows


@dataclass(frozen=True)
class Server:
    """A process that answers workers, or echoes their messages."""

    address: str
    keys: WorkerKeys
    pid: int

    def processor_seconds(self) -> float:
        """Return the processor seconds that all its threads have used so far."""
        with open(f"/proc/{self.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def server_of(kind: str, count: int) -> Iterator[Server]:
    """Run a server of ``kind``, ``"echo"`` or a name in :data:`POLICIES`, for ``count`` clients."""
    if kind != "echo":
        with SchedulerProcess.embedded(POLICIES[kind], 1, count) as scheduler:
            assert scheduler.credentials is not None
            yield Server(scheduler.address, scheduler.credentials, scheduler.pid)
        return
    keys, credentials = make_keys()
    with Popen([sys.executable, "-c", ECHO], stdin=PIPE, stdout=PIPE, text=True) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with process.stdin as file:
                file.write(f"{keys.public}\n{keys.secret}\n")
            yield Server(process.stdout.readline().strip(), credentials, process.pid)
        finally:
            process.kill()


class Bursts:
    """Clients in this process, by socket, which send together and are answered together."""

    def __init__(self, kind: str, workers: dict[zmq.Socket[bytes], Worker], server: Server, session: int) -> None:
        self._kind, self.workers, self._server, self._session = kind, workers, server, session
        self._iteration = 0
        self._poller = zmq.Poller()
        for socket in workers:
            self._poller.register(socket, zmq.POLLIN)

    def repeat(self, rounds: int) -> Row:
        """Make ``rounds`` bursts; return percentiles of the time to the answer, and signals per processor second."""
        before = self._server.processor_seconds()
        latencies = sorted(latency for _ in range(rounds) for latency in self._burst())
        used = self._server.processor_seconds() - before
        return {
            "p50_us": 1e6 * latencies[len(latencies) // 2],
            "p99_us": 1e6 * latencies[int(len(latencies) * 0.99)],
            "signals_per_core_s": len(latencies) / max(used, 0.01),
        }

    def _burst(self) -> list[float]:
        self._iteration += 1
        sent: dict[Worker, float] = {}
        got: dict[Worker, tuple[float, bytes]] = {}
        frames = [
            m.encode(m.Ready(w, self._session, self._iteration + 1, self._iteration)) for w in self.workers.values()
        ]
        for (socket, worker), frame in zip(self.workers.items(), frames, strict=True):
            sent[worker] = time.perf_counter()
            socket.send(frame)
        while len(got) < len(sent):
            ready = self._poller.poll(PATIENCE_MS)
            if not ready:
                raise TimeoutError(f"{len(got)} of {len(sent)} answers came from the {self._kind} server")
            for socket, _ in ready:
                assert isinstance(socket, zmq.Socket)
                frame = socket.recv()
                got[self.workers[socket]] = time.perf_counter(), frame
        if self._kind == "echo":
            return [at - sent[worker] for worker, (at, _) in got.items()]
        latencies = []
        for at, frame in got.values():
            reply = m.decode_reply(frame)
            assert isinstance(reply, m.Answer), reply
            latencies.append(at - max(sent[member] for member in reply.group.members))
        return latencies


@contextmanager
def connected(kind: str, count: int, server: Server, session: int) -> Iterator[Bursts]:
    """Connect ``count`` clients, which join unless the server is an echo."""
    workers: dict[zmq.Socket[bytes], Worker] = {}
    with zmq.Context() as context, ExitStack() as stack:
        for worker in (Worker(0, pipeline) for pipeline in range(count)):
            socket = dealer(stack, context, server, m.routing_id(worker, session))
            workers[socket] = worker
            if kind != "echo":
                _enrol(stack, context, worker, server, session)
                socket.send(m.encode(m.Join(worker, session, 1, None)))
        takes_part = workers if kind != "echo" else {}
        for socket in takes_part:
            _acknowledged(socket, "join")
        yield Bursts(kind, workers, server, session)
        for socket, worker in takes_part.items():
            socket.send(m.encode(m.Leave(worker, session, 1 << 40)))
            _acknowledged(socket, "leave")


def dealer(
    stack: ExitStack,
    context: zmq.Context[zmq.Socket[bytes]],
    server: Server,
    identity: bytes | None = None,
    **options: int,
) -> zmq.Socket[bytes]:
    """Return a connected socket, which ``stack`` closes."""
    socket = stack.enter_context(context.socket(zmq.DEALER))
    socket.setsockopt(zmq.LINGER, 0)
    if identity is not None:
        socket.setsockopt(zmq.ROUTING_ID, identity)
    for name, value in options.items():
        socket.setsockopt(getattr(zmq, name), value)
    use_keys(socket, server.keys)
    socket.connect(server.address)
    return socket


def _enrol(
    stack: ExitStack, context: zmq.Context[zmq.Socket[bytes]], worker: Worker, server: Server, session: int
) -> None:
    """Enrol in a run of fixed pipelines; the worker finishes when ``stack`` closes."""
    socket = dealer(stack, context, server, e.peer_of(worker, session), LINGER=1000)
    socket.send(m.encode(e.Enrol(worker, session, 1, FIXED)))
    if not socket.poll(PATIENCE_MS):
        raise TimeoutError("the server did not let a worker enrol")
    stack.callback(_acknowledged, socket, "departure")
    stack.callback(socket.send, m.encode(e.Depart(worker, session, 2, True)))


def _acknowledged(socket: zmq.Socket[bytes], what: str) -> None:
    while socket.poll(PATIENCE_MS):
        if isinstance(m.decode_reply(socket.recv()), e.Noted):
            return
    raise TimeoutError(f"the server did not acknowledge a {what}")


def _policy_cost(size: int, rng: random.Random) -> float:
    """Return the seconds per signal of workers of different speeds under a virtual clock, about four of which arrive
    within a window."""
    policy = SemiDecentralized(window=4.0 / size, connectivity=10, max_group=size).make_policy(1, size)
    workers = [Worker(0, pipeline) for pipeline in range(size)]
    for worker in workers:
        policy.on(Joined(worker), 0.0)
    rounds = max(4, 40_000 // size)
    # A worker's next arrival comes after its last one was answered, or is skipped.
    arrivals = sorted((k + rng.random(), pipeline, k) for k in range(rounds) for pipeline in range(size))
    waiting = policy.participants.waiting[0]
    signals = 0
    start = time.perf_counter()
    for now, pipeline, k in arrivals:
        due = policy.deadline()
        if due is not None and due <= now:
            policy.on(Tick(), due)
        if pipeline not in waiting:
            policy.on(Ready(workers[pipeline], k), now)
            signals += 1
    return (time.perf_counter() - start) / signals
