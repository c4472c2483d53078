"""How far a job is, from its events, and how that is told."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from client.cli.job.follow import LINE_S, BarView, JobProgress, LineView, follow_events, view_for
from client.cli.show import event_text, timed
from skein.protocol.messages.directives import Decision
from skein.types import Generation, JobState, Step, WorkerId
from skein.wire.extra import LogLevel
from skein.wire.views import (
    CheckpointFinished,
    Ended,
    EpochsCounted,
    GenerationBegun,
    IncidentEnded,
    JobEvent,
    StateChanged,
    StepFinished,
    WentBack,
)
from tests.client.scripted import TOKENS_PER_STEP, event, line_body, step_body, whole_story
from tests.support.incidents import incident, replayed


def console(*, is_terminal: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=is_terminal, width=200, _environ={"TERM": "xterm"}), out


def steps(first: int, stop: int) -> list[JobEvent]:
    return [event(number, step_body(number)) for number in range(first, stop)]


def progress_after(events: list[JobEvent]) -> JobProgress:
    return follow_events(events, None, total_steps=10)


def test_steps_losses_tokens_and_state_add_up() -> None:
    progress = progress_after(whole_story())
    assert (progress.step, progress.loss, progress.evaluation_loss) == (3, 1.0, 1.25)
    assert progress.num_tokens == 3 * TOKENS_PER_STEP
    assert (progress.state, progress.eta_s) == (JobState.FINISHED, 0.0)
    assert progress.end == whole_story()[-1].body


def test_steps_that_were_lost_are_taken_back() -> None:
    back = event(9, WentBack(from_version=Step(5), to_version=Step(2), reason="the last holder died"))
    progress = progress_after([*steps(0, 5), back, *steps(2, 4)])
    assert (progress.step, progress.num_tokens) == (4, 4 * TOKENS_PER_STEP)


def test_time_to_the_end_follows_from_the_pace() -> None:
    assert progress_after(steps(0, 4)).eta_s == pytest.approx(6 * 0.5)


def test_elsewhere_steps_are_lines_now_and_then_and_news_at_once() -> None:
    out_console, out = console()
    clock = iter([0.0, LINE_S - 1, LINE_S])
    lines = LineView(out_console, now=lambda: next(clock))
    follow_events(whole_story(), lines, total_steps=10)
    assert out.getvalue().splitlines() == [
        "pending: submitted",
        "step 1/10  loss 3  validation -  tokens 100  tokens/s 200  eta 0:04",
        "step 3/10  loss 1  validation -  tokens 300  tokens/s 200  eta 0:04",
        "step 3  validation loss 1.25",
        "finished: as told",
    ]


def test_an_incident_is_news_where_progress_is_shown() -> None:
    story = [*steps(0, 1), event(2, IncidentEnded(incident=incident()))]
    for is_terminal in (False, True):
        out_console, out = console(is_terminal=is_terminal)
        follow_events(story, view_for(out_console), total_steps=3)
        assert "incident in step 41: worker_lost w3" in out.getvalue()


def test_last_step_is_always_told() -> None:
    out_console, out = console()
    follow_events(steps(0, 3), LineView(out_console, now=lambda: 0.0), total_steps=3)
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["1/3", "3/3"]


def test_warnings_of_workers_are_news_and_their_chatter_is_not() -> None:
    out_console, out = console()
    events = [event(1, line_body("hm")), event(1, line_body("[oh]", level=LogLevel.WARNING))]
    follow_events(events, LineView(out_console), total_steps=3)
    assert out.getvalue() == "w1  WARNING  [oh]\n"


LACKING = "data.sources[0].path: '/data/books': no such file or folder on this worker: give a path that all can read"


def tries(first: int) -> list[JobEvent]:
    """Both workers of a job lack its data, one after the other; then the job waits, and tries again later."""
    workers = (WorkerId("w1"), WorkerId("w2"))
    wait = f"nobody can use what the job names: w2: {LACKING}"
    return [
        event(
            first, GenerationBegun(generation=Generation(first), workers=workers, reason="workers gathered")
        ),
        event(first, line_body(f"build failed: {LACKING}", level=LogLevel.WARNING)),
        event(
            first + 1,
            GenerationBegun(generation=Generation(first + 1), workers=workers, reason=f"w1: {LACKING}"),
        ),
        event(first + 2, StateChanged(state=JobState.PLANNING, reason=f"w1: {LACKING}")),
        event(first + 3, StateChanged(state=JobState.PAUSED, reason=wait)),
    ]


def test_a_reason_is_told_once_until_it_changes_or_the_job_gets_further() -> None:
    out_console, out = console()
    other = event(20, StateChanged(state=JobState.PAUSED, reason="too few workers"))
    follow_events([*tries(1), *tries(5), other, *tries(9)], LineView(out_console), total_steps=3)
    assert out.getvalue().splitlines() == [
        "generation 1: w1, w2 (workers gathered)",
        f"w1  WARNING  build failed: {LACKING}",
        "generation 2: w1, w2 (w1: ... (as before))",
        "planning: w1: ... (as before)",
        "paused: nobody can use what the job names: w2: ... (as before)",
        "paused: too few workers",
    ]
    out_console, out = console()
    follow_events([*tries(1), *steps(0, 1), *tries(5)], LineView(out_console), total_steps=3)
    assert out.getvalue().count("generation 5") == 1


def test_terminal_gets_a_bar() -> None:
    out_console, out = console(is_terminal=True)
    shown = view_for(out_console)
    assert isinstance(shown, BarView)
    follow_events(whole_story(), shown, total_steps=3)
    last = out.getvalue().rpartition("finished")[2]
    for part in ("3/3", "loss 1/1.25", "300 tokens  200/s", "eta 0:00"):
        assert part in last
    assert "pending: submitted" in out.getvalue()


def test_terminal_that_cannot_go_back_gets_lines() -> None:
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(view_for(dumb), LineView)


def skipped(body: StepFinished) -> StepFinished:
    return replace(body, record=replace(body.record, decision=Decision.SKIP, reason="not finite"))


def balanced(body: StepFinished, *, drop_ratio: float = 0.0) -> StepFinished:
    return replace(body, record=replace(body.record, balance_loss=1.25, drop_ratio=drop_ratio))


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (event(1, step_body(0)), "step 1  loss 2  norm 1.5  tokens/s 200"),
        (event(1, balanced(step_body(0))), "step 1  loss 2  norm 1.5  balance 1.25  tokens/s 200"),
        (
            event(1, balanced(step_body(0), drop_ratio=0.125)),
            "step 1  loss 2  norm 1.5  balance 1.25  dropped 0.12  tokens/s 200",
        ),
        (event(1, skipped(step_body(0))), "step 1  loss 2  norm 1.5  tokens/s 200  skipped: not finite"),
        (event(1, CheckpointFinished(version=Step(4), url=None)), "step 4  checkpoint at the coordinator"),
        (event(1, CheckpointFinished(version=Step(4), url="s3://b")), "step 4  checkpoint at s3://b"),
        (
            event(
                1, GenerationBegun(generation=Generation(2), workers=(WorkerId("w1"),), reason="w2 is lost")
            ),
            "generation 2: w1 (w2 is lost)",
        ),
        (
            event(1, WentBack(from_version=Step(5), to_version=Step(2), reason="nobody left")),
            "went back from step 5 to 2: nobody left",
        ),
        (
            event(1, IncidentEnded(incident=incident(replayed=(replayed(1, 2, 3),)))),
            "incident in step 41: worker_lost w3 (stream broke, silent 0.30 s): resumed after 0.62 s "
            "(fence 0.41 s), 4 hops rerouted, replayed stage 1: 2-3; 0 steps lost, 8 samples repeated",
        ),
        (event(1, Ended(state=JobState.FAILED, reason="no data")), "failed: no data"),
        (event(1, line_body("hello")), "w1  INFO  hello"),
    ],
)
def test_every_event_is_a_line(told: JobEvent, text: str) -> None:
    assert event_text(told) == text
    assert timed(told).endswith(f"  {text}")


def test_what_epochs_were_is_forgotten_where_the_budget_is_another_by_now() -> None:
    counted = event(2, EpochsCounted(num_train_samples=80, num_steps=10))
    assert follow_events([counted], None, total_steps=100).total_steps == 10
    assert follow_events([], None, total_steps=100, told=[counted]).total_steps == 100
