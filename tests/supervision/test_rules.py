"""The supervisor's decisions under scripted time, and what holds whatever happens to the processes."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.supervision.events import (
    Begin,
    Decision,
    Finish,
    Launch,
    LaunchScheduler,
    ProcessEnded,
    Raising,
    Say,
    SchedulerEnded,
    Seen,
    Show,
    SignalReceived,
    Stop,
    TimePassed,
)
from lightning_sdpipe.supervision.rules import Rules
from lightning_sdpipe.supervision.script import UncaughtException
from lightning_sdpipe.supervision.state import Settings

KILLED, TERM = -signal.SIGKILL, signal.SIGTERM


def stage_of(rank: int) -> int:
    return 1 - rank  # rank 0 runs the last stage


BUG = UncaughtException("ValueError", "sample 17 is no picture", "train.py:41 in training_step")
FOLLOWS = UncaughtException(
    "lightning_sdpipe.errors.WorkerFailedError", "Stage 1 of pipeline 0 failed first", "p2p.py:7 in wait"
)


def rules(pipelines: int = 4, **settings: float) -> Rules:
    made = Rules(Settings(pipelines, 2, **settings), stage_of)  # type: ignore[arg-type]
    made.on(Begin(), 0.0)
    return made


def seen(*pipelines: int, at: float, life: str = "a", **more: object) -> Seen:
    ever = frozenset(pipelines)
    return Seen(at, {number: f"{life}{number}" for number in pipelines}, **{"ever": ever} | more)  # type: ignore[arg-type]


def training(pipelines: int = 4, **settings: float) -> Rules:
    made = rules(pipelines, **settings)
    made.on(seen(*range(pipelines), at=5.0, leader=0), 5.0)
    return made


def lines(decisions: list[Decision]) -> list[str]:
    return [decision.line for decision in decisions if isinstance(decision, Say)]


def test_the_beginning() -> None:
    made = Rules(Settings(2, 2), stage_of)
    assert made.on(Begin(), 0.0) == [Launch(0, 0), Launch(1, 0), Show(0)]
    assert made.deadline() == math.inf
    assert made.on(seen(0, at=4.0), 4.0) == []
    assert made.on(seen(0, 1, at=5.0, leader=1), 5.0) == [Say("all 2 pipelines train"), Show(1)]


def test_a_killed_stage_and_its_pipelines_return() -> None:
    made = training()
    assert made.on(ProcessEnded(2, 0, KILLED), 10.0) == [Say("pipeline 2 lost (stage 1 killed); 3 of 4 go on")]
    assert made.on(ProcessEnded(2, 1, 1, FOLLOWS), 10.5) == [Launch(2, 1)], "at once"
    stale = seen(0, 1, 2, 3, at=10.4)
    assert made.on(stale, 10.6) == [], "the life before"
    back = Seen(16.0, {0: "a0", 1: "a1", 2: "b2", 3: "a3"}, 0, 412)
    assert made.on(back, 16.1) == [Say("pipeline 2 is back after 6.1 s, at update 412")]
    assert made.on(back, 16.5) == []


def test_the_others_of_a_pipeline_get_time_to_say_what_they_know() -> None:
    made = training()
    assert made.on(ProcessEnded(1, 0, 1, FOLLOWS), 10.0) == [], "another process failed first"
    assert made.deadline() == 13.0
    assert made.on(ProcessEnded(1, 1, 1, BUG), 11.0) == [
        Say("pipeline 1 lost (stage 0: ValueError: sample 17 is no picture); 3 of 4 go on"),
        Launch(1, 1),
    ]


def test_who_does_not_end_by_itself_is_killed_and_explains_nothing() -> None:
    made = training()
    assert made.on(ProcessEnded(1, 0, 1, FOLLOWS), 10.0) == []
    assert made.on(TimePassed(), 13.0) == [Stop(1, signal.SIGKILL)]
    assert made.deadline() == math.inf
    (said, launched) = made.on(ProcessEnded(1, 1, KILLED), 13.1)
    assert said == Say("pipeline 1 lost (stage 1: WorkerFailedError: Stage 1 of pipeline 0 failed first); 3 of 4 go on")
    assert launched == Launch(1, 1)


def test_two_lost_at_once() -> None:
    made = training()
    made.on(ProcessEnded(1, 0, KILLED), 10.0)
    assert lines(made.on(ProcessEnded(2, 1, KILLED), 10.0)) == ["pipeline 2 lost (stage 0 killed); 2 of 4 go on"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (3, "stage 0 ended with exit code 3"),
        (143, "stage 0 ended by SIGTERM"),
        (-signal.SIGTERM, "stage 0 ended by SIGTERM"),
        (-signal.SIGSEGV, "stage 0 ended by SIGSEGV"),
        (-60, "stage 0 ended by signal 60"),
    ],
)
def test_how_processes_end(code: int, said: str) -> None:
    assert lines(training().on(ProcessEnded(0, 1, code), 9.0)) == [f"pipeline 0 lost ({said}); 3 of 4 go on"]


def test_delays_double_until_it_trains_again() -> None:
    made, now, delays = training(2, restarts=20), 10.0, []
    for _ in range(9):
        made.on(ProcessEnded(1, 0, KILLED), now)
        decisions = made.on(ProcessEnded(1, 1, KILLED), now)
        delays.append(0.0 if decisions else made.deadline() - now)
        now += delays[-1]
        if not decisions:
            assert [d for d in made.on(TimePassed(), now) if isinstance(d, Launch)]
    assert delays == [0, 0, 1, 2, 4, 8, 16, 30, 30]
    made.on(Seen(now, {0: "a0", 1: "b1"}), now)
    made.on(ProcessEnded(1, 0, KILLED), now)
    assert Launch(1, 10) in made.on(ProcessEnded(1, 1, KILLED), now)


def test_a_budget_that_is_used_up_takes_one_pipeline_out_of_the_run() -> None:
    made = training(2, restarts=1)
    for _ in range(2):
        made.on(ProcessEnded(1, 0, KILLED), 10.0)
        decisions = made.on(ProcessEnded(1, 1, KILLED), 10.0)
    assert decisions == [Say("pipeline 1 is given up: its budget of 1 restarts is used up")]
    assert made.on(ProcessEnded(0, 0, 0), 20.0) == []
    assert made.on(ProcessEnded(0, 1, 0), 20.0) == [Finish(0)]


def test_too_few_pipelines_end_the_run_by_name() -> None:
    made = training(3, restarts=0, min_pipelines=3)
    made.on(ProcessEnded(1, 0, KILLED), 10.0)
    decisions = made.on(ProcessEnded(1, 1, KILLED), 10.0)
    assert "the run ends: 2 of 3 pipelines are left, and it needs 3 (--min-pipelines)" in lines(decisions)
    assert [d for d in decisions if isinstance(d, Stop)] == [Stop(0, TERM), Stop(2, TERM)]
    for pipeline, rank in ((0, 0), (0, 1), (2, 0)):
        assert made.on(ProcessEnded(pipeline, rank, 143), 11.0) in ([], [Show(2)])
    assert made.on(ProcessEnded(2, 1, 143), 11.0) == [Finish(1)]


def test_an_exception_is_said_when_it_leaves_the_script() -> None:
    made = training()
    said = "pipeline 1 lost (stage 0: ValueError: sample 17 is no picture); 3 of 4 go on"
    assert made.on(Raising(1, 1, BUG), 10.0) == [Say(said)]
    assert made.on(seen(0, 2, 3, at=10.1, gone={"a1": "stage 0 failed"}), 10.2) == [], "that is known"
    assert made.on(ProcessEnded(1, 0, 1, FOLLOWS), 10.5) == []
    assert made.on(ProcessEnded(1, 1, 1, BUG), 11.0) == [Launch(1, 1)]
    made.on(Raising(1, 1, BUG), 12.0)
    assert made.on(TimePassed(), 15.0) == [Stop(1, signal.SIGKILL)], "threads of the script would not let it end"
    made.on(ProcessEnded(1, 0, KILLED), 15.1)
    assert made.on(ProcessEnded(1, 1, KILLED), 15.1) == [Launch(1, 2)]
    assert made.on(Raising(2, 0, FOLLOWS), 16.0) == [], "another process may say more"


def test_a_bug_of_the_script_ends_the_run_before_anybody_trains() -> None:
    made = rules()
    made.on(ProcessEnded(1, 0, 1, BUG), 10.0)
    assert Launch(1, 1) in made.on(ProcessEnded(1, 1, 1, FOLLOWS), 10.2)
    other = UncaughtException(BUG.kind, "sample 23 is no picture", BUG.place)
    made.on(ProcessEnded(3, 1, 1, FOLLOWS), 12.0)
    decisions = made.on(ProcessEnded(3, 0, 1, other), 12.1)
    assert lines(decisions)[-1] == (
        "the run ends: pipelines 1 and 3 failed with the same exception, which starting again does not mend: "
        "ValueError: sample 23 is no picture (train.py:41 in training_step)"
    )
    assert {d.pipeline for d in decisions if isinstance(d, Stop)} == {0, 1, 2}


@pytest.mark.parametrize(("kind", "ends"), [("SchedulerError", False), ("RefusedError", True)])
def test_a_scheduler_that_was_lost_is_no_bug_and_what_it_refuses_is(kind: str, ends: bool) -> None:
    made, raised = rules(), UncaughtException(f"lightning_sdpipe.errors.{kind}", "waited 60 s", "client.py:3 in _wait")
    for pipeline in (1, 3):
        made.on(ProcessEnded(pipeline, 0, 1, raised), 10.0)
        decisions = made.on(ProcessEnded(pipeline, 1, 1, raised), 10.1)
    assert any("the same exception" in line for line in lines(decisions)) == ends


def test_of_what_ends_a_pipeline_that_trains_the_scheduler_hears() -> None:
    made = training()
    for pipeline in (1, 3):
        made.on(ProcessEnded(pipeline, 0, 1, BUG), 10.0)
        assert Launch(pipeline, 1) in made.on(ProcessEnded(pipeline, 1, 1, FOLLOWS), 10.1)


def test_who_cannot_join_does_not_end_those_that_train() -> None:
    made = training()
    for pipeline in (1, 3):
        for rank in (0, 1):
            made.on(ProcessEnded(pipeline, rank, KILLED), 10.0)
        made.on(ProcessEnded(pipeline, 0, 1, BUG), 11.0)
        decisions = made.on(ProcessEnded(pipeline, 1, 1, FOLLOWS), 11.1)
        assert not [d for d in decisions if isinstance(d, Stop)]


def test_a_kill_or_a_failure_of_others_is_no_bug() -> None:
    made = training()
    for pipeline in range(4):
        made.on(ProcessEnded(pipeline, 0, KILLED), 10.0)
        assert Launch(pipeline, 1) in made.on(ProcessEnded(pipeline, 1, 1, BUG), 10.1)
    for pipeline in range(4):
        made.on(ProcessEnded(pipeline, 0, 1, FOLLOWS), 20.0)
        assert Launch(pipeline, 2) in made.on(ProcessEnded(pipeline, 1, 1, FOLLOWS), 20.1)


def test_one_pipeline_that_fails_twice_only_uses_its_budget() -> None:
    made = training()
    for _ in range(2):
        made.on(ProcessEnded(1, 0, 1, BUG), 10.0)
        assert "the run ends" not in str(made.on(ProcessEnded(1, 1, 1, FOLLOWS), 10.0))


def test_a_script_that_never_trains() -> None:
    made = rules(1)
    made.on(ProcessEnded(0, 0, 0), 3.0)
    assert made.on(ProcessEnded(0, 1, 0), 3.1) == []
    assert made.on(seen(at=3.0), 3.15) == [], "asked before the end"
    (said, finished) = made.on(seen(at=3.2), 3.3)
    assert "ended without training: it has not called Trainer.fit with SDPipeStrategy" in str(said)
    assert finished == Finish(1)


def test_a_training_too_short_to_be_seen() -> None:
    made = rules(1)
    made.on(ProcessEnded(0, 0, 0), 3.0)
    made.on(ProcessEnded(0, 1, 0), 3.1)
    assert made.on(seen(at=3.2, ever=frozenset({0})), 3.3) == [Finish(0)]


def test_a_scheduler_that_does_not_answer_at_the_end() -> None:
    made = rules(1)
    made.on(ProcessEnded(0, 0, 0), 3.0)
    made.on(ProcessEnded(0, 1, 0), 3.1)
    assert made.on(TimePassed(), made.deadline()) == [Finish(0)]


def test_who_is_not_back_when_the_others_have_finished_does_not_begin_anew() -> None:
    made = training(3, first_delay=100.0)
    for _ in range(2):  # pipeline 2 fails again before it trains, and waits for its time
        made.on(ProcessEnded(2, 0, KILLED), 10.0)
        made.on(ProcessEnded(2, 1, KILLED), 10.0)
    made.on(ProcessEnded(1, 0, KILLED), 11.0)
    assert Launch(1, 1) in made.on(ProcessEnded(1, 1, KILLED), 11.0)
    made.on(ProcessEnded(2, 0, KILLED), 11.5)
    assert Launch not in map(type, made.on(ProcessEnded(2, 1, KILLED), 11.5))
    made.on(ProcessEnded(0, 0, 0), 12.0)
    assert lines(made.on(ProcessEnded(0, 1, 0), 12.0)) == ["pipeline 2 does not start again: the training is over"]
    late = made.on(seen(at=12.1, ever=frozenset({0, 1, 2})), 12.2)
    assert late == [Say("pipeline 1 comes too late: the training is over"), Stop(1, TERM)]
    assert made.on(TimePassed(), made.deadline()) == [Stop(1, signal.SIGKILL)]
    made.on(ProcessEnded(1, 0, KILLED), 50.0)
    assert made.on(ProcessEnded(1, 1, KILLED), 50.0) == [Finish(0)]


def test_who_trains_when_another_finishes_is_left_alone() -> None:
    made = training(2)
    made.on(ProcessEnded(0, 0, 0), 12.0)
    made.on(ProcessEnded(0, 1, 0), 12.0)
    assert made.on(seen(1, at=12.1), 12.2) == []
    assert made.on(seen(at=12.4), 12.5) == [], "it has left, and tidies up"
    made.on(ProcessEnded(1, 0, 0), 13.0)
    assert made.on(ProcessEnded(1, 1, 0), 13.0) == [Finish(0)]


def test_a_process_that_fails_after_the_training() -> None:
    made = training(1)
    made.on(ProcessEnded(0, 0, 0), 12.0)
    said, finished = made.on(ProcessEnded(0, 1, 3), 12.1)
    assert said == Say("pipeline 0 failed after the training (stage 0 ended with exit code 3)")
    assert finished == Finish(1)


def test_a_silent_pipeline_ends_by_itself_or_is_killed() -> None:
    made = training()
    silent = seen(0, 1, 2, at=40.0, gone={"a3": "stage 0 was silent for 31.0 s"})
    assert made.on(silent, 39.7) == [], "perhaps it ends just now"
    assert made.on(silent, 40.0) == [Say("pipeline 3 lost (stage 0 was silent for 31.0 s); 3 of 4 go on")]
    assert made.on(silent, 41.0) == []
    assert made.deadline() == 50.0
    assert made.on(TimePassed(), 50.0) == [
        Say("pipeline 3 is killed: 10 s later it has not ended"),
        Stop(3, signal.SIGKILL),
    ]
    assert made.on(ProcessEnded(3, 0, KILLED), 50.1) == [], "it was told"
    assert made.on(ProcessEnded(3, 1, KILLED), 50.1) == [Launch(3, 1)]
    back = Seen(56.0, {3: "b3"}, 0, 90)
    assert lines(made.on(back, 56.0)) == ["pipeline 3 is back after 16.0 s, at update 90"]


def test_a_scheduler_that_dies_is_started_again() -> None:
    made = training(restarts=1)
    decisions = made.on(SchedulerEnded(KILLED), 10.0)
    assert decisions == [Say("the scheduler ended (killed); it starts again"), LaunchScheduler()]
    decisions = made.on(SchedulerEnded(2), 11.0)
    assert lines(decisions) == [
        "the run ends: the scheduler ended (exit code 2), and its budget of 1 restarts is used up"
    ]


def test_a_run_that_the_scheduler_has_ended() -> None:
    decisions = training().on(seen(at=9.0, failure="2 of 3 pipelines came within 600 s"), 9.0)
    assert lines(decisions) == ["the run ends: the scheduler ended it: 2 of 3 pipelines came within 600 s"]


def test_ctrl_c_once_and_twice() -> None:
    made = training(2)
    assert made.on(SignalReceived(signal.SIGINT), 10.0) == [
        Say("the run ends: Ctrl-C"),
        Stop(0, signal.SIGINT),
        Stop(1, signal.SIGINT),
    ]
    assert made.deadline() == 40.0
    assert made.on(ProcessEnded(0, 0, 1, BUG), 10.1) == [], "nobody is told any more why"
    assert made.on(SignalReceived(signal.SIGINT), 11.0) == [Stop(0, signal.SIGKILL), Stop(1, signal.SIGKILL)]
    for pipeline, rank in ((0, 1), (1, 0)):
        made.on(ProcessEnded(pipeline, rank, KILLED), 11.0)
    assert made.on(ProcessEnded(1, 1, KILLED), 11.0) == [Finish(130)]
    assert made.deadline() == math.inf


def test_the_leaders_progress_is_shown() -> None:
    made = training()
    assert made.on(ProcessEnded(0, 0, KILLED), 9.0)[1:] == [], "rank 1 of the leader lives"
    assert Show(1) not in made.on(ProcessEnded(0, 1, KILLED), 9.1), "it starts again, until somebody else leads"
    assert made.on(seen(1, 2, 3, at=9.2, leader=1), 9.2) == [Show(1)]
    assert made.on(seen(1, 2, 3, at=9.3), 9.3) == [], "nobody leads at the moment"


def test_an_end_of_a_process_that_does_not_run_is_refused() -> None:
    made = training(1)
    made.on(ProcessEnded(0, 1, 0), 9.0)
    with pytest.raises(ValueError, match="does not run"):
        made.on(ProcessEnded(0, 1, 0), 9.0)


@dataclass
class Machine:
    """Processes as far as the rules can tell: who lives, and what has been decided."""

    rules: Rules
    stages: int
    settings: Settings
    now: float = 0.0
    alive: set[tuple[int, int]] = field(default_factory=set)
    launches: dict[int, int] = field(default_factory=dict)
    finished: int | None = None
    life: int = 0
    trains: dict[int, str] = field(default_factory=dict)
    ever: set[int] = field(default_factory=set)
    ticks: int = 0

    def on(self, event: object) -> None:
        assert self.finished is None, "nothing happens any more"
        for decision in self.rules.on(event, self.now):  # type: ignore[arg-type]
            assert self.finished is None, "finished is the last word"
            match decision:
                case Launch(pipeline, again):
                    assert not any((pipeline, rank) in self.alive for rank in range(self.stages))
                    assert self.launches.get(pipeline, -1) == again - 1 <= self.settings.restarts - 1
                    self.launches[pipeline] = again
                    self.alive |= {(pipeline, rank) for rank in range(self.stages)}
                case Finish(code):
                    assert not self.alive
                    self.finished = code
                case Show(pipeline):
                    assert any(number == pipeline for number, _ in self.alive)
        if self.finished is None:
            assert self.alive or self.rules.deadline() < math.inf, "somebody lives or something is due"

    def end(self, who: tuple[int, int], code: int, raised: UncaughtException | None = None) -> None:
        self.alive.discard(who)
        self.trains.pop(who[0], None)
        self.on(ProcessEnded(*who, code, raised if code == 1 else None))

    def look(self, failure: str | None = None) -> None:
        leader = min(self.trains, default=None)
        gone = {str(life): "lost" for life in range(self.life) if str(life) not in self.trains.values()}
        self.on(Seen(self.now, dict(self.trains), leader, 5, frozenset(self.ever), gone, failure))

    def tick(self) -> None:
        due = self.rules.deadline()
        if due < math.inf:
            assert due > self.now or self.ticks < 3, "time passes"
            self.ticks = 0 if due > self.now else self.ticks + 1
            self.now = max(self.now, due)
            self.on(TimePassed())


@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3))
def test_whatever_happens(data: st.DataObject, pipelines: int, stages: int, restarts: int) -> None:
    settings = Settings(pipelines, stages, restarts, data.draw(st.integers(1, pipelines)))
    machine = Machine(Rules(settings, lambda rank: stages - 1 - rank), stages, settings)
    machine.on(Begin())
    for _ in range(data.draw(st.integers(0, 60))):
        if machine.finished is not None:
            return
        machine.now += data.draw(st.sampled_from([0.0, 0.1, 5.0]))
        kinds = ["end", "end", "join", "look", "tick", "scheduler", "told", "failure"]
        match data.draw(st.sampled_from(kinds[: 6 if data.draw(st.booleans()) else 8])):
            case "end" if machine.alive:
                who = data.draw(st.sampled_from(sorted(machine.alive)))
                code = data.draw(st.sampled_from([0, 0, 1, 1, 3, -9, -15, 143]))
                machine.end(who, code, data.draw(st.sampled_from([None, BUG, FOLLOWS])))
            case "join" if machine.alive:
                who = data.draw(st.sampled_from(sorted(machine.alive)))
                machine.life += 1
                machine.trains[who[0]] = str(machine.life)
                machine.ever.add(who[0])
                machine.look()
            case "look":
                machine.look()
            case "tick":
                machine.tick()
            case "scheduler":
                machine.on(SchedulerEnded(-9))
            case "told":
                machine.on(SignalReceived(signal.SIGTERM))
            case "failure":
                machine.look("too few came")
    if machine.finished is None:  # every run can be ended: by a word, and by force if processes do not listen
        machine.on(SignalReceived(signal.SIGTERM))
        for _ in range(5):
            if machine.finished is None:
                machine.tick()
        for who in sorted(machine.alive):
            machine.end(who, -9)
    assert machine.finished is not None


def test_that_training_goes_on_from_a_checkpoint_is_said_once_for_each_new_start() -> None:
    rules = Rules(Settings(1, 1), stage_of)
    rules.on(Begin(), 0.0)
    said = []
    for now, (life, resumed) in enumerate([("a", None), ("b", "1.ckpt"), ("b", "1.ckpt"), ("c", "1.ckpt")]):
        decided = rules.on(Seen(float(now), {0: life}, resumed=resumed), float(now))
        said.append([one.line for one in decided if isinstance(one, Say) and "no pipeline was left" in one.line])
    line = "no pipeline was left; training goes on from 1.ckpt"
    assert said == [[], [line], [], [line]]
