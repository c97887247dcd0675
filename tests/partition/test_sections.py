from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.ownership import assign_owners
from lightning_sdpipe.partition.sections import MOST, Sections, sections_of


class Model(nn.Module):
    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.root = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(nn.BatchNorm1d(1) for _ in range(blocks))
        self.blocks[-1].weight = self.blocks[0].weight
        self.register_buffer("counter", torch.zeros(1))


def made(cuts: list[list[int]], readers: list[dict[str, list[int]]] | None = None, blocks: int = 6) -> Sections:
    module = Model(blocks)
    chain = [f"blocks.{block}" for block in range(blocks)]
    spans = [[range(sum(cut[:j]), sum(cut[: j + 1])) for j in range(len(cut))] for cut in cuts]
    reading = readers or [{} for _ in cuts]
    return sections_of(
        spans, [assign_owners(module, chain, own, readers=r) for own, r in zip(spans, reading, strict=True)]
    )


def test_the_union_of_all_cuts_divides_the_chain() -> None:
    found = made([[6], [4, 2], [1, 3, 2]])
    assert found.owners == [(0, 0, 0), (0, 0, 1), (0, 1, 2)]
    section = [found.parameters[f"blocks.{block}.bias"] for block in range(6)]
    assert section == [0, 1, 1, 1, 2, 2]
    assert found.parameters["root"] == found.parameters["blocks.5.weight"] == 0  # where the first user is
    assert [name for name, number in found.parameters.items() if number == 2 and "weight" in name] == [
        "blocks.4.weight"
    ]


def test_a_weight_that_an_earlier_stage_reads_belongs_there() -> None:
    name = "blocks.4.weight"
    found = made([[6], [4, 2], [1, 3, 2]], [{}, {name: [0]}, {name: [1]}])
    assert found.owners[found.parameters[name]] == (0, 0, 1)


def test_equal_cuts_have_as_many_sections_as_stages() -> None:
    assert made([[2, 4], [2, 4]]).owners == [(0, 0), (1, 1)]


def test_too_many_sections_are_refused_with_a_cut_to_move() -> None:
    blocks = MOST + 2
    cuts = [[2, *[1] * (blocks - 2)], [1, blocks - 1]]
    with pytest.raises(
        ConfigurationError, match=r"66 sections, and at most 64 .* pipeline 0 before block 2 to block 1,"
    ):
        made(cuts, blocks=blocks)
