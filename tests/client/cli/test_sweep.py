import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from client.cli import run
from client.cli.job.sweeping import SweepLines, follow_sweep
from client.exporting.card import model_card, trained
from skein.config.load import parse_job
from skein.protocol.messages.array_rounds import PassKind
from skein.sim.shapes import shape_of
from skein.types import JobId, JobState, Step, WorkerId
from skein.wire.extra import ManifestReply
from skein.wire.views import ChoiceStatus, JobStatus, SavedRow, TrialStatus
from tests.client.cli.said import Captured
from tests.client.conftest import Scripted
from tests.client.scripted import status
from tests.support.sweeps import RATES

SWEEP = f"{RATES}  space: {{optimizer.learning_rate: [0.1, 0.01], batch.samples: [32, 64]}}\n"


def trial(number: int) -> TrialStatus:
    return TrialStatus(
        trial=number,
        settings=json.dumps({"optimizer.learning_rate": 0.1**number}),
        state=JobState.RUNNING,
        reason="",
        num_steps=10,
        num_steps_wanted=50,
        loss=0.5,
        evaluation_loss=None,
    )


def test_trials_are_listed_with_settings_worker_and_pass(coordinator: Scripted, capsys: Captured) -> None:
    first = replace(
        trial(0),
        workers=(WorkerId("w1"),),
        array=JobId("rates-1-a1"),
        pass_kind=PassKind.FUSED,
        speedup=2.5,
        is_best=True,
    )
    coordinator.script.jobs["rates-1"] = replace(status("rates-1"), trials=(first, trial(1)))

    assert run(["sweep", "rates-1"]) == 0

    _, one, other = capsys.readouterr().out.splitlines()
    assert one.split()[:7] == ["0*", "running", "10/50", "0.5", "-", "w1", "rates-1-a1"]
    assert "fused, 2.5 times" in one
    assert "optimizer.learning_rate=1 " in one
    assert other.split()[:7] == ["1", "running", "10/50", "0.5", "-", "-", "-"]


def test_choices_of_trials_are_listed_where_there_are_any(coordinator: Scripted, capsys: Captured) -> None:
    choice = ChoiceStatus(
        version=Step(8),
        num_picks=58,
        num_rows=144,
        num_set_aside=0,
        num_by_chance=12,
        largest_weight=3.0,
        seconds=0.1,
        overhead=None,
        next_version=None,
    )
    trials = (replace(trial(0), choice=choice), trial(1))
    coordinator.script.jobs["rates-1"] = replace(status("rates-1"), trials=trials)

    assert run(["sweep", "rates-1"]) == 0

    head, one, other = capsys.readouterr().out.splitlines()
    assert "CHOSEN" in head
    assert "58 of 144 from step 8, 12 by chance" in one
    assert "from step" not in other


def test_a_job_without_trials_is_no_sweep(coordinator: Scripted, capsys: Captured) -> None:
    coordinator.script.jobs["rates-1"] = status("rates-1")
    assert run(["sweep", "rates-1"]) == 2
    assert "job: 'rates-1': is no sweep" in capsys.readouterr().err


def test_a_dry_run_prints_the_arrays(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(SWEEP)
    assert run(["submit", str(file), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "4 trials in 2 arrays on one worker, and in more on several:" in said
    assert "array 2:\n  trial 2: batch.samples=64 optimizer.learning_rate=0.1\n  trial 3: batch" in said


def of_trials(*states: JobState, state: JobState = JobState.RUNNING, step: int = 10) -> JobStatus:
    trials = tuple(
        replace(trial(number), state=of, reason="loss not finite" if of is JobState.FAILED else "")
        for number, of in enumerate(states)
    )
    reason = f"{len(trials)} trials: so many trained"
    return replace(status("rates-1", state=state, step=step), total_steps=100, reason=reason, trials=trials)


def test_waiting_for_a_sweep_tells_of_steps_and_of_trials_that_are_retired() -> None:
    good, bad = JobState.RUNNING, JobState.FAILED
    looks = iter(
        [
            of_trials(good, good, state=JobState.PENDING, step=0),
            of_trials(good, good),
            of_trials(good, bad, step=20),
            of_trials(bad, bad, bad, step=30),
            of_trials(bad, bad, bad, state=JobState.FINISHED, step=40),
        ]
    )
    text, now = StringIO(), [0.0]
    view = SweepLines(Console(file=text, width=200), now=lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += 3 * seconds

    assert follow_sweep(lambda: next(looks), view, wait=wait).state is JobState.FINISHED
    assert text.getvalue().splitlines() == [
        "pending: 2 trials: so many trained",
        "step 10/100  best 2.5  1.23k/s  eta 0:45",
        "running: 2 trials: so many trained",
        "trial 1 is retired: loss not finite",
        "step 30/100  best 2.5  1.23k/s  eta 0:35",
        "trials 0, 2 are retired: loss not finite",
        "step 40/100  best 2.5  1.23k/s  eta 0:30",
        "finished: 3 trials: so many trained",
    ]


@pytest.mark.parametrize(
    ("state", "code"), [(JobState.FINISHED, 0), (JobState.FAILED, 1), (JobState.CANCELLED, 1)]
)
def test_waiting_for_a_sweep_ends_as_it_does(
    coordinator: Scripted, tmp_path: Path, capsys: Captured, state: JobState, code: int
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(SWEEP)
    coordinator.script.jobs["rates-1"] = of_trials(JobState.FINISHED, JobState.FAILED, state=state)
    assert run(["submit", str(file), "--wait"]) == code
    out, err = capsys.readouterr()
    assert out == "rates-1\n"
    assert "step 10/100  best 2.5" in err
    assert "trial 1 is retired: loss not finite" in err
    end = "error: job rates-1 failed" if state is JobState.FAILED else str(state)
    assert err.splitlines()[-1] == f"{end}: 2 trials: so many trained"


def test_a_sweep_has_no_curve_and_its_status_no_plan(coordinator: Scripted, capsys: Captured) -> None:
    found = of_trials(JobState.RUNNING, JobState.RUNNING)
    first, second = found.trials
    arrayed = replace(found, trials=(replace(first, array=JobId("rates-1-a1")), second))
    coordinator.script.jobs["rates-1"] = arrayed
    assert run(["curve", "rates-1"]) == 2
    said = capsys.readouterr().err
    assert said == "error: job: 'rates-1': is a sweep, whose arrays have curves: give one of rates-1-a1\n"
    assert run(["status", "rates-1"]) == 0
    told = capsys.readouterr().out
    assert "trials     2: skein sweep rates-1" in told
    assert "plan  " not in told


def test_an_export_of_a_sweep_wants_a_trial_that_there_is(
    coordinator: Scripted, capsys: Captured, tmp_path: Path
) -> None:
    saved = SavedRow(array=JobId("rates-1-a1"), version=Step(3), row=2, num_steps=12)
    in_another = replace(trial(2), array=JobId("rates-1-a2"), saved=saved)
    unsaved = replace(trial(3), array=JobId("rates-1-a3"))
    trials = (trial(0), trial(1), in_another, unsaved)
    coordinator.script.jobs["rates-1"] = replace(status("rates-1"), trials=trials)
    for options, said in (
        ([], "trial: none: rates-1 is a sweep: give a trial, or best"),
        (["--trial", "4"], "trial: 4: give 0 to 3"),
        (["--trial", "first"], "--trial: 'first': give the number of a trial"),
        (["--trial", "best"], "trial: 'best': no trial has a loss yet"),
        (["--trial", "1"], "trial: 1: has not begun"),
        (["--trial", "3"], "trial: 3: has no checkpoint yet: the first round of rates-1-a3 ends with one"),
    ):
        assert run(["export", "rates-1", "--to", str(tmp_path / "out"), *options]) == 2
        assert said in capsys.readouterr().err
    # This coordinator has no checkpoint at all, and says of which array it was asked.
    assert run(["export", "rates-1", "--to", str(tmp_path / "out"), "--trial", "2"]) == 1
    assert "checkpoint: 'rates-1-a1': it has none yet" in capsys.readouterr().err


def test_an_array_is_exported_by_its_sweep(coordinator: Scripted, capsys: Captured, tmp_path: Path) -> None:
    spec = shape_of("line 1x1 array 3").job(steps=40).canonical_json()
    coordinator.script.jobs["rates-1-a1"] = replace(status("rates-1-a1"), spec=spec)
    assert run(["export", "rates-1-a1", "--to", str(tmp_path / "out")]) == 2
    assert "job: 'rates-1-a1': is an array of trials: give its sweep" in capsys.readouterr().err
    assert run(["sweep", "rates-1-a1"]) == 2
    assert "job: 'rates-1-a1': is an array: give its sweep" in capsys.readouterr().err


def test_the_card_of_a_trial_tells_its_own_steps_and_losses() -> None:
    manifest = ManifestReply(
        job=JobId("rates-1-a1"), version=Step(8), spec="", url=None, stages=(), wall_s=0.0
    )
    saved = SavedRow(array=manifest.job, version=manifest.version, row=2, num_steps=48)
    told = replace(trial(3), num_steps=50, saved=saved)
    job = parse_job(SWEEP, origin="job")

    def card(told: TrialStatus) -> str:
        course = trained(manifest, replace(status("rates-1"), total_steps=200), told)
        return model_card(manifest, job, course, dtype="float32", has_tokenizer=False)

    assert "after 48 of 50 steps, trial 3 of rates-1, trained by" in card(told)
    assert "| loss |" not in card(told)
    assert "| loss | 0.5 nats per sample |" in card(replace(told, num_steps=48))
    assert "after 8 rounds of rates-1-a1, trial 3" in card(replace(told, saved=None))
