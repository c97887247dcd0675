"""Plans: which stage runs which blocks."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal, TypeVar

from torch import nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.balance import MUCH, Memory, balance, even
from lightning_sdpipe.partition.chain import (
    Block,
    described,
    ends,
    find_chains,
    join_ends,
    open_heavy,
    refuse_compiled,
)
from lightning_sdpipe.partition.costs import Costs
from lightning_sdpipe.partition.message import Travel
from lightning_sdpipe.partition.pipeline_cut import (
    Balanced,
    InFlight,
    Partition,
    PipelineCut,
    check_partition,
    is_measured,
)
from lightning_sdpipe.partition.profile import BlockProfile, parameter_bytes
from lightning_sdpipe.partition.provenance import StepTrace
from lightning_sdpipe.partition.rehearsal_result import RehearsalResult
from lightning_sdpipe.partition.same_memory import same_memory
from lightning_sdpipe.partition.sections import sections_of_blocks

Profile = Sequence[BlockProfile]
_Candidate = TypeVar("_Candidate", bound=Sequence[object])
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Plan:
    """The chain of a model and its stages: stage ``j`` runs ``blocks[b] for b in spans[j]``.

    ``travel`` has the values that cross the cuts, for each rehearsed step, and ``readers`` the stages that need a
    weight of another stage's block. Both number the modules of :attr:`chain` rather than the blocks.
    """

    blocks: tuple[Block, ...]
    spans: tuple[range, ...]
    travel: Mapping[str, Travel] = field(default_factory=dict)
    readers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    lock_step: Mapping[str, int] = field(default_factory=dict)
    """Evaluation steps that no pipeline can run, each with the least number of block calls that a batch makes."""
    note: str = ""
    """Why the stages of ``"auto"`` are far from even; empty if they are not."""

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
    partition: Partition = "auto",
    names: Sequence[str] | None = None,
    measure: Callable[[Sequence[Block]], Profile] | None = None,
    rehearse: Callable[[Sequence[str]], RehearsalResult | None] = lambda _: None,
    in_flight: InFlight | None = None,
    attempt: Callable[[Callable[[], list[Plan]]], list[Plan]] = operator.call,
) -> Plan:
    """Make a single plan, as :func:`plans` does, for a cut with these options."""
    of = PipelineCut(num_stages, partition, in_flight)
    (made,) = plans(module, [of], names, measure, rehearse, attempt=attempt)
    return made


def plans(
    module: nn.Module,
    cuts: Sequence[PipelineCut],
    names: Sequence[str] | None = None,
    measure: Callable[[Sequence[Block]], Profile] | None = None,
    rehearse: Callable[[Sequence[str]], RehearsalResult | None] = lambda _: None,
    count: Callable[[], Costs | None] = lambda: None,
    memory: float = math.inf,
    attempt: Callable[[Callable[[], list[Plan]]], list[Plan]] = operator.call,
) -> list[Plan]:
    """Find the chain of ``module`` and make a plan for each of ``cuts``.

    If blocks are not named, the chains of :func:`~lightning_sdpipe.partition.chain.find_chains` are tried in order
    until one can be cut. ``"auto"`` also tries chains in which heavy modules are opened, beginning with the chain that
    makes the slowest stage fastest.

    Args:
        module: the module; its parameters may be on ``meta``.
        cuts: the number of stages, M, and the partition. ``"auto"``: the slowest stage is as fast as possible, by the
            blocks' counted costs, or by bytes of parameters if there are no costs. ``"uniform"``: equally many blocks.
            ``"parameters"``: the largest stage has as few parameters as possible. ``"balanced"`` or :class:`Balanced`:
            the slowest stage is as fast as possible, by measured times. A list: the number of blocks of each stage.
        names: names of the blocks, as for :func:`~lightning_sdpipe.partition.chain.find_chains`.
        measure: returns the profile of the blocks; called for ``"balanced"`` only.
        rehearse: runs the user's steps with a chain, to find the order of its modules and what crosses a cut; returns
            None if it cannot. Called for several stages only.
        count: counts the costs of a step; returns None if it cannot run. Called for ``"auto"`` with several stages
            only.
        memory: bytes of a device. ``"auto"`` avoids, if it can, stages whose weights, gradients and optimizer states
            need more.
        attempt: calls a function, which tries one chain, and returns its result. If it does so in a child process, what
            the steps change is undone for the next chain. The last chain is tried without it.

    Raises:
        ConfigurationError: no chain can be cut this way.
    """
    for each in cuts:
        check_partition(each)
    if _needs_no_blocks(module, names, cuts):
        return [Plan((), (range(0),))] * len(cuts)
    costs = count() if _automatic(cuts) else None
    planner = _Planner(module, cuts, names, measure, rehearse, memory, costs)
    *others, last = planner.chains()

    def made(chain: Sequence[str]) -> list[Plan]:
        work = partial(planner.plans_of, chain)
        return work() if chain is last else attempt(work)  # no other chain follows the last

    return _first([*others, last], made)


def _automatic(cuts: Sequence[PipelineCut]) -> list[int]:
    """Return the number of stages of each cut that costs decide."""
    return [each.num_stages for each in cuts if each.partition == "auto" and each.num_stages > 1]


def _first(candidates: Iterable[_Candidate], made: Callable[[_Candidate], _Made]) -> _Made:
    """Return ``made(candidate)`` for the first candidate that does not raise ConfigurationError.

    Raises:
        ConfigurationError: all candidates raised it; this is the first one's.
    """
    refused: ConfigurationError | None = None
    for candidate in candidates:
        try:
            return made(candidate)
        except ConfigurationError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _needs_no_blocks(module: nn.Module, names: Sequence[str] | None, cuts: Sequence[PipelineCut]) -> bool:
    """Return whether there is nothing to cut and ``module`` has no blocks; blocks would draw from their own streams."""
    if names is not None or any(each.num_stages > 1 for each in cuts):
        return False
    try:
        next(find_chains(module))
    except ConfigurationError:
        return True
    return False


_CLOSE = 1.05
"""Ratings count as equal if their ratio is smaller."""
_STATES = 3.0
"""Ratio of the bytes of gradient and Adam states to those of the trained parameter."""


@dataclass(frozen=True)
class _Planner:
    """The search for plans; see :func:`plans` for its fields. ``costs`` is None if they are not known."""

    module: nn.Module
    cuts: Sequence[PipelineCut]
    names: Sequence[str] | None
    measure: Callable[[Sequence[Block]], Profile] | None
    rehearse: Callable[[Sequence[str]], RehearsalResult | None]
    memory: float
    costs: Costs | None

    def chains(self) -> Iterable[Sequence[str]]:
        """Return the chains to try. If costs are known, chains are in the order in which they run, without modules that
        run more than once; chains with heavy blocks opened are added; and those whose slowest stage is fastest come
        first."""
        found = find_chains(self.module, self.names)
        if self.costs is None:
            return found
        chains, costs, most = list(found), self.costs, max(_automatic(self.cuts))
        if self.names is None:
            limits = [costs.total / (parts * most) for parts in (0.5, 1, 2)]  # nothing is heavier than the first
            heavier = [partial(lambda limit, block: costs.within(block) > limit, limit) for limit in limits]
            chains = [open_heavy(self.module, chain, is_heavy, costs.calls) for is_heavy in heavier for chain in chains]
        ordered: dict[tuple[str, ...], None] = {}
        for chain in chains:
            order = costs.order([self.module.get_submodule(path) for path in chain])
            seen = RehearsalResult(chain, {"": [StepTrace(order=order)]}, {})
            once = tuple(chain[block] for block in seen.order if block not in seen.repeated)
            ordered[once if self.names is None and len(once) >= most else tuple(chain)] = None
        return _close_ones_first(list(ordered), lambda chain: min(map(self._rated, self._blocks(chain, True))))

    def plans_of(self, found: Sequence[str]) -> list[Plan]:
        """Return the plans for the chain ``found``.

        Raises:
            ConfigurationError: the chain cannot be cut this way.
        """
        num_stages = max(cut.num_stages for cut in self.cuts)
        for each in self.cuts:
            _check_weights(self.module, found, each)
        if num_stages > 1:
            refuse_compiled(self.module, found)
        chain, rehearsed = self._rehearsed(found, num_stages) if num_stages > 1 else (found, None)
        ways = self._blocks(chain, rehearsed is not None)
        if _automatic(self.cuts):
            ways = _close_ones_first(ways, self._rated)
        return _first(ways, lambda blocks: [self._cut(blocks, each, rehearsed) for each in self.cuts])

    def _rated(self, blocks: Sequence[Block]) -> float:
        """Return the sum of the ratings over the automatic cuts."""
        return sum(self._even(blocks, num_stages)[1] for num_stages in _automatic(self.cuts))

    def _even(
        self, blocks: Sequence[Block], num_stages: int, rehearsed: RehearsalResult | None = None
    ) -> tuple[tuple[range, ...], float, Sequence[float]]:
        """Return the spans of a cut by costs, its rating by :func:`~lightning_sdpipe.partition.balance.even`, and the
        time of each block."""
        sizes = [parameter_bytes(self.module, block) for block in blocks]
        held = [size + _STATES * trained for size, trained in sizes]
        seconds = [float(size) for size in held] if self.costs is None else self.costs.of_blocks(self.module, blocks)
        if len(blocks) < num_stages:
            return (), math.inf, seconds
        possible = [True] * (len(blocks) - 1)
        if rehearsed is not None:
            ends = list(accumulate(len(block) for block in blocks))[:-1]
            possible = [not any(rehearsed.crossing(step, end).refusals for step in rehearsed.traces) for end in ends]
        return *even(seconds, held, num_stages, possible, self.memory), seconds

    def _blocks(self, chain: Sequence[str], rehearsed: bool) -> Sequence[tuple[Block, ...]]:
        """Return the ways in which modules of a chain may be joined into blocks."""
        single = tuple((path,) for path in chain)
        if self.names is not None:
            return [single]
        joined = join_ends(self.module, chain)
        # after a rehearsal, the values that cross a cut between joined modules are known
        return list(dict.fromkeys((joined, single))) if rehearsed else [joined]

    def _rehearsed(self, chain: Sequence[str], num_stages: int) -> tuple[Sequence[str], RehearsalResult | None]:
        """Return the chain in the order in which it runs, without modules that run more than once, and its
        rehearsal."""
        rehearsed = self.rehearse(chain)
        if rehearsed is None:
            return chain, None
        repeated = [chain[block] for block in sorted(rehearsed.repeated)]
        ordered = [path for path in (chain[block] for block in rehearsed.order) if path not in repeated]
        if repeated and (self.names is not None or len(ordered) < num_stages):
            raise ConfigurationError(
                f"{repeated} run more than once in a step, and a block of a chain runs once. Name larger modules that "
                "do, or leave them out, with SDPipeStrategy(blocks=[...])."
            )
        return (chain, rehearsed) if ordered == list(chain) else (ordered, self.rehearse(ordered))

    def _cut(self, blocks: tuple[Block, ...], of: PipelineCut, rehearsed: RehearsalResult | None) -> Plan:
        with of.named():
            if of.partition != "auto" or of.num_stages == 1:
                return self._cut_into(blocks, of, "uniform" if of.partition == "auto" else of.partition, rehearsed)
            # only if the first cut is refused does _even find out which cuts are possible
            for known in [None] if rehearsed is None else [None, rehearsed]:
                spans, rating, seconds = self._even(blocks, of.num_stages, known)
                try:
                    sizes: Partition = "uniform" if math.isinf(rating) else [len(span) for span in spans]
                    made = self._cut_into(blocks, of, sizes, rehearsed)
                except ConfigurationError as error:
                    refused = error
                else:
                    return replace(made, note=_uneven(made, seconds, "" if known is None else str(refused)))
            raise refused

    def _cut_into(
        self, blocks: tuple[Block, ...], of: PipelineCut, partition: Partition, rehearsed: RehearsalResult | None
    ) -> Plan:
        num_stages, named = of.num_stages, ends(blocks)
        cut(len(blocks), num_stages, "uniform" if isinstance(partition, (str, Balanced)) else partition, named)
        if partition == "parameters":
            sizes = [float(num_parameters(self.module, block)) for block in blocks]
            spans, _ = balance(sizes, [0.0] * (len(blocks) - 1), [1.0] * num_stages)
        elif is_measured(partition):
            if self.measure is None:
                raise ConfigurationError('partition="balanced" needs a batch to measure the blocks with.')
            options = partition if isinstance(partition, Balanced) else Balanced()
            measured = with_crossing(self.measure(blocks), blocks, rehearsed)
            seconds = [block.forward_seconds + block.backward_seconds for block in measured]
            crossing = [transfer_seconds(block, options.bandwidth) for block in measured[:-1]]
            memory = None if options.memory is None else _memory(options, measured, of.in_flight)
            spans, _ = balance(seconds, crossing, _each(options.speeds) or [1.0] * num_stages, memory)
        else:
            spans = cut(len(blocks), num_stages, partition, named)  # type: ignore[arg-type]  # names are dealt with above
        made = Plan(blocks, spans)
        if rehearsed is None or num_stages == 1:
            return made
        travel = {step: rehearsed.travel(step, made.module_spans) for step in rehearsed.traces}
        readers = {name: sorted(stages) for name, stages in rehearsed.readers(made.module_spans).items()}
        return replace(made, travel=travel, readers=readers, lock_step=rehearsed.lock_step)


def _close_ones_first(candidates: Sequence[_Candidate], rating: Callable[[_Candidate], float]) -> list[_Candidate]:
    """Return the candidates that are rated about as well as the best, in their order, then the others by rating. If
    all have too few blocks, the longest comes first, since its refusal says how many stages are possible."""
    known = [(rating(candidate), candidate) for candidate in candidates]
    limit = _CLOSE * min(each for each, _ in known)
    if math.isinf(limit):
        return sorted(candidates, key=len, reverse=True)
    return [candidate for _, candidate in sorted(known, key=lambda each: each[0] if each[0] > limit else 0.0)]


def _uneven(made: Plan, seconds: Sequence[float], refused: str) -> str:
    """Return why the slowest stage has much more than its share of the costs; empty if it has not."""
    of_stages = [sum(seconds[span.start : span.stop]) for span in made.spans]
    slowest = max(range(len(of_stages)), key=of_stages.__getitem__)
    if of_stages[slowest] <= MUCH * sum(seconds) / len(of_stages):
        return ""
    span = made.spans[slowest]
    heaviest = max(span, key=seconds.__getitem__)
    why = f"; other cuts were refused ({refused})" if refused else ""
    return (
        f'partition="auto" leaves {of_stages[slowest] / sum(seconds):.0%} of the counted work on stage {slowest} of '
        f"{len(of_stages)}. Block {' + '.join(made.blocks[heaviest])!r}, with what is computed before it outside of "
        f"blocks, has {seconds[heaviest] / sum(seconds):.0%}, and is not divided: a module that runs more than once in "
        f"a step is no block{why}. Name other blocks with SDPipeStrategy(blocks=[...]), or use fewer stages."
    )


def with_crossing(profile: Profile, blocks: Sequence[Block], rehearsed: RehearsalResult | None) -> Profile:
    """Return the profile with all bytes that cross a cut after each block in a training step; ``activation_bytes`` is
    None where the chain cannot be cut."""
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
    """Raise ConfigurationError if it is clear without a batch that ``module`` cannot be cut in these ways."""
    for each in cuts:
        check_partition(each)
    same_memory(module)
    if not _needs_no_blocks(module, names, cuts):
        _first(find_chains(module, names), partial(_check_chain, module, names, cuts))


def _check_chain(
    module: nn.Module, names: Sequence[str] | None, cuts: Sequence[PipelineCut], chain: Sequence[str]
) -> None:
    blocks = join_ends(module, chain) if names is None else tuple((path,) for path in chain)
    leaves = sum(next(part.children(), None) is None for part in module.modules())
    known: list[tuple[range, ...]] = []
    for each in cuts:
        with each.named():
            given = each.partition
            opened = leaves if given == "auto" and names is None else 0  # "auto" opens heavy modules
            sizes: Any = "uniform" if isinstance(given, (str, Balanced)) else given
            spans = cut(max(len(blocks), opened), each.num_stages, sizes, ends(blocks))
        if given == "uniform" or not isinstance(given, (str, Balanced)):
            known.append(spans)
        _check_weights(module, chain, each)
    if len(known) == len(cuts):
        sections_of_blocks(known)
    if max(each.num_stages for each in cuts) > 1:
        refuse_compiled(module, chain)


def check_same_chain(module: nn.Module, blocks: Sequence[Block], sizes: Sequence[int]) -> None:
    """Raise ConfigurationError unless ``module`` has each of rank 0's ``blocks`` with its number of parameters."""
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


def num_parameters(module: nn.Module, block: Block) -> int:
    """Return the number of elements of a block's parameters; tied ones count once."""
    parameters = {id(p): p.numel() for path in block for p in module.get_submodule(path).parameters()}
    return sum(parameters.values())


def transfer_seconds(block: BlockProfile, bandwidth: float) -> float:
    """Return the seconds to send a block's output to the next stage and its gradient back; infinite if the output
    cannot travel."""
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
    assert in_flight is not None, "known wherever there is a schedule"
    return Memory(
        _each(options.memory),
        [block.parameter_bytes + (1 + options.optimizer_state) * block.trained_bytes for block in profile],
        [block.saved_bytes for block in profile],
        in_flight.micro_batches,
        [block.trained_bytes for block in profile],
        in_flight.copies,
    )


def _each(values: Any) -> list[float]:
    """Return the values of one pipeline; lists for several have been refused before."""
    return list(values or ())


def cut(
    num_blocks: int, num_stages: int, partition: Literal["uniform"] | Sequence[int] = "uniform", named: str = ""
) -> tuple[range, ...]:
    """Return the blocks of each stage, as consecutive ranges that cover the chain.

    Args:
        num_blocks: length of the chain.
        num_stages: M.
        partition: ``"uniform"`` gives every stage the same number of blocks, and the first ones one more if the
            division leaves a remainder; a list has the number of blocks of each stage.
        named: the names of the blocks, for messages.

    Raises:
        ConfigurationError: there are more stages than blocks, or the list does not add up.
    """
    if num_stages > num_blocks:
        blocks = f"{num_blocks} blocks" if num_blocks > 1 else "only block"
        raise ConfigurationError(
            f"num_stages={num_stages} is more than the model's {blocks}{named and f', {named}'}. Use at most "
            f"{num_blocks}, or name smaller modules in the order in which they run, as in "
            'SDPipeStrategy(blocks=["model.embeddings", "model.layers.*", "model.head"]).'
        )
    if isinstance(partition, str):
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
