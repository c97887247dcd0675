"""Reads and writes placements, and finds what each rank runs, even where ranks are numbered differently.

Devices are identified by their host and their index on it: the rank of a device can change from run to run, since
launchers number hosts as they come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lightning_sdpipe.errors import ConfigurationError, os_errors_as, shape
from lightning_sdpipe.topology.mesh import Mesh

FORMAT = "sdpipe-placement/2"

REMEDY = "Run `sdpipe measure` and `sdpipe place` again, or leave placement out."


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="format", tag=FORMAT):
    """A placement: which device runs which stage of which pipeline.

    ``pipelines[i][j]`` is the device of stage j of pipeline i, as ``host:index``. ``reversible``: all stages are alike,
    so a pipeline may also run the other way round. ``blocks[i][j]`` is the number of blocks assumed for that stage,
    None if that was not considered. ``cost`` and ``source`` are for people.
    """

    source: str
    cost: dict[str, float | int | str]
    reversible: bool
    blocks: tuple[tuple[int, ...], ...] | None
    pipelines: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        if not self.pipelines or not all(self.pipelines):
            raise ConfigurationError("A placement needs pipelines, with a device for each of their stages.")
        twice = [device for device, count in Counter(d for row in self.pipelines for d in row).items() if count > 1]
        if twice:
            raise ConfigurationError(f"The device {twice[0]} is placed more than once.")
        if self.blocks is not None and (
            tuple(map(len, self.blocks)) != self.depths
            or min(map(min, self.blocks)) < 1
            or len({*map(sum, self.blocks)}) > 1
        ):
            blocks, depths = [list(row) for row in self.blocks], _listed(self.depths)
            raise ConfigurationError(f"blocks={blocks} are not those of pipelines of {depths} stages.")

    @property
    def depths(self) -> tuple[int, ...]:
        """Number of stages of each pipeline."""
        return tuple(map(len, self.pipelines))

    @property
    def num_stages(self) -> int:
        """Number of stages of the deepest pipeline."""
        return max(self.depths)

    @property
    def num_pipelines(self) -> int:
        return len(self.pipelines)

    @property
    def hosts(self) -> list[str]:
        """Hosts of the stages of each pipeline."""
        return [",".join(device.rpartition(":")[0] for device in row) for row in self.pipelines]

    def __str__(self) -> str:
        hosts = Counter(device.rpartition(":")[0] for row in self.pipelines for device in row)
        devices = ", ".join(f"{count} on {host}" for host, count in sorted(hosts.items()))
        if len(set(self.depths)) > 1:
            return f"pipelines of {_listed(self.depths)} stages ({devices})"
        return f"{shape(self.num_stages, self.num_pipelines)} ({devices})"


def read_placement(path: str | Path) -> Placement:
    """Read a placement from its file.

    Raises:
        ConfigurationError: the file cannot be read, is of another version, or holds no placement.
    """
    try:
        with os_errors_as(f"The placement {path} cannot be read"):
            return msgspec.json.decode(Path(path).read_bytes(), type=Placement)
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{path} is not a placement of format {FORMAT}: {error}. {REMEDY}") from error


def write_placement(path: Path, placement: Placement) -> None:
    """Write a placement, a pipeline per line."""
    path.write_text(one_row_per_line(msgspec.to_builtins(placement)), encoding="utf-8")


def check_shape(placement: Placement, num_stages: int, num_workers: int | None, depths: Sequence[int] = ()) -> None:
    """Check before anything starts that the placement was made for this mesh.

    Args:
        placement: that of the run.
        num_stages: stages of a pipeline.
        num_workers: workers of all pipelines; None where these come and go.
        depths: the number of stages of each pipeline, if it was given for each.

    Raises:
        ConfigurationError: the placement was made for another mesh.
    """
    expected = tuple(depths) or (num_stages,) * placement.num_pipelines
    if placement.depths != expected or num_workers not in (None, sum(placement.depths)):
        workers = "" if num_workers is None else f" and {num_workers} workers"
        given = list(depths) if depths else num_stages
        meant = f"Give num_stages={list(placement.depths)}. " if len({*placement.depths}) > 1 else ""
        raise ConfigurationError(
            f"The placement was made for {placement}; this run has num_stages={given}{workers}. {meant}{REMEDY}"
        )


def placed_blocks(placement: Placement | None, of_each: bool = False) -> Sequence[int] | Sequence[Sequence[int]]:
    """Return the number of blocks of each stage, as the placement has it.

    Args:
        placement: that of the run; None if it has none.
        of_each: list each pipeline's, even if all have the same.

    Raises:
        ConfigurationError: there is no placement, or it has no blocks.
    """
    if placement is None or placement.blocks is None:
        raise ConfigurationError(
            "partition='placed' needs a placement that names the blocks of each stage. Give placement=…, made by "
            "`sdpipe place` from a network that was measured with `--model`, or another partition."
        )
    return placement.blocks if of_each or len({*placement.blocks}) > 1 else placement.blocks[0]


def mesh_of(placement: Placement, devices: Sequence[str], alike: bool = True) -> Mesh:
    """Return the mesh of a run on the placement's devices.

    Args:
        placement: a placement of as many devices.
        devices: ``host:index`` of each rank.
        alike: all pipelines have one cut, so that they may be numbered by their ranks; else they keep their numbers.

    Raises:
        ConfigurationError: the run has other devices, or rank 0 would not run a last stage.
    """
    twice = [device for device, count in Counter(devices).items() if count > 1]
    if twice:
        raise ConfigurationError(
            f"Two ranks are {twice[0]}: two machines have the same host name. Set SDPIPE_HOST to another name on one "
            "of them, also when you measure."
        )
    rank = {device: number for number, device in enumerate(devices)}
    absent = [device for row in placement.pipelines for device in row if device not in rank]
    if absent:
        placed = {device for row in placement.pipelines for device in row}
        others = [device for device in devices if device not in placed]
        raise ConfigurationError(
            f"The placement was made for {placement}; this run has no {', '.join(absent)}, but {', '.join(others)}. "
            f"{REMEDY}"
        )
    rows = tuple(tuple(rank[device] for device in row) for row in placement.pipelines)
    if placement.reversible and any(row[0] == 0 for row in rows):
        rows = tuple(row[::-1] for row in rows)
    if all(row[-1] != 0 for row in rows):
        lasts = {row[-1] for row in rows} | ({row[0] for row in rows} if placement.reversible else set())
        first_of_host = [devices[number] for number in sorted(lasts) if devices[number].endswith(":0")]
        remedy = f"Start the run so that {' or '.join(first_of_host)} is rank 0. " if first_of_host else ""
        stage, depth = next((row.index(0), len(row)) for row in rows if 0 in row)
        raise ConfigurationError(
            f"Rank 0 must run a last stage, since it has the logger, and is {devices[0]} in this run, to which the "
            f"placement gives stage {stage} of {depth}. {remedy}Or place again with `sdpipe place "
            f"--first {devices[0]}`."
        )
    return Mesh(tuple(sorted(rows, key=lambda row: (0 not in row, min(row)))) if alike else rows, alike)


@dataclass(frozen=True)
class Order:
    """The order of a pipeline's stages: ``members[j]`` is the position, among those given, of the member that runs
    stage j; ``reason`` says why the placement could not be followed, if so."""

    members: tuple[int, ...]
    reason: str | None = None


def order_of_stages(placement: Placement, members: Sequence[str]) -> Order:
    """Return the rank of each stage within one pipeline of an elastic run.

    Members keep the stages that the placement gives them. That needs no other pipeline: absent rows of the placement do
    not matter, and members of several rows may form a pipeline, as long as they cover all stages. Otherwise the
    pipeline gets the default order, the last stage first.

    Args:
        placement: one made for the whole run, for pipelines of as many stages.
        members: ``host:index`` of each member, in the order of their ranks.
    """
    default = tuple(range(len(members) - 1, -1, -1))
    stages = {device: stage for row in placement.pipelines for stage, device in enumerate(row)}
    unknown = [device for device in members if device not in stages]
    if unknown:
        return Order(default, f"it does not know {', '.join(unknown)}")
    order = sorted(range(len(members)), key=lambda position: stages[members[position]])
    if [stages[members[position]] for position in order] != list(range(placement.num_stages)):
        return Order(default, f"it gives {', '.join(members)} the stages {[stages[device] for device in members]}")
    if order[-1] != 0:
        return Order(
            default,
            f"it gives rank 0, which must run the last stage, stage {order.index(0)}; start the pipeline so that "
            f"{members[order[-1]]} is its rank 0",
        )
    return Order(tuple(order))


def _listed(depths: Sequence[int]) -> str:
    return ", ".join(map(str, depths))


def one_row_per_line(plain: dict[str, object]) -> str:
    """Format JSON with each row of a table on a line of its own, which people can read and compare."""
    parts = []
    for name, value in plain.items():
        text = msgspec.json.encode(value).decode()
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple, dict)):
            rows = ",\n".join(f"  {msgspec.json.encode(row).decode()}" for row in value)
            text = f"[\n{rows}\n ]"
        parts.append(f' "{name}": {text}')
    return "{\n" + ",\n".join(parts) + "\n}\n"
