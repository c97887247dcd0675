"""Plans: which stage runs which blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

import msgspec
from torch import nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.balance import Memory, balance
from lightning_sdpipe.partition.chain import Block, described, ends, find_chains, join_ends, refuse_compiled
from lightning_sdpipe.partition.pipeline_cut import (
    Balanced,
    InFlight,
    Partition,
    PipelineCut,
    check_partition,
    is_measured,
)
from lightning_sdpipe.partition.profile import BlockProfile, parameter_bytes
from lightning_sdpipe.partition.rehearsal_result import RehearsalResult
from lightning_sdpipe.partition.same_memory import same_memory
from lightning_sdpipe.partition.sections import sections_of_blocks
from lightning_sdpipe.partition.travel import Travel

Profile = Sequence[BlockProfile]


@dataclass(frozen=True)
class Plan:
    """The chain of a model and its stages: stage ``j`` runs ``blocks[b] for b in spans[j]``.

    ``travel`` has the values that cross the cuts, for each step that was rehearsed, and ``readers`` the stages that
    need a weight of another stage's block. Blocks are the modules of :attr:`chain` there.
    """

    blocks: tuple[Block, ...]
    spans: tuple[range, ...]
    travel: Mapping[str, Travel] = field(default_factory=dict)
    readers: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def chain(self) -> tuple[str, ...]:
        """Paths of all modules of the blocks, in order."""
        return tuple(path for block in self.blocks for path in block)

    @property
    def module_spans(self) -> tuple[range, ...]:
        """Spans as indices into :attr:`chain`."""
        ends = [0, *accumulate(len(block) for block in self.blocks)]
        return tuple(range(ends[span.start], ends[span.stop]) for span in self.spans)


def plan(
    module: nn.Module,
    num_stages: int,
    partition: Partition = "uniform",
    names: Sequence[str] | None = None,
    measure: Callable[[Sequence[Block]], Profile] | None = None,
    rehearse: Callable[[Sequence[str]], RehearsalResult | None] = lambda _: None,
    in_flight: InFlight | None = None,
) -> Plan:
    """Make a single plan as :func:`plans` does, for a cut of these values."""
    (made,) = plans(module, [PipelineCut(num_stages, partition, in_flight)], names, measure, rehearse)
    return made


def plans(
    module: nn.Module,
    cuts: Sequence[PipelineCut],
    names: Sequence[str] | None = None,
    measure: Callable[[Sequence[Block]], Profile] | None = None,
    rehearse: Callable[[Sequence[str]], RehearsalResult | None] = lambda _: None,
) -> list[Plan]:
    """Find the chain of ``module`` and make a plan for each of ``cuts``.

    If blocks are not named, the next of the chains of :func:`~lightning_sdpipe.partition.chain.find_chains` is tried
    when the first cannot be cut so.

    Args:
        module: its parameters may be on ``meta``.
        cuts: the number of stages, M, and where: ``"uniform"``: equally many blocks. ``"parameters"``: the largest
            stage has as few parameters as possible. ``"balanced"`` or :class:`Balanced`: the slowest stage is as fast
            as possible. A list: the number of blocks of each stage.
        names: names of the blocks, as for :func:`~lightning_sdpipe.partition.chain.find_blocks`.
        measure: gives the profile of the blocks; called for ``"balanced"`` only.
        rehearse: runs the user's steps with a chain, to see in which order its modules run and what crosses a cut;
            returns None if that cannot be found out. Called for several stages only.

    Raises:
        ConfigurationError: the chain cannot be cut so.
    """
    num_stages = max(cut.num_stages for cut in cuts)
    for each in cuts:
        check_partition(each)
    refused: ConfigurationError | None = None
    for found in find_chains(module, names):
        try:
            for each in cuts:
                _check_weights(module, found, each)
            if num_stages > 1:
                refuse_compiled(module, found)
            chain, rehearsed = _rehearsed(found, num_stages, rehearse, names) if num_stages > 1 else (found, None)
        except ConfigurationError as error:
            refused = refused or error
            continue
        for blocks in _blocks(module, chain, names, rehearsed is not None):
            try:
                return [_cut(module, blocks, each, measure, rehearsed) for each in cuts]
            except ConfigurationError as error:
                refused = refused or error
    assert refused is not None
    raise refused


def _blocks(
    module: nn.Module, chain: Sequence[str], names: Sequence[str] | None, rehearsed: bool
) -> Iterator[tuple[Block, ...]]:
    if names is None:
        yield join_ends(module, chain)
    if names is not None or rehearsed:  # then the values that cross a cut within a block are known
        yield tuple((path,) for path in chain)


def _rehearsed(
    chain: Sequence[str],
    num_stages: int,
    rehearse: Callable[[Sequence[str]], RehearsalResult | None],
    names: Sequence[str] | None,
) -> tuple[Sequence[str], RehearsalResult | None]:
    """Return the chain in the order in which it runs, without modules that run more than once, and its rehearsal."""
    rehearsed = rehearse(chain)
    if rehearsed is None:
        return chain, None
    repeated = [chain[block] for block in sorted(rehearsed.repeated)]
    ordered = [path for path in (chain[block] for block in rehearsed.order) if path not in repeated]
    if repeated and (names is not None or len(ordered) < num_stages):
        raise ConfigurationError(
            f"{repeated} run more than once in a step, and a block of a chain runs once. Name larger modules that do, "
            "or leave them out, with SDPipeStrategy(blocks=[...])."
        )
    return (chain, rehearsed) if ordered == list(chain) else (ordered, rehearse(ordered))


def _cut(
    module: nn.Module,
    blocks: tuple[Block, ...],
    of: PipelineCut,
    measure: Callable[[Sequence[Block]], Profile] | None,
    rehearsed: RehearsalResult | None,
) -> Plan:
    with of.named():
        return _cut_into(module, blocks, of.num_stages, of.partition, measure, rehearsed, of.in_flight)


def _cut_into(
    module: nn.Module,
    blocks: tuple[Block, ...],
    num_stages: int,
    partition: Partition,
    measure: Callable[[Sequence[Block]], Profile] | None,
    rehearsed: RehearsalResult | None,
    in_flight: InFlight | None,
) -> Plan:
    named = ends(blocks)
    cut(len(blocks), num_stages, "uniform" if isinstance(partition, (str, Balanced)) else partition, named)
    if partition == "parameters":
        sizes = [float(num_parameters(module, block)) for block in blocks]
        spans, _ = balance(sizes, [0.0] * (len(blocks) - 1), [1.0] * num_stages)
    elif is_measured(partition):
        if measure is None:
            raise ConfigurationError('partition="balanced" needs a batch to measure the blocks with.')
        options = partition if isinstance(partition, Balanced) else Balanced()
        measured = with_crossing(measure(blocks), blocks, rehearsed)
        seconds = [block.forward_seconds + block.backward_seconds for block in measured]
        crossing = [transfer_seconds(block, options.bandwidth) for block in measured[:-1]]
        memory = None if options.memory is None else _memory(options, measured, in_flight)
        spans, _ = balance(seconds, crossing, _each(options.speeds) or [1.0] * num_stages, memory)
    else:
        spans = cut(len(blocks), num_stages, partition, named)  # type: ignore[arg-type]  # names are dealt with above
    made = Plan(blocks, spans)
    if rehearsed is None or num_stages == 1:
        return made
    travel = {step: rehearsed.travel(step, made.module_spans) for step in rehearsed.traces}
    readers = {name: sorted(stages) for name, stages in rehearsed.readers(made.module_spans).items()}
    return replace(made, travel=travel, readers=readers)


def with_crossing(profile: Profile, blocks: Sequence[Block], rehearsed: RehearsalResult | None) -> Profile:
    """Return the profile with all bytes that cross a cut after each block in a training step; None where the chain
    cannot be cut."""
    if rehearsed is None or "training_step" not in rehearsed.traces:
        return profile
    crossings = [rehearsed.crossing("training_step", end) for end in accumulate(len(block) for block in blocks)]
    return [
        replace(
            block,
            activation_bytes=None if crossing.refusals or block.activation_bytes is None else crossing.activation_bytes,
            gradient_bytes=crossing.gradient_bytes,
        )
        for block, crossing in zip(profile, crossings, strict=True)
    ]


def check(module: nn.Module, names: Sequence[str] | None, cuts: Sequence[PipelineCut]) -> None:
    """Raise ConfigurationError if ``module`` cannot be cut in these ways, as far as can be seen without a batch."""
    for each in cuts:
        check_partition(each)
    same_memory(module)
    refused: ConfigurationError | None = None
    for chain in find_chains(module, names):
        blocks = join_ends(module, chain) if names is None else tuple((path,) for path in chain)
        known: list[tuple[range, ...]] = []
        try:
            for each in cuts:
                with each.named():
                    given = each.partition
                    spans = cut(
                        len(blocks),
                        each.num_stages,
                        "uniform" if isinstance(given, (str, Balanced)) else given,
                        ends(blocks),
                    )
                if given == "uniform" or not isinstance(given, (str, Balanced)):
                    known.append(spans)
                _check_weights(module, chain, each)
            if len(known) == len(cuts):
                sections_of_blocks(known)
            if max(each.num_stages for each in cuts) > 1:
                refuse_compiled(module, chain)
        except ConfigurationError as error:
            refused = refused or error
        else:
            return
    assert refused is not None
    raise refused


def check_same_chain(module: nn.Module, blocks: Sequence[Block], sizes: Sequence[int]) -> None:
    """Raise ConfigurationError if ``module`` lacks one of the ``blocks`` of rank 0's, with so many parameters."""
    for block, size in zip(blocks, sizes, strict=True):
        try:
            own = f"has {num_parameters(module, block):,}"
        except AttributeError:
            own = "is missing"
        if own != f"has {size:,}":
            raise ConfigurationError(
                f"This process has another model than rank 0, whose chain is {described(blocks)}: {block[0]} has "
                f"{size:,} parameters on rank 0, and {own} here. Start all processes with the same configuration."
            )


def encode(plan: Plan) -> bytes:
    """Return the plan as JSON."""
    return msgspec.json.encode(
        _Encoded(plan.blocks, [(s.start, s.stop) for s in plan.spans], plan.travel, plan.readers)
    )


def decode(data: bytes) -> Plan:
    """Reverse :func:`encode`."""
    plain = msgspec.json.decode(data, type=_Encoded)
    return Plan(plain.blocks, tuple(range(*span) for span in plain.spans), plain.travel, plain.readers)


class _Encoded(msgspec.Struct):
    blocks: tuple[tuple[str, ...], ...]
    spans: Sequence[tuple[int, int]]
    travel: Mapping[str, Travel]
    readers: Mapping[str, Sequence[int]]


def num_parameters(module: nn.Module, block: Block) -> int:
    """Return the number of elements of the parameters of a block; tied ones count once."""
    parameters = {id(p): p.numel() for path in block for p in module.get_submodule(path).parameters()}
    return sum(parameters.values())


def transfer_seconds(block: BlockProfile, bandwidth: float) -> float:
    """Return the time to send a block's output to the next stage and its gradient back; infinite if it cannot
    travel."""
    if block.activation_bytes is None:
        return math.inf
    return (block.activation_bytes + block.gradient_bytes) / bandwidth


def _check_weights(module: nn.Module, chain: Sequence[str], of: PipelineCut) -> None:
    """Refuse a model whose weights alone do not fit, before it is on any device."""
    num_stages, partition = of.num_stages, of.partition
    if not isinstance(partition, Balanced) or partition.memory is None or len(chain) < num_stages:
        return
    weights = [BlockProfile(0, 0, 0, 0, *parameter_bytes(module, (path,))) for path in chain]
    nothing = [0.0] * len(chain)
    with of.named():
        balance(nothing, nothing[1:], [1.0] * num_stages, _memory(partition, weights, of.in_flight))


def _memory(options: Balanced, profile: Profile, in_flight: InFlight | None) -> Memory:
    assert options.memory is not None
    if in_flight is None:
        raise ConfigurationError("Balanced(memory=...) needs to know what the schedule keeps in flight.")
    return Memory(
        _each(options.memory),
        [block.parameter_bytes + (1 + options.optimizer_state) * block.trained_bytes for block in profile],
        [block.saved_bytes for block in profile],
        in_flight.micro_batches,
        [block.trained_bytes for block in profile],
        in_flight.copies,
    )


def _each(values: Any) -> list[float]:
    """Return the values of one pipeline; that there is one list only is checked before."""
    return list(values or ())


def cut(
    num_blocks: int, num_stages: int, partition: Literal["uniform"] | Sequence[int] = "uniform", named: str = ""
) -> tuple[range, ...]:
    """Return the blocks of each stage, as consecutive ranges that cover the chain.

    Args:
        num_blocks: length of the chain.
        num_stages: M.
        partition: ``"uniform"`` gives every stage the same number of blocks, the first ones one more where the division
            leaves a rest; a list gives the number of blocks of each stage.
        named: the names of the blocks, for messages.

    Raises:
        ConfigurationError: more stages than blocks, or a list that does not add up.
    """
    if num_stages > num_blocks:
        blocks = f"{num_blocks} blocks" if num_blocks > 1 else "only block"
        raise ConfigurationError(
            f"num_stages={num_stages} is more than the model's {blocks}{named and f', {named}'}. Use at most "
            f"{num_blocks}, or name smaller modules in the order in which they run, as in "
            'SDPipeStrategy(blocks=["model.embeddings", "model.layers.*", "model.head"]).'
        )
    if isinstance(partition, str):
        if partition != "uniform":
            raise ConfigurationError(f"partition={partition!r} is not known. Use 'uniform' or a list of block counts.")
        each, more = divmod(num_blocks, num_stages)
        sizes = [each + (stage < more) for stage in range(num_stages)]
    else:
        sizes = list(partition)
        if len(sizes) != num_stages or sum(sizes) != num_blocks or min(sizes) < 1:
            raise ConfigurationError(
                f"partition={sizes} does not cut {num_blocks} blocks into {num_stages} stages. Give {num_stages} "
                f"positive numbers that add up to {num_blocks}{named and f'; the blocks are {named}'}."
            )
    stops = [sum(sizes[: stage + 1]) for stage in range(num_stages)]
    return tuple(range(stop - size, stop) for stop, size in zip(stops, sizes, strict=True))
