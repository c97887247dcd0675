"""Cost of the scheduler beside a bare ZeroMQ echo, and growth of its policy's cost.

All clients of a stage finish an iteration together, the worst moment: every client sends its ready in one
burst, and the burst ends when all are answered. The floor is an echo, a ROUTER that returns every message of
a ready's size to its sender, in the same bursts and in rotated order, encrypted as ours is. Three policies bound
what a scheduler does with such a burst: all workers in one group, random pairs, and each in a group of its own (T = 0).

Rates count signals per second of processor time of the server, input/output thread included, since that is
what one core would sustain; the clients of the benchmark are slower than that.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import zmq

from lightning_sdpipe.heterogeneity import Delays
from lightning_sdpipe.membership.members import FIXED
from lightning_sdpipe.policies.ad_psgd import ADPSGD
from lightning_sdpipe.policies.events import Joined, Ready, Tick, Worker
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client.connection import use_keys
from lightning_sdpipe.scheduler.credentials import WorkerKeys, make_keys
from lightning_sdpipe.scheduler.server.process import SchedulerProcess
from lightning_sdpipe.simulate import Work, jittered, simulate
from recipes.suites.ratios import Ratios, Row, ratio, rotated

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
LOWER_IS_BETTER = frozenset(
    {
        *(f"echo{kind}_{p}" for kind in ("", "_pairs", "_alone") for p in ("p50", "p99")),
        "policy_growth",
    }
)
SIGNALS_PER_MEASUREMENT = 8192
POLICY_SIZES = (16, 256, 4096)
SIMULATED_ITERATIONS = 100
PATIENCE_MS = 30_000


def run(*, clients: tuple[int, ...] = (16, 64, 256), repeats: int = 5, seed: int = 0) -> tuple[list[Row], Ratios]:
    """Rows and ratios of the whole suite."""
    rows: list[Row] = []
    ratios: Ratios = {}
    for count in clients:
        measured = _service(count, repeats, seed)
        rows += [row for kind in measured.values() for row in kind]
        for kind, suffix in (("one group", ""), ("pairs", "_pairs"), ("alone", "_alone")):
            for column, goal in (("p50_us", 2.0), ("p99_us", 4.0)):
                meaning = f"last ready of a group to its group, {kind}, {count} clients: ours over the echo's"
                key = f"echo{suffix}_{column.removesuffix('_us')}/{count}"
                ratios[key] = ratio(_over(measured[kind], measured["echo"], column), goal, meaning)
            if count == max(clients):
                meaning = f"signals per second of one core, {kind}, {count} clients: ours over the echo's"
                values = _over(measured[kind], measured["echo"], "signals_per_core_s")
                ratios[f"echo_rate{suffix}"] = ratio(values, 0.5, meaning)
    policy = _policy(repeats, seed)
    rows += [_simulation(repeat, seed) for repeat in range(repeats)]
    rows += [row for kind in policy.values() for row in kind]
    smallest, *larger = policy
    for size in larger:
        growth = math.log(size) / math.log(smallest)
        values = [quotient / growth for quotient in _over(policy[size], policy[smallest], "us_per_signal")]
        meaning = f"pure policy: cost per signal, by log N, at {size} over {smallest} pipelines"
        ratios[f"policy_growth/{size}"] = ratio(values, 1.0, meaning)
    return rows, ratios


def _over(rows: Sequence[Row], others: Sequence[Row], column: str) -> list[float]:
    return [one[column] / other[column] for one, other in zip(rows, others, strict=True)]


def _service(count: int, repeats: int, seed: int) -> dict[str, list[Row]]:
    """Per kind of server, one row per repeat."""
    measured: dict[str, list[Row]] = {kind: [] for kind in ("echo", *POLICIES)}
    with ExitStack() as stack:
        servers = {kind: stack.enter_context(server_of(kind, count)) for kind in measured}
        order = list(measured)
        random.Random(seed).shuffle(order)
        for repeat in range(repeats):
            for kind in rotated(order, repeat):
                with connected(kind, count, servers[kind], session=repeat) as bursts:
                    bursts.repeat(max(5, 1000 // count))  # connections and caches
                    row = {"what": kind, "clients": count, "repeat": repeat}
                    measured[kind].append(row | bursts.repeat(SIGNALS_PER_MEASUREMENT // count))
    return measured


@dataclass(frozen=True)
class Server:
    """A process that answers workers, or echoes what they say."""

    address: str
    keys: WorkerKeys
    pid: int

    def processor_seconds(self) -> float:
        """Used by all its threads so far."""
        with open(f"/proc/{self.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def server_of(kind: str, count: int) -> Iterator[Server]:
    """One of that ``kind``, ``"echo"`` or a name of :data:`POLICIES`, for so many clients."""
    if kind != "echo":
        with SchedulerProcess.embedded(POLICIES[kind], 1, count) as scheduler:
            assert scheduler.credentials is not None
            yield Server(scheduler.address, scheduler.credentials, scheduler.pid)
        return
    keys, credentials = make_keys()
    process = subprocess.Popen([sys.executable, "-c", ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin as file:
            file.write(f"{keys.public}\n{keys.secret}\n")
        yield Server(process.stdout.readline().strip(), credentials, process.pid)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


class Bursts:
    """``count`` clients in this process that send and are answered together."""

    def __init__(
        self, kind: str, workers: list[Worker], sockets: list[zmq.Socket[bytes]], server: Server, session: int
    ) -> None:
        self._session = session
        self._kind = kind
        self._workers = workers
        self._sockets = sockets
        self._server = server
        self._iteration = 0
        self._poller = zmq.Poller()
        for socket in sockets:
            self._poller.register(socket, zmq.POLLIN)
        self._padding = m.encode(m.Ready(workers[-1], session, 1, 1))

    @property
    def first(self) -> tuple[Worker, zmq.Socket[bytes]]:
        """One of them."""
        return self._workers[0], self._sockets[0]

    def repeat(self, rounds: int) -> Row:
        """That many bursts; percentiles of the time to the answer, and signals per processor second."""
        latencies: list[float] = []
        before, start = self._server.processor_seconds(), time.perf_counter()
        for _ in range(rounds):
            latencies += self._burst()
        wall = time.perf_counter() - start
        used = self._server.processor_seconds() - before
        latencies.sort()
        return {
            "p50_us": 1e6 * latencies[len(latencies) // 2],
            "p99_us": 1e6 * latencies[int(len(latencies) * 0.99)],
            "signals_per_core_s": len(latencies) / max(used, 0.01),
            "signals_per_s": len(latencies) / wall,
        }

    def _burst(self) -> list[float]:
        self._iteration += 1
        sent: dict[Worker, float] = {}
        got: dict[Worker, float] = {}
        answers: dict[Worker, bytes] = {}
        frames = [
            m.encode(m.Ready(worker, self._session, self._iteration + 1, self._iteration))
            if self._kind != "echo"
            else self._padding
            for worker in self._workers
        ]
        worker_of = dict(zip(self._sockets, self._workers, strict=True))
        for worker, socket, frame in zip(self._workers, self._sockets, frames, strict=True):
            sent[worker] = time.perf_counter()
            socket.send(frame)
        while len(got) < len(self._workers):
            ready = self._poller.poll(PATIENCE_MS)
            if not ready:
                raise TimeoutError(f"{len(got)} of {len(self._workers)} answers came from the {self._kind} server")
            for socket, _ in ready:
                assert isinstance(socket, zmq.Socket)
                frame = socket.recv()
                worker = worker_of[socket]
                got[worker], answers[worker] = time.perf_counter(), frame
        if self._kind == "echo":
            return [got[worker] - sent[worker] for worker in self._workers]
        latencies = []
        for worker, frame in answers.items():
            reply = m.decode_reply(frame)
            assert isinstance(reply, m.Answer), reply
            latencies.append(got[worker] - max(sent[member] for member in reply.group.members))
        return latencies


@contextmanager
def connected(kind: str, count: int, server: Server, session: int) -> Iterator[Bursts]:
    """Its clients, which take part."""
    workers = [Worker(0, pipeline) for pipeline in range(count)]
    with zmq.Context() as context, ExitStack() as stack:
        sockets = []
        for worker in workers:
            socket = stack.enter_context(context.socket(zmq.DEALER))
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.ROUTING_ID, m.routing_id(worker, session))
            use_keys(socket, server.keys)
            socket.connect(server.address)
            if kind != "echo":
                _enrol(stack, context, worker, server, session)
                socket.send(m.encode(m.Join(worker, session, 1, None)))
            sockets.append(socket)
        for socket in sockets if kind != "echo" else []:
            _acknowledged(socket, "join")
        yield Bursts(kind, workers, sockets, server, session)
        for worker, socket in zip(workers, sockets, strict=True) if kind != "echo" else []:
            socket.send(m.encode(m.Leave(worker, session, 1 << 40)))
            _acknowledged(socket, "leave")


def _enrol(
    stack: ExitStack, context: zmq.Context[zmq.Socket[bytes]], worker: Worker, server: Server, session: int
) -> None:
    """In a run of fixed pipelines; the worker finishes when the stack is left."""
    socket = stack.enter_context(context.socket(zmq.DEALER))
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.ROUTING_ID, e.peer_of(worker, session))
    use_keys(socket, server.keys)
    socket.connect(server.address)
    socket.send(m.encode(e.Enrol(worker, session, 1, FIXED)))
    if not socket.poll(PATIENCE_MS):
        raise TimeoutError("the server did not let a worker enrol")
    stack.callback(_depart, socket, m.encode(e.Depart(worker, session, 2, True)))


def _depart(socket: zmq.Socket[bytes], frame: bytes) -> None:
    socket.send(frame)
    _acknowledged(socket, "departure")


def _acknowledged(socket: zmq.Socket[bytes], what: str) -> None:
    while socket.poll(PATIENCE_MS):
        if isinstance(m.decode_reply(socket.recv()), e.Noted):
            return
    raise TimeoutError(f"the server did not acknowledge a {what}")


def _policy(repeats: int, seed: int) -> dict[int, list[Row]]:
    """Per number of pipelines, one row per repeat: microseconds per signal of the pure policy."""
    measured: dict[int, list[Row]] = {size: [] for size in POLICY_SIZES}
    for repeat in range(repeats):
        for size in rotated(POLICY_SIZES, repeat):
            cost = _policy_cost(size, random.Random(f"{seed}/{repeat}/{size}"))
            measured[size].append({"what": "policy", "clients": size, "repeat": repeat, "us_per_signal": 1e6 * cost})
    return measured


def _simulation(repeat: int, seed: int) -> Row:
    """Measure a signal with the pipelines around the policy: 64000 signals of 4 × 16 workers are 1000 iterations."""
    work = Work(
        4, 16, SIMULATED_ITERATIONS, jittered(0.1, 0.05, seed + repeat), heterogeneity=Delays(0.1, 0.3, seed=seed)
    )
    start = time.perf_counter()
    run = simulate(SemiDecentralized(), work)
    signals = sum(len(group.members) for _, group in run.groups)
    cost = (time.perf_counter() - start) / signals
    return {"what": "simulation", "clients": 64, "repeat": repeat, "us_per_signal": 1e6 * cost}


def _policy_cost(size: int, rng: random.Random) -> float:
    """Seconds per signal of workers of unequal speed under a virtual clock, about four of which arrive within a
    window."""
    policy = SemiDecentralized(window=4.0 / size, connectivity=10, max_group=size).make_policy(1, size)
    workers = [Worker(0, pipeline) for pipeline in range(size)]
    for worker in workers:
        policy.on(Joined(worker), 0.0)
    rounds = max(4, 40_000 // size)
    arrivals = sorted(
        (k + rng.random(), pipeline, k) for k in range(rounds) for pipeline in range(size)
    )  # a worker's next arrival comes after its last one was answered, or is skipped
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
