"""Whole epochs that are dealt by speed, in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sdpipe.dealing.dealer import Dealer
from lightning_sdpipe.dealing.leases import Asked
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.policies import PolicyConfig, registry
from lightning_sdpipe.policies.ad_psgd import ADPSGD
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.local_sgd import LocalSGD, NoSync
from lightning_sdpipe.policies.pairing import uniform
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from tests.dealing.whole_epochs import DealtEpochs, Epochs

EVERYTHING = [
    NoSync(),
    SemiDecentralized(),
    SemiDecentralized(window=0.0),
    AllReduceModels(),
    LocalSGD(every=4),
    ADPSGD(),
    ADPSGD(asynchronous=True),
]
AT_THEIR_OWN_SPEED = [NoSync(), SemiDecentralized(), ADPSGD(asynchronous=True)]


def constant(*seconds: float) -> Callable[[int, int, float], float]:
    return lambda pipeline, iteration, now: seconds[pipeline]


def run(config: PolicyConfig, work: Epochs) -> DealtEpochs:
    """After it, each batch of each epoch was trained exactly once, and no later than its segment was over."""
    dealt = DealtEpochs(registry.build(config, work.num_stages, work.num_pipelines), work)
    dealt.run()
    assert not dealt.stuck
    times = Counter((batch.epoch, batch.home, batch.number) for batch in dealt.trained)
    every = [(e, i, b) for e in range(work.epochs) for i in range(work.num_pipelines) for b in range(work.pauses[-1])]
    assert times == Counter(every)
    over = {(segment.epoch, segment.start, segment.stop): at for segment, at, _ in dealt.finished}
    for batch in dealt.trained:
        (at,) = [end for (e, start, stop), end in over.items() if e == batch.epoch and start <= batch.number < stop]
        assert batch.ended <= at
    return dealt


def lengths(dealt: DealtEpochs) -> list[float]:
    ends = [at for _, at, _ in dealt.finished]
    return [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]


@pytest.mark.parametrize("config", EVERYTHING, ids=str)
@pytest.mark.parametrize(("stages", "prefetch"), [(1, 0), (2, 4)])
def test_four_epochs_on_devices_of_several_generations(config: PolicyConfig, stages: int, prefetch: int) -> None:
    for factors, possible in (((1, 1, 1, 2), 1.75), ((1, 1, 2, 4), 2.75)):
        seconds = constant(*(0.1 * factor for factor in factors))
        dealt = run(config, Epochs(stages, 4, [30], seconds, 4, prefetch))
        for length in lengths(dealt)[1:]:
            gain = max(factors) * 0.1 * 30 / length
            assert 0.9 <= gain <= possible + 1e-9
            if config in AT_THEIR_OWN_SPEED:
                assert gain >= (1.6 if factors[-1] == 2 else 2.4)


@given(
    seconds=st.lists(st.sampled_from([0.02, 0.05, 0.1, 0.13, 0.4, 1.0, 3.0]), min_size=1, max_size=8),
    prefetch=st.integers(0, 6),
    length=st.integers(1, 60),
)
@settings(max_examples=settings.default.max_examples // 4, deadline=None)
def test_at_steady_speeds_nobody_waits_longer_than_one_batch_of_its_own(
    seconds: list[float], prefetch: int, length: int
) -> None:
    """Once speeds are known, as they are in the second epoch."""
    dealt = run(NoSync(), Epochs(1, len(seconds), [length], constant(*seconds), 3, prefetch))
    begun = 0.0
    for segment, over, last in dealt.finished:
        for pipeline, end in enumerate(last):
            if segment.epoch:
                assert over - max(end, begun) <= seconds[pipeline] * (1 + 1e-6)
        begun = over


@given(
    pipelines=st.integers(1, 6),
    stages=st.integers(1, 2),
    prefetch=st.integers(0, 5),
    pauses=st.lists(st.integers(1, 40), min_size=1, max_size=3, unique=True).map(sorted),
    config=st.sampled_from(EVERYTHING),
    spread=st.sampled_from([0.0, 0.1, 3.0]),
    stall=st.sampled_from([0.0, 0.0, 2.0, 30.0]),
    gone=st.dictionaries(st.integers(1, 5), st.floats(0.0, 6.0), max_size=2),
    seed=st.integers(0, 1000),
)
@settings(max_examples=settings.default.max_examples // 2, deadline=None)
def test_every_batch_is_trained_exactly_once(
    pipelines: int,
    stages: int,
    prefetch: int,
    pauses: list[int],
    config: PolicyConfig,
    spread: float,
    stall: float,
    gone: dict[int, float],
    seed: int,
) -> None:
    """Whatever the speeds, stalls and losses; and progress never falls, and ends where an equal split ends."""

    def seconds(pipeline: int, iteration: int, now: float) -> float:
        stalls = stall * (uniform(seed, pipeline, iteration, 1) < 0.05)
        return 0.1 * (1 + spread * uniform(seed, pipeline)) * (1 + 0.2 * uniform(seed, pipeline, iteration)) + stalls

    gone = {pipeline: at for pipeline, at in gone.items() if pipeline < pipelines}
    work = Epochs(stages, pipelines, pauses, seconds, 2, prefetch, gone)
    dealt = run(config, work)
    replay(dealt, work)
    for pipeline in range(pipelines):
        mine = [batch for batch in dealt.trained if batch.pipeline == pipeline]
        values = [(batch.epoch, batch.progress) for batch in mine]
        assert values == sorted(values)
        assert all(0 <= progress <= pipelines * pauses[-1] for _, progress in values)


def replay(dealt: DealtEpochs, work: Epochs) -> None:
    """A new dealer decides the same on the same events."""
    dealer = Dealer(work.num_stages, work.num_pipelines)
    assert [dealer.on(event, at) for at, event, _ in dealt.entries] == [leases for _, _, leases in dealt.entries]


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("pipelines", [1, 3, 4])
def test_equal_speeds_give_everybody_its_own_shard_in_order(pipelines: int, prefetch: int) -> None:
    work = Epochs(2, pipelines, [7, 30], lambda *_: 0.3, 2, prefetch)
    dealt = run(SemiDecentralized(), work)
    for pipeline in range(pipelines):
        mine = [batch for batch in dealt.trained if batch.pipeline == pipeline]
        assert [(b.home, b.number) for b in mine] == 2 * [(pipeline, number) for number in range(30)]
        assert [b.progress for b in mine] == 2 * [float(pipelines * number) for number in range(30)]


def test_a_stall_costs_no_more_than_its_own_length() -> None:
    def seconds(pipeline: int, iteration: int, now: float) -> float:
        return 0.1 * (1 + pipeline) + (5.0 if (pipeline, iteration) == (1, 40) else 0.0)

    work = Epochs(1, 3, [100], seconds, 2)
    with_it = run(NoSync(), work)
    without = run(NoSync(), Epochs(1, 3, [100], constant(0.1, 0.2, 0.3), 2))
    longer = sum(lengths(with_it)) - sum(lengths(without))
    assert 0 <= longer <= 5.0 + 0.3


def test_the_scheduler_is_asked_rarely() -> None:
    """A pipeline asks about once per second, and every two while more is left."""
    dealt = run(NoSync(), Epochs(1, 4, [3000], constant(0.01, 0.01, 0.02, 0.04), 2))
    asks = Counter(
        (event.segment.epoch, event.worker.pipeline) for _, event, _ in dealt.entries if isinstance(event, Asked)
    )
    seconds = lengths(dealt)
    assert all(count <= seconds[epoch] + 12 for (epoch, _), count in asks.items())
    assert all(count <= seconds[1] / 2 + 12 for (epoch, _), count in asks.items() if epoch == 1)


def test_progress_follows_what_everybody_trains() -> None:
    """Between pauses it is a prediction; at steady speeds it is right to within a batch of everybody's."""
    dealt = run(NoSync(), Epochs(1, 4, [100], constant(0.1, 0.1, 0.2, 0.4), 2))
    begun = dealt.finished[0][1]
    for batch in dealt.trained:
        if batch.epoch == 1 and batch.begun < begun + 0.9 * (dealt.finished[1][1] - begun):
            rate = 1 / 0.1 + 1 / 0.1 + 1 / 0.2 + 1 / 0.4
            assert abs(batch.progress - rate * (batch.begun - begun)) <= 2 * 4


def test_pauses_that_cannot_be_are_refused() -> None:
    for pauses in ([], [0], [5, 5], [7, 3]):
        with pytest.raises(ConfigurationError, match="increasing batch numbers"):
            Epochs(1, 2, pauses, constant(1.0, 1.0))
