"""The command ``sdpipe partition IMPORT.PATH:factory``: shows a model's chain and where it is cut."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import nn

from lightning_sdpipe.partition import factory
from lightning_sdpipe.partition.chain import Block, described
from lightning_sdpipe.partition.costs import Costs
from lightning_sdpipe.partition.ownership import Ownership, assign_owners, parameters_held, saves_nothing
from lightning_sdpipe.partition.plan import Plan, Profile, num_parameters, plans, with_crossing
from lightning_sdpipe.partition.profile import profile
from lightning_sdpipe.partition.rehearsal_result import RehearsalResult
from lightning_sdpipe.partition.sections import sections_of

_HEADINGS = ("stage", "blocks", "parameters", "forward ms", "backward ms", "KiB over the cut")


def table(module: nn.Module, plan: Plan, profile: Profile | None = None, each_block: bool = False) -> str:
    """Return the stages of ``plan`` as a table: the blocks and the number of parameters of each stage and, with a
    ``profile``, the measured milliseconds of one micro-batch and the KiB of activations that cross the cut after the
    stage (as much comes back as gradients). ``each_block`` gives every block its own row and its own parameters (tied
    ones count in every block that has them)."""
    ownership = assign_owners(module, plan.chain, plan.module_spans, readers=plan.readers)
    parts = [
        (stage, part)
        for stage, span in enumerate(plan.spans)
        for part in ([range(b, b + 1) for b in span] if each_block else [span])
    ]
    rows = [
        _HEADINGS,
        *(_row(module, plan, stage, part, profile, None if each_block else ownership) for stage, part in parts),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = [_line(row, widths) for row in rows]
    notes = [note for note in (plan.note, saves_nothing(module, ownership)) if note]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:], *notes])


def _row(
    module: nn.Module, plan: Plan, stage: int, span: range, profile: Profile | None, ownership: Ownership | None
) -> Sequence[str]:
    blocks = plan.blocks[span.start : span.stop]
    together: Block = tuple(path for block in blocks for path in block)
    parameters = num_parameters(module, together) if ownership is None else parameters_held(module, ownership, stage)
    cells = [str(stage), described(blocks), f"{parameters:,}"]
    if profile is None:
        return [*cells, "–", "–", "–"]
    measured = profile[span.start : span.stop]
    cells.append(f"{1e3 * sum(block.forward_seconds for block in measured):.2f}")
    cells.append(f"{1e3 * sum(block.backward_seconds for block in measured):.2f}")
    last = measured[-1].activation_bytes
    if span.stop == len(plan.blocks):
        return [*cells, "–"]
    return [*cells, "cannot travel" if last is None else f"{last / 1024:,.1f}"]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = zip(row, widths, strict=True)
    return "  ".join(cell.ljust(w) if i == 1 else cell.rjust(w) for i, (cell, w) in enumerate(cells)).rstrip()


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = factory.parser("partition", "Shows the blocks of a model, and where it would be cut into stages.")
    parser.add_argument("--each-block", action="store_true", help="print a row for each block")
    print(_report(parser.parse_args(arguments)))


def _report(options: argparse.Namespace) -> str:
    module, batch = factory.build(options.factory)
    measured: dict[tuple[Block, ...], Profile] = {}
    rehearsals: list[RehearsalResult] = []

    def measure(blocks: Sequence[Block]) -> Profile:
        if tuple(blocks) in measured:
            return measured[tuple(blocks)]
        step = factory.step_of(options.factory, module, batch)
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        measured[tuple(blocks)] = profile(module, blocks, lambda: step(batch, 0), device)
        return measured[tuple(blocks)]

    def rehearse(chain: Sequence[str]) -> RehearsalResult | None:
        if batch is None:
            return None
        rehearsals.append(factory.rehearse(module, chain, [batch]))
        return rehearsals[-1]

    def count() -> Costs | None:
        return None if batch is None else factory.count(module, batch)

    chosen = plans(module, factory.cuts(options), options.blocks, measure, rehearse, count)
    times = None
    if batch is not None:
        blocks = chosen[0].blocks
        times = with_crossing(measure(blocks), blocks, rehearsals[-1] if rehearsals else None)
    if len(chosen) == 1:
        return table(module, chosen[0], times, options.each_block)
    tables = [f"{of}\n{table(module, plan, times, options.each_block)}\n" for of, plan in factory.by_cut(chosen)]
    owned = [assign_owners(module, plan.chain, plan.module_spans, readers=plan.readers) for plan in chosen]
    sections = sections_of([plan.spans for plan in chosen], owned)
    return "\n".join([*tables, f"Replicas: {len(sections.owners)} sections, each with a worker in every pipeline."])
