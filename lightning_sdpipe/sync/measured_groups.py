"""Groups of pipelines that follow the network: by hosts, or by measurement (profiler → group generator → graph)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.placement.network import read_network
from lightning_sdpipe.policies.phd_psgd import PHDPSGD
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.sync.methods import ByPolicy
from lightning_sdpipe.sync.synchronizer import SyncMethod
from lightning_sdpipe.topology.group_generator import generate_groups, hosts_as_groups, transfer_seconds


def with_measured_groups(method: SyncMethod, num_stages: int, placed: bool) -> SyncMethod:
    """Return ``method`` with PHD-PSGD's groups and times from the network file that ``groups`` names, if it names one.

    Stages count as equal parts of the model; a pipeline is as fast as its slowest device, and two pipelines are as near
    as the slowest link between replicas of a stage.

    Raises:
        ConfigurationError: the file cannot be read, or does not fit the run.
    """
    policy = method.policy
    if not isinstance(method, ByPolicy) or not isinstance(policy, PHDPSGD) or not policy.names_a_network:
        return method
    path = str(policy.groups)
    what, network = f"sync=PHDPSGD(groups={path!r})", read_network(Path(path))
    if placed:
        raise ConfigurationError(
            f"{what} takes consecutive devices as a pipeline; leave placement out, or list groups."
        )
    if network.model is None or len(network) % num_stages:
        raise ConfigurationError(
            f"{what}: the file has {len(network)} devices and {'no' if network.model is None else 'a'} model. Measure "
            f"on the devices of the run, a multiple of num_stages={num_stages}, with `sdpipe measure {path} --model`."
        )
    rows = [range(first, first + num_stages) for first in range(0, len(network), num_stages)]
    hosts = [",".join(network.devices[rank].host for rank in row) for row in rows]
    sizes = sorted({len(group) for group in hosts_as_groups(hosts)})
    size = policy.group_size or sizes[0]
    if len(rows) % size or (policy.group_size is None and len(sizes) > 1):
        raise ConfigurationError(
            f"{what}: the file's {len(rows)} pipelines, {sizes} on a host, form no groups of group_size="
            f"{policy.group_size}. Give a group_size that divides {len(rows)}."
        )
    seconds = sum(block.seconds for block in network.model.chain) / num_stages
    times = policy.times or tuple(seconds / min(network.devices[rank].speed for rank in row) for row in rows)
    if len(times) != len(rows):
        raise ConfigurationError(f"{what}: times has {len(times)} values, and the file {len(rows)} pipelines.")
    amount, rates = sum(block.parameter_bytes for block in network.model.chain) / num_stages, network.bandwidth()
    slowest = [[min(rates[i][j] for i, j in zip(a, b, strict=True)) for b in rows] for a in rows]
    links = [[transfer_seconds(amount, rate) if rate else math.inf for rate in row] for row in slowest]
    found = generate_groups(times, links, size)
    if found.seconds == math.inf:
        raise ConfigurationError(f"{what}: no groups of {size} were found whose devices all reach each other.")
    rank_zero_info(f"{what}: the groups of its {len(rows)} pipelines are {[list(group) for group in found.groups]}.")
    return ByPolicy(msgspec.structs.replace(policy, groups=found.groups, group_size=None, times=times))


def on_hosts(method: SyncMethod, hosts: Sequence[str]) -> SyncMethod:
    """Return ``method`` for pipelines that run on these ``hosts``, by number. PHD-PSGD's groups are the pipelines of
    each host, unless groups are given; pipelines that share a host are near each other.

    Raises:
        ConfigurationError: hosts have different numbers of pipelines, and meetings are sharded.
    """
    policy = method.policy
    if not isinstance(method, ByPolicy):  # its policy learns of hosts when workers join
        return method
    if isinstance(policy, SemiDecentralized) and policy.seating == "near":
        return ByPolicy(msgspec.structs.replace(policy, seating=hosts_as_groups(hosts)))
    if not isinstance(policy, PHDPSGD) or policy.groups != "auto" or policy.group_size is not None:
        return method
    groups = hosts_as_groups(hosts)
    if policy.sharded and policy.within == "gradients" and len({len(group) for group in groups}) > 1:
        raise ConfigurationError(
            f"sync=phd_psgd makes a group of the pipelines of each host, which are {[list(group) for group in groups]} "
            "here, and sharded meetings need groups of one size. Give sharded=False, a group_size, or groups."
        )
    if len(groups) == 1:
        rank_zero_info(
            f"sync=phd_psgd: all {len(hosts)} pipelines run on the same host and form one group, so {policy.within} "
            "are averaged over all of them and no group meets others. For meetings give a group_size, or groups."
        )
    return ByPolicy(msgspec.structs.replace(policy, groups=groups))
