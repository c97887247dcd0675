"""Rounds of gradients in elastic runs in virtual time: members die, newcomers take over the state of others, the
scheduler is started again, and exchanges break off when some have the mean and others have not. Whatever happens, all
that are left have the same means, which the world itself looks at after each round."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import suppress

import pytest

from lightning_sdpipe.policies import Group
from lightning_sdpipe.policies.all_reduce import AllPresent
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from recipes.tools.elastic_world import NobodyLeft, Process, World


class Rounds(World):
    """A run in which these happen as likely as is said: an exchange ``breaks`` off for one of its members; a member
    gives one up ``early``, before it has begun; a source is ``uninvited`` to hand something over; and the scheduler
    dies when all but a newcomer have heard that it is a member, so that this is ``unheard``."""

    def __init__(self, seed: int, **likely: float) -> None:
        self.likely = defaultdict(float, likely)
        super().__init__(seed)

    def draw(self, pairs: bool) -> None:
        super().draw(pairs)
        self.config, self.overlaps, self.batches, self.breaks = AllPresent(), False, 1 << 20, self.likely["breaks"]
        self.pipelines, self.pace = 4, (0.2, 0.4)

    def cut_off(self, seconds: float) -> None:
        """Never: a scheduler that was started again meanwhile knows of no run, and begins one without a checkpoint."""

    def happens(self, what: str) -> bool:
        happens = self.rng.random() < self.likely[what]
        self.seen[what] += happens
        return happens

    def begin_exchange(self, process: Process, group: Group) -> None:
        if len(group.members) > 1 and self.happens("early"):
            process.group = group
            self.break_off(process, group)
            self.ends(process, False)
        else:
            super().begin_exchange(process, group)

    def deliver(self, replies: list[tuple[bytes, m.Reply | e.Reply]]) -> None:
        arrive = [each for each in replies if not (isinstance(each[1], m.Invitation) and self.happens("uninvited"))]
        unheard = [each for each in arrive if isinstance(each[1], e.Start) and not each[1].fresh]
        if unheard and self.happens("unheard"):
            super().deliver([each for each in arrive if each not in unheard])
            self.kill_scheduler(0.1)
        else:
            super().deliver(arrive)


@pytest.mark.parametrize(
    "likely",
    [{}, {"breaks": 0.1}, {"breaks": 0.3}, {"early": 0.05}, {"breaks": 0.02, "uninvited": 0.5}],
    ids=str,
)
def test_all_that_are_left_have_the_same_means_and_go_on_after_any_faults(likely: dict[str, float]) -> None:
    seen: Counter[str] = Counter()
    for seed in range(2):
        world = Rounds(seed, **likely)
        with suppress(NobodyLeft):
            world.run(3.0)
            for _ in range(8):
                world.run(world.now + world.rng.choice([0.05, 0.6, 3.0]))
                world.fault()
            world.check_that_all_train(25.0)
        seen.update(world.seen)
    assert seen["handed over"] or not likely.get("breaks"), "none was handed over"
    assert all(seen[what] for what in likely if what != "breaks"), seen


def test_a_newcomer_that_has_not_heard_that_it_is_a_member_is_not_put_out() -> None:
    told: list[str] = []
    seen: Counter[str] = Counter()
    for seed in range(4):
        world = Rounds(seed, breaks=0.1, unheard=0.5)
        world.tell, world.loss = told.append, 0.0
        world.run(6.0)
        for _ in range(4):
            world.die(world.rng.choice(world.processes), "killed")
            world.run(world.now + 10.0)
        seen.update(world.seen)
    assert seen["unheard"] > 5, "hardly any was not heard"
    assert not [text for text in told if "must end" in text and "connection closed" not in text]
