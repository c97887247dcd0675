"""The process groups of a run, opened once per process, and the hosts that its processes are on."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_sdpipe import p2p
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.meter import Traffic
from lightning_sdpipe.topology.mesh import Mesh

HOST_VARIABLE = "SDPIPE_HOST"
LONGEST_NAME = 255
Opened = list[weakref.ref[dist.ProcessGroup]]


@dataclass(frozen=True)
class Replicas:
    """Some or all replicas of a stage, as one of them reaches the others: by the rank of each pipeline in a process
    group."""

    group: dist.ProcessGroup
    ranks: Sequence[int] | Mapping[int, int]  # of each pipeline in ``group``
    stage: int
    pipeline: int  # this worker's
    traffic: Traffic = field(default_factory=Traffic, compare=False, repr=False)
    limit: timedelta = timedelta(0)
    """Timeout of a message. Zero leaves that of the process group: for gloo, the one that it was made with. With NCCL a
    timeout would block the host."""
    connections: p2p.Connections | None = field(default=None, compare=False, repr=False)
    """The gloo connections of ``group``, where members may go: ``limit`` is then for messages that do not move."""

    @property
    def pipelines(self) -> Sequence[int]:
        """Pipelines of these replicas, in order."""
        return sorted(self.ranks) if isinstance(self.ranks, Mapping) else range(len(self.ranks))


def backends(device: torch.device, devices: Sequence[torch.device], asked: str | None, default: str) -> str:
    """Return the backends for each type of device, as ``init_process_group`` takes them.

    Args:
        device: that of this process.
        devices: those of all processes of this machine.
        asked: the user's ``process_group_backend``.
        default: the backend that Lightning would take.

    Raises:
        ConfigurationError: NCCL is asked for, and processes share a GPU.
    """
    if device.type == "cpu" or (asked is not None and ":" in asked):
        return default
    if device.type == "cuda" and len({*devices}) < len(devices):  # NCCL wants a GPU for each process
        if asked not in (None, "gloo"):
            raise ConfigurationError(
                f"process_group_backend={asked!r}, but several processes share a GPU ({devices}), which NCCL "
                "refuses. Leave it out for gloo, or give each process a GPU."
            )
        asked = "gloo"
    return f"cpu:gloo,{device.type}:{asked or default}"


def prepare_world(device: torch.device) -> None:
    """Prepare the default group, before others are made beside it.

    A group that is bound to a device makes others by splitting, which gloo cannot, and which NCCL cannot either where a
    group has gloo for some of its ranks: those outside would wait for the others to split.

    Args:
        device: that of this process.

    Raises:
        ConfigurationError: the group cannot move tensors of the CPU, or of ``device``.
    """
    world = dist.group.WORLD
    assert world is not None
    world.bound_device_id = None
    known = {each.type for each in world._device_types}
    if missing := sorted({"cpu", device.type} - known):
        wanted = f"cpu:gloo,{device.type}:{dist.Backend.default_device_backend_map.get(device.type, 'BACKEND')}"
        raise ConfigurationError(
            f"The process group ({dist.get_backend()}) has no backend for tensors on {' and '.join(missing)}, and a "
            f"run on {device} sends both kinds. Leave process_group_backend out, or give {wanted!r}."
        )
    if device.type not in ("cpu", "cuda") and isinstance(world._get_backend(device), dist.ProcessGroupGloo):
        raise ConfigurationError(
            f"The process group ({dist.get_backend()}) uses gloo for {device}, and gloo's collectives know tensors of "
            "the CPU and of CUDA only. Give process_group_backend the name of the accelerator's own backend."
        )


def keep_until_the_end(groups: Iterable[dist.ProcessGroup]) -> None:
    """Let ``groups`` live as long as this process, which is about to end after a failure; a later run closes none.

    The destructor of a gloo group waits for its collectives. One whose connection was lost amid a message ends only at
    its timeout, and so would the process.
    """
    _runs.clear()
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def open_groups() -> list[dist.ProcessGroup]:
    """Return all process groups that this process has opened by ``torch.distributed``."""
    return list(dist.distributed_c10d._world.pg_map)


@dataclass(frozen=True)
class ProcessGroups:
    """This worker's place in the mesh and its groups: ``pipeline`` holds the stages of its pipeline, ``stage`` the
    replicas of its stage in all pipelines of this world (in an elastic run, itself).

    Where pipelines are cut differently, ``stage`` holds all last stages, where steps end; any other stage has no
    replicas, and is alone in it. Replicas then share a section of the chain (:meth:`open_section`).
    """

    mesh: Mesh
    rank: int
    pipeline: dist.ProcessGroup
    stage: dist.ProcessGroup
    _opened: Opened = field(default_factory=list, compare=False, repr=False)
    _side_channels: list[dist.ProcessGroup] = field(default_factory=list)
    _lanes: dict[int, dist.ProcessGroup] = field(default_factory=dict)
    _parts: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic, compare=False, repr=False)

    @classmethod
    def open(cls, mesh: Mesh, timeout: timedelta | None) -> ProcessGroups:
        """Open the groups, and close those of earlier runs; every rank must call it.

        ``timeout`` bounds each transfer: a sub-group does not inherit the world's.
        """
        _close_unused()
        rank, opened = dist.get_rank(), Opened()
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        if mesh.alike:
            columns = [tuple(mesh.stage_ranks(j)) for j in range(mesh.num_stages)]
        else:
            columns = [tuple(mesh.last_ranks), *((other,) for row in mesh.ranks for other in row[:-1])]
        for ranks in (*mesh.ranks, *columns):
            if ranks not in groups:
                groups[ranks] = _new_group(opened, sorted(ranks), timeout)
        row, column = (next(ranks for ranks in those if rank in ranks) for those in (mesh.ranks, columns))
        mine = cls(mesh, rank, groups[row], groups[column], opened)
        _runs.append((weakref.ref(mine), opened))
        return mine

    def new_group(
        self, ranks: Sequence[int] | None, timeout: timedelta | None, backend: str | None = None
    ) -> dist.ProcessGroup:
        """Open a further group of global ``ranks``, all if it is None; it is closed with the others. Every rank must
        call it."""
        return _new_group(self._opened, ranks, timeout, backend)

    def _open_mine(
        self, of_each: Iterable[Sequence[int]], timeout: timedelta | None, backend: str | None = None
    ) -> list[dist.ProcessGroup]:
        """Open a group of each of these global ranks; return those that this rank is in. Every rank must call it."""
        opened = [(ranks, self.new_group(sorted(ranks), timeout, backend)) for ranks in of_each]
        return [group for ranks, group in opened if self.rank in ranks]

    def replicas(self, group: dist.ProcessGroup | None = None) -> Replicas:
        """Return the replicas of this worker's stage, over ``group``, which holds them all; None is the stage's."""
        stage, _ = self.mesh.locate(self.rank)
        return self._reached(group or self.stage, self.mesh.stage_ranks(stage))

    def _reached(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> Replicas:
        """Return the replicas of these global ``ranks``, by pipeline, over the ``group`` that they make up."""
        stage, pipeline = self.mesh.locate(self.rank)
        in_order = sorted(ranks)
        return Replicas(group, [in_order.index(rank) for rank in ranks], stage, pipeline, self.traffic)

    def open_section(
        self, owners: Sequence[int], timeout: timedelta | None, backend: str | None = None
    ) -> Replicas | None:
        """Open the group of the workers that average a section of the chain: ``owners[i]`` is the stage of pipeline i
        that does. Return None if this worker is none of them. Every rank must call it."""
        stage, pipeline = self.mesh.locate(self.rank)
        ranks = [self.mesh.rank(owner, i) for i, owner in enumerate(owners)]
        group = self.new_group(sorted(ranks), timeout, backend)
        return self._reached(group, ranks) if owners[pipeline] == stage else None

    @property
    def meeting(self) -> dist.ProcessGroup:
        """Workers that pass sync points together: the replicas of the stage, or all workers where pipelines are cut
        differently."""
        return self.stage if self.mesh.alike else self.world

    def part(self, parts: Sequence[Sequence[int]], timeout: timedelta | None) -> Replicas | None:
        """Return the replicas of this worker's stage in the part of ``parts`` that holds its pipeline; None if it is
        the only one.

        Every rank must call it with the same ``parts``, which do not overlap; their groups are opened once.
        """
        stage, pipeline = self.mesh.locate(self.rank)
        key = tuple(tuple(sorted(part)) for part in parts)
        if key not in self._parts:
            some = [part for part in key if 1 < len(part) < self.mesh.num_pipelines]
            of_each = [[self.mesh.rank(j, i) for i in part] for j in range(self.mesh.num_stages) for part in some]
            self._parts[key] = next(iter(self._open_mine(of_each, timeout)), None)
        own = next(part for part in key if pipeline in part)
        if len(own) == 1:
            return None
        in_order = sorted(self.mesh.rank(stage, i) for i in own)
        ranks_of = {i: in_order.index(self.mesh.rank(stage, i)) for i in own}
        return Replicas(self._parts[key] or self.stage, ranks_of, stage, pipeline, self.traffic)

    def lanes(
        self, stages_per_worker: int, device: torch.device, timeout: timedelta | None
    ) -> dict[int, dist.ProcessGroup]:
        """Return a group for each direction of each cut that this worker has a side of, by the tag of its messages;
        none if the backend supports tags. NCCL does not, and sends two ranks' messages in the order in which they were
        begun: activations and gradients, or those of several cuts, would wait for each other.

        Every rank must call it; the groups are opened once.
        """
        if p2p.backend_for(device, self.pipeline) == "gloo" or self._lanes:
            return self._lanes
        for ranks in self.mesh.ranks:
            for stage in range(1, len(ranks) * stages_per_worker):
                ends = sorted({ranks[number % len(ranks)] for number in (stage - 1, stage)})
                for tag in (2 * stage - 1, 2 * stage) if len(ends) == 2 else ():
                    for group in self._open_mine([ends], timeout):
                        self._lanes[tag] = group
        return self._lanes

    def side_channel(self, timeout: timedelta | None) -> dist.ProcessGroup:
        """Return a second group of the replicas of this worker's stage, on gloo, for threads beside the training.

        Every rank must call it; it is opened once.
        """
        if not self._side_channels:
            stages = range(self.mesh.num_stages)
            self._side_channels.extend(self._open_mine(map(self.mesh.stage_ranks, stages), timeout, "gloo"))
        return self._side_channels[0]

    @property
    def world(self) -> dist.ProcessGroup:
        """All workers of the run; in an elastic run, those of the pipeline."""
        world = dist.group.WORLD
        assert world is not None, "open() has been called, so the world exists"
        return world


_runs: list[tuple[weakref.ref[ProcessGroups], Opened]] = []


def _new_group(
    opened: Opened, ranks: Sequence[int] | None, timeout: timedelta | None, backend: str | None = None
) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout, backend=backend)
    if isinstance(group, dist.ProcessGroup):  # this rank is in it
        opened.append(weakref.ref(group))
    return group


def _close_unused() -> None:
    """Close the groups of earlier runs that no rank can use any more: a script may train many models, and each group
    takes threads and connections. All ranks call it at the same point, so that each has left those runs."""
    if _runs:
        gc.collect()  # a Trainer and its strategy refer to each other
    known = open_groups()
    _runs[:] = [(run, opened) for run, opened in _runs if any(each() in known for each in opened)]
    unused = torch.tensor(sum(1 << n for n, (run, _) in enumerate(_runs[:62]) if run() is None))  # a bit per run
    dist.all_reduce(unused, dist.ReduceOp.BAND)
    for n, (_, opened) in enumerate(_runs):
        for group in (each() for each in opened if int(unused) >> n & 1):
            if group in known:
                dist.destroy_process_group(group)


def this_host() -> str:
    """Return the name of this machine, or the value of ``SDPIPE_HOST``.

    Raises:
        ConfigurationError: the name is too long to be sent.
    """
    name = os.environ.get(HOST_VARIABLE) or socket.gethostname()
    if len(name.encode()) > LONGEST_NAME:
        raise ConfigurationError(f"The host name {name!r} is too long; set {HOST_VARIABLE} to one of up to 255 bytes.")
    return name


def device_name(local_rank: int) -> str:
    """Return ``host:index`` of this process's device."""
    return f"{this_host()}:{local_rank}"


def compare_meshes(mesh: Mesh) -> None:
    """Compare the meshes of all ranks, which must call it: with different ones they would open different groups, and
    wait for each other.

    Raises:
        ConfigurationError: some differ; raised on all ranks.
    """
    depths = str(mesh.num_stages) if mesh.alike else f"[{', '.join(map(str, mesh.depths))}]"
    said = _gathered(depths[:LONGEST_NAME], LONGEST_NAME, torch.device("cpu"), None)
    if len(by_depths := {each: [rank for rank, own in enumerate(said) if own == each] for each in said}) > 1:
        found = "; ".join(f"num_stages={each} on ranks {ranks}" for each, ranks in by_depths.items())
        raise ConfigurationError(f"Processes of one run were given different arguments: {found}. Give all the same.")


def roll_call(local_rank: int, device: torch.device) -> list[str]:
    """Return ``host:index`` of every rank; all ranks must call it.

    Args:
        local_rank: that of this process, among those of its host.
        device: a device whose tensors the default group can send.
    """
    return _gathered(device_name(local_rank), LONGEST_NAME + 1 + 10, device, None)


def hosts_of_replicas(groups: ProcessGroups, device: torch.device) -> list[str]:
    """Return the machine of each pipeline's replica of this worker's stage. All of these replicas must call it.

    Args:
        groups: this worker's process groups.
        device: a device whose tensors the stage's group can send.

    Raises:
        ConfigurationError: machines cannot be told from each other.
    """
    by_rank = _gathered(this_host(), LONGEST_NAME, device, groups.stage)
    names = [by_rank[rank] for rank in groups.replicas().ranks]
    require_names(enumerate(names))
    return names


def require_names(hosts: Iterable[tuple[int, str]]) -> None:
    """Raise ConfigurationError unless the machines of pipelines, given with their names, can be told from each
    other."""
    if unnamed := {pipeline: name for pipeline, name in hosts if name.partition(".")[0] in ("", "localhost")}:
        raise ConfigurationError(
            f"hierarchy='hosts' needs to tell machines apart, but those of pipelines {[*unnamed]} are named "
            f"{next(iter(unnamed.values()))!r}. Give each machine a name, or set the environment variable "
            f"{HOST_VARIABLE} to one; or use hierarchy='flat'."
        )


def _gathered(name: str, longest: int, device: torch.device, group: dist.ProcessGroup | None) -> list[str]:
    """Gather a string from every member of a group, from all ranks if it is None."""
    mine = torch.zeros(longest, dtype=torch.uint8)
    written = name.encode()
    mine[: len(written)] = torch.frombuffer(bytearray(written), dtype=torch.uint8)
    gathered = [torch.empty_like(mine, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine.to(device), group=group)
    return [bytes(sent.tolist()).rstrip(b"\0").decode() for sent in gathered]
