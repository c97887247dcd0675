"""The supervisor's decisions under scripted time, and what holds whatever happens to the processes."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.supervision.rules import (
    NO_MEMBERS,
    Decision,
    Event,
    Launch,
    ProcessEnded,
    Rules,
    Say,
    Seen,
    Settings,
    SignalReceived,
    Stop,
)

KILLED, TERM = -signal.SIGKILL, signal.SIGTERM
BUG = "ValueError: sample 17 is no picture"
FOLLOWS = "lightning_sdpipe.errors.WorkerFailedError: Stage 1 of pipeline 0 failed first"


def rules(pipelines: int = 4, **settings: float) -> Rules:
    made = Rules(Settings(pipelines, 2, **settings))  # type: ignore[arg-type]
    made.on(None, 0.0)
    return made


def seen(*pipelines: int, at: float, failure: str | None = None, **more: object) -> Seen:
    """Pipelines that train in their first lives, but for what is said."""
    told = {"lives": {number: number for number in pipelines}, "ever": list(pipelines)} | more
    return Seen(at, msgspec.structs.replace(NO_MEMBERS, **told), failure)


def training(pipelines: int = 4, **settings: float) -> Rules:
    made = rules(pipelines, **settings)
    made.on(seen(*range(pipelines), at=5.0, leader=0), 5.0)
    return made


def lines(decisions: list[Decision]) -> list[str]:
    return [decision.line for decision in decisions if isinstance(decision, Say)]


def ends(made: Rules, pipeline: int, now: float, code: int = KILLED) -> list[Decision]:
    """Both of its processes end: what is decided when the second one has."""
    made.on(ProcessEnded(pipeline, 1, code), now)
    return made.on(ProcessEnded(pipeline, 0, code), now)


def test_the_beginning() -> None:
    made = Rules(Settings(2, 2))
    assert made.on(None, 0.0) == [Launch(0, 0), Launch(1, 0)]
    assert made.on(None, 100.0) == []
    assert made.on(seen(0, at=104.0), 104.0) == []
    assert made.on(seen(0, 1, at=105.0), 105.0) == [Say("all 2 pipelines train")]


def test_a_pipeline_that_was_lost_before_another_came_does_not_train() -> None:
    made = rules(2)
    made.on(seen(0, at=5.0, leader=0), 5.0)
    made.on(ProcessEnded(0, 0, KILLED), 6.0)
    assert "all 2 pipelines train" not in lines(made.on(seen(1, at=6.2, lives={1: 1}, ever=[0, 1]), 6.3))


def test_a_killed_stage_and_its_pipelines_return() -> None:
    made = training()
    assert made.on(ProcessEnded(2, 1, KILLED), 10.0) == [Say("pipeline 2 lost (stage 1 killed); 3 of 4 go on")]
    assert made.on(ProcessEnded(2, 0, 1, FOLLOWS), 10.5) == [Launch(2, 1)], "at once"
    assert made.on(seen(0, 1, 2, 3, at=10.4), 10.6) == [], "the life before"
    back = seen(at=16.0, lives={0: 0, 1: 1, 2: 4, 3: 3}, update=412)
    assert made.on(back, 16.1) == [Say("pipeline 2 is back after 6.1 s, at update 412")]
    assert made.on(back, 16.5) == []


def test_the_others_of_a_pipeline_get_time_to_say_what_they_know() -> None:
    made = training()
    assert made.on(ProcessEnded(1, 1, 1, FOLLOWS), 10.0) == [], "another process failed first"
    assert made.on(None, 12.9) == []
    assert made.on(ProcessEnded(1, 0, 1, BUG), 12.9) == [
        Say("pipeline 1 lost (stage 0 ended with exit code 1: ValueError: sample 17 is no picture); 3 of 4 go on"),
        Launch(1, 1),
    ]


def test_what_does_not_end_by_itself_is_killed_and_explains_nothing() -> None:
    made = training()
    assert made.on(ProcessEnded(1, 1, 1, FOLLOWS), 10.0) == []
    assert made.on(None, 13.0) == [Stop(1, signal.SIGKILL)]
    assert made.on(None, 100.0) == []
    (said, launched) = made.on(ProcessEnded(1, 0, KILLED), 100.1)
    assert f"pipeline 1 lost (stage 1 ended with exit code 1: {FOLLOWS}); 3 of 4 go on" in str(said)
    assert launched == Launch(1, 1)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (3, "stage 0 ended with exit code 3"),
        (-signal.SIGSEGV, "stage 0 ended by signal 11 (Segmentation fault)"),
        (-60, "stage 0 ended by signal 60 (Real-time signal 26)"),
    ],
)
def test_how_processes_end(code: int, said: str) -> None:
    assert lines(training().on(ProcessEnded(0, 0, code), 9.0)) == [f"pipeline 0 lost ({said}); 3 of 4 go on"]


def test_delays_double_until_it_trains_again() -> None:
    made, delays = training(2, restarts=20), []
    for turn in range(9):
        now = waited = 100.0 * (turn + 1)
        launched = ends(made, 1, now)
        while not any(isinstance(decision, Launch) for decision in launched):
            waited += 1
            launched = made.on(None, waited)
        delays.append(waited - now)
    assert delays == [0, 0, 1, 2, 4, 8, 16, 30, 30]
    made.on(seen(at=2000.0, lives={0: 0, 1: 5}), 2000.0)
    assert Launch(1, 10) in ends(made, 1, 2000.0)


def test_a_budget_that_is_used_up_takes_one_pipeline_out_of_the_run() -> None:
    made = training(2, restarts=1)
    ends(made, 1, 10.0)
    assert ends(made, 1, 10.0) == [Say("pipeline 1 is given up: its budget of 1 restarts is used up")]
    for stage in (0, 1):
        assert made.code is None
        assert made.on(ProcessEnded(0, stage, 0), 20.0) == []
    assert made.code == 0


def test_too_few_pipelines_end_the_run_by_name() -> None:
    made = training(3, restarts=0, min_pipelines=3)
    decisions = ends(made, 1, 10.0)
    assert "the run ends: 2 of 3 pipelines are left, and it needs 3 (--min-pipelines)" in lines(decisions)
    assert [d for d in decisions if isinstance(d, Stop)] == [Stop(0, TERM), Stop(2, TERM)]
    for pipeline, stage in ((0, 1), (0, 0), (2, 1), (2, 0)):
        assert made.on(ProcessEnded(pipeline, stage, 143), 11.0) == []
    assert made.code == 1


def test_why_the_scheduler_goes_on_without_a_pipeline() -> None:
    made = training()
    gone = seen(0, 2, 3, at=10.0, gone=[(1, 1)], reasons=["stage 0 failed: ValueError: sample 17\nand more"])
    assert made.on(gone, 10.0) == [Say("pipeline 1 lost (stage 0 failed: ValueError: sample 17); 3 of 4 go on")]
    assert made.on(gone, 10.5) == [], "that is known"
    assert made.on(ProcessEnded(1, 1, 1, FOLLOWS), 10.6) == []
    assert made.on(None, 19.9) == []
    assert made.on(None, 20.0) == [Stop(1, signal.SIGKILL)], "threads of the script would not let it end"
    assert made.on(ProcessEnded(1, 0, KILLED), 20.1) == [Launch(1, 1)]
    assert lines(made.on(seen(at=26.0, lives={1: 7}, update=90), 26.0)) == [
        "pipeline 1 is back after 16.0 s, at update 90"
    ]


def test_two_starts_of_each_pipeline_in_vain_end_the_run() -> None:
    made = rules(2)
    for pipeline in (0, 1, 0):
        made.on(ProcessEnded(pipeline, 1, 1, BUG), 10.0)
        assert any(isinstance(d, Launch) for d in made.on(ProcessEnded(pipeline, 0, 1, FOLLOWS), 10.2)) == (
            pipeline == 1 or made.on(None, 12.0) == []
        )
    made.on(ProcessEnded(1, 0, 1, BUG), 12.0)
    decisions = made.on(ProcessEnded(1, 1, 1, FOLLOWS), 12.1)
    assert "the run ends: no pipeline came to train in two starts each; their logs say why" in lines(decisions)


def test_a_pipeline_that_cannot_join_does_not_end_those_that_train() -> None:
    made = training()
    for pipeline in (1, 3, 1, 3, 1, 3):
        for stage in (0, 1):
            decisions = made.on(ProcessEnded(pipeline, stage, 1, BUG), 10.0)
            assert not [d for d in decisions if isinstance(d, Stop)]
        made.on(None, 1000.0)


def ended_before_it_was_seen() -> Rules:
    made = rules(1)
    for stage, now in ((1, 3.0), (0, 3.1)):
        assert made.on(ProcessEnded(0, stage, 0), now) == []
    return made


def test_a_script_that_never_trains() -> None:
    made = ended_before_it_was_seen()
    assert made.on(seen(at=3.0), 3.15) == [], "asked before the end"
    (said,) = lines(made.on(seen(at=3.2), 3.3))
    assert "ended without training: it has not called Trainer.fit with SDPipeStrategy" in said
    assert made.code == 1


def test_a_training_too_short_to_be_seen() -> None:
    made = ended_before_it_was_seen()
    made.on(seen(at=3.2, ever=[0]), 3.3)
    assert made.code == 0


def test_a_scheduler_that_does_not_answer_at_the_end() -> None:
    made = ended_before_it_was_seen()
    made.on(None, 13.0)
    assert made.code is None
    made.on(None, 13.2)
    assert made.code == 0


def test_what_is_not_back_when_the_others_have_finished_does_not_begin_anew() -> None:
    made = training(3, first_delay=100.0)
    for _ in range(2):  # pipeline 2 fails again before it trains, and waits for its time
        ends(made, 2, 10.0)
    assert Launch(1, 1) in ends(made, 1, 11.0)
    assert Launch not in map(type, ends(made, 2, 11.5))
    assert lines(ends(made, 0, 12.0, 0)) == ["pipeline 2 does not start again: the training is over"]
    late = made.on(seen(at=12.1, ever=[0, 1, 2]), 12.2)
    assert late == [Say("pipeline 1 comes too late: the training is over"), Stop(1, TERM)]
    assert made.on(None, 42.2) == [Stop(1, signal.SIGKILL)]
    assert ends(made, 1, 50.0) == []
    assert made.code == 0


def test_the_last_line_says_what_losses_have_cost() -> None:
    made = training(2)
    ends(made, 1, 10.0)
    made.on(seen(0, at=26.0, lives={1: 7}, update=90), 26.0)
    said = [line for p in (0, 1) for stage in (1, 0) for line in lines(made.on(ProcessEnded(p, stage, 0), 30.0))]
    assert said == ["pipelines were lost 1 time and came back 1 time, after 16.0 s in all"]
    assert made.code == 0


def test_what_trains_when_another_finishes_is_left_alone() -> None:
    made = training(2)
    ends(made, 0, 12.0, 0)
    assert made.on(seen(1, at=12.1), 12.2) == []
    assert made.on(seen(at=12.4), 12.5) == [], "it has left, and tidies up"
    ends(made, 1, 13.0, 0)
    assert made.code == 0


def test_a_process_that_fails_after_the_training() -> None:
    made = training(1)
    made.on(ProcessEnded(0, 1, 0), 12.0)
    said = Say("pipeline 0 failed after the training (stage 0 ended with exit code 3)")
    assert made.on(ProcessEnded(0, 0, 3), 12.1) == [said]
    assert made.code == 1


def test_a_scheduler_that_dies_is_started_again() -> None:
    made = training(restarts=1)
    decisions = made.on(ProcessEnded(None, 0, 1, "the scheduler ended (killed)"), 10.0)
    assert decisions == [Say("the scheduler ended (killed); it starts again"), Launch(None, 1)]
    decisions = made.on(ProcessEnded(None, 0, 1, "the scheduler ended (exit code 2)"), 11.0)
    assert lines(decisions) == [
        "the run ends: the scheduler ended (exit code 2), and its budget of 1 restarts is used up"
    ]


def test_a_run_that_the_scheduler_has_ended() -> None:
    for told in (seen(at=9.0, failure="too few came"), seen(at=9.0, over="too few came")):
        assert lines(training().on(told, 9.0)) == ["the run ends: the scheduler ended it: too few came"]


def test_ctrl_c_once_and_twice() -> None:
    made = training(2)
    ends = [Say("the run ends: Ctrl-C"), Stop(0, signal.SIGINT), Stop(1, signal.SIGINT)]
    assert made.on(SignalReceived(signal.SIGINT), 10.0) == ends
    assert made.on(ProcessEnded(0, 1, 1, BUG), 10.1) == [], "why is of no interest any more"
    assert made.on(SignalReceived(signal.SIGINT), 11.0) == [Stop(0, signal.SIGKILL), Stop(1, signal.SIGKILL)]
    for pipeline, stage in ((0, 0), (1, 1), (1, 0)):
        assert made.code is None
        made.on(ProcessEnded(pipeline, stage, KILLED), 11.0)
    assert made.code == 130
    deaf = training(1)
    deaf.on(SignalReceived(TERM), 10.0)
    assert deaf.on(None, 39.0) == []
    assert deaf.on(None, 40.0) == [Stop(0, signal.SIGKILL)]


@dataclass
class Machine:
    """Processes as far as the rules can tell: what lives, and what has been decided."""

    rules: Rules
    settings: Settings
    now: float = 0.0
    alive: set[tuple[int, int]] = field(default_factory=set)
    launches: dict[int | None, int] = field(default_factory=lambda: {None: 0})
    """Starts after the first one, of each pipeline and of the scheduler (None)."""
    life: int = 0
    trains: dict[int, int] = field(default_factory=dict)
    ever: set[int] = field(default_factory=set)
    lost: list[tuple[int, int]] = field(default_factory=list)

    def is_over(self) -> bool:
        return self.rules.code is not None

    def on(self, event: Event | None) -> None:
        assert not self.is_over(), "nothing happens any more"
        for decision in self.rules.on(event, self.now):
            if isinstance(decision, Launch):
                assert not any(number == decision.pipeline for number, _ in self.alive)
                again = self.launches.get(decision.pipeline, -1) + 1
                assert decision.again == again <= self.settings.restarts
                self.launches[decision.pipeline] = again
                if decision.pipeline is not None:
                    self.alive |= {(decision.pipeline, stage) for stage in range(self.settings.num_stages)}
        assert not (self.is_over() and self.alive)
        assert self.rules.shown is None or any(number == self.rules.shown for number, _ in self.alive)

    def end(self, place: tuple[int, int], code: int, last: str = "") -> None:
        self.alive.discard(place)
        if place[0] in self.trains:
            self.lost.append((place[0], self.trains.pop(place[0])))
        self.on(ProcessEnded(*place, code, last))

    def look(self, failure: str | None = None) -> None:
        told = {
            "lives": {**self.trains},
            "ever": sorted(self.ever),
            "gone": self.lost,
            "reasons": ["x"] * len(self.lost),
        }
        self.on(seen(at=self.now, leader=min(self.trains, default=None), failure=failure, **told))


@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3))
def test_whatever_happens(data: st.DataObject, pipelines: int, stages: int, restarts: int) -> None:
    settings = Settings(pipelines, stages, restarts, data.draw(st.integers(1, pipelines)))
    machine = Machine(Rules(settings), settings)
    machine.on(None)
    for _ in range(data.draw(st.integers(0, 60))):
        if machine.is_over():
            return
        machine.now += data.draw(st.sampled_from([0.0, 0.1, 5.0]))
        kinds = ["end", "end", "join", "look", "tick", "scheduler", "told", "failure"]
        match data.draw(st.sampled_from(kinds[: 6 if data.draw(st.booleans()) else 8])):
            case "end" if machine.alive:
                place = data.draw(st.sampled_from(sorted(machine.alive)))
                code = data.draw(st.sampled_from([0, 0, 1, 1, 3, -9, -15, 143]))
                machine.end(place, code, data.draw(st.sampled_from(["", BUG, FOLLOWS])))
            case "join" if machine.alive:
                number, _ = data.draw(st.sampled_from(sorted(machine.alive)))
                machine.life += 1
                machine.trains[number] = machine.life
                machine.ever.add(number)
                machine.look()
            case "look":
                machine.look()
            case "tick":
                machine.now += data.draw(st.sampled_from([1.0, 30.0]))
                machine.on(None)
            case "scheduler":
                machine.on(ProcessEnded(None, 0, -9))
            case "told":
                machine.on(SignalReceived(signal.SIGTERM))
            case "failure":
                machine.look("too few came")
    if not machine.is_over():  # every run can be ended: by a word, and by force if processes do not listen
        machine.on(SignalReceived(signal.SIGTERM))
        for place in sorted(machine.alive):
            machine.end(place, -9)
    assert machine.is_over()


def test_that_training_goes_on_from_a_checkpoint_is_said_once_for_each_new_start() -> None:
    made, said = rules(1), []
    for now, (life, resumed) in enumerate([(1, None), (2, "1.ckpt"), (2, "1.ckpt"), (3, "1.ckpt")]):
        decided = made.on(seen(at=float(now), lives={0: life}, resumed=resumed), float(now))
        said.append([line for line in lines(decided) if "no pipeline was left" in line])
    line = "no pipeline was left; training continues from 1.ckpt"
    assert said == [[], [line], [], [line]]
