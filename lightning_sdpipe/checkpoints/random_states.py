"""Random states of all workers in a checkpoint, so that a resumed run draws the same numbers as an uninterrupted
one."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_sdpipe.p2p import waiting_for
from lightning_sdpipe.random_streams import generator_of
from lightning_sdpipe.topology.groups import ProcessGroups


def gather(groups: ProcessGroups, device: torch.device) -> dict[str, Any]:
    """Gather the states of all ranks, each of which computes on its ``device``, on rank 0; return an empty mapping on
    the others. Every rank must call it. The mesh assigns the states to workers."""
    mine = _collect(device)
    ranks = range(dist.get_world_size())
    flat = torch.cat([state.flatten() for state in mine.values()])
    gathered = [torch.empty_like(flat) for _ in ranks] if groups.rank == 0 else None
    with waiting_for(groups.world, "gathering random states"):
        dist.gather(flat, gathered, dst=0)
    if gathered is None:
        return {}
    sizes = {name: len(state) for name, state in mine.items()}
    return {"mesh": [list(row) for row in groups.mesh.ranks], "sizes": sizes, "states": torch.stack(gathered)}


def restore(saved: Mapping[str, Any], groups: ProcessGroups, device: torch.device) -> None:
    """Restore the state of the worker that this rank is now, which may have been another rank before; with a mesh of
    another shape, or other devices, restore nothing."""
    mine = _collect(device)
    sizes = {name: len(state) for name, state in mine.items()}
    before = [list(row) for row in saved.get("mesh", ())]
    if [len(row) for row in before] != [len(row) for row in groups.mesh.ranks] or saved["sizes"] != sizes:
        return
    places = dict(zip(chain(*groups.mesh.ranks), chain(*before), strict=True))
    parts = torch.split(saved["states"][places[groups.rank]], list(sizes.values()))
    states = dict(zip(sizes, parts, strict=True))
    torch.set_rng_state(states["torch"].clone())
    if device.type != "cpu":
        generator_of(device).set_state(states[device.type].clone())
    version, _, _ = random.getstate()
    random.setstate((version, tuple(_integers(states["python"])), None))
    keys = _integers(states["numpy"])
    np.random.set_state(("MT19937", np.array(keys[:-1], dtype=np.uint32), keys[-1], 0, 0.0))


def _collect(device: torch.device) -> dict[str, torch.Tensor]:
    """Collect each generator's state as bytes. A second normal number that a generator may hold is dropped."""
    legacy: Any = np.random.get_state()
    _, keys, position, _, _ = legacy
    states = {
        "torch": torch.get_rng_state(),
        "python": _bytes(random.getstate()[1]),
        "numpy": _bytes([*keys.tolist(), position]),
    }
    if device.type != "cpu":
        states[device.type] = generator_of(device).get_state()
    return states


def _bytes(integers: Any) -> torch.Tensor:
    return torch.tensor(list(integers), dtype=torch.int64).view(torch.uint8)


def _integers(data: torch.Tensor) -> list[int]:
    return data.clone().view(torch.int64).tolist()
