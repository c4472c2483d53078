import json
from dataclasses import replace
from pathlib import Path

from client.cli import run
from skein.protocol.messages.array_rounds import PassKind
from skein.types import JobId, JobState, WorkerId
from skein.wire.views import TrialStatus
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


def test_a_job_without_trials_is_no_sweep(coordinator: Scripted, capsys: Captured) -> None:
    coordinator.script.jobs["rates-1"] = status("rates-1")
    assert run(["sweep", "rates-1"]) == 2
    assert "job: 'rates-1': is no sweep" in capsys.readouterr().err


def test_a_dry_run_prints_the_arrays(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(SWEEP)
    assert run(["submit", str(file), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "4 trials in 2 arrays on one worker:" in said
    assert "array of trials 2, 3: batch.samples=64 optimizer.learning_rate=0.1; batch" in said


def test_an_export_of_a_sweep_wants_a_trial_that_there_is(
    coordinator: Scripted, capsys: Captured, tmp_path: Path
) -> None:
    coordinator.script.jobs["rates-1"] = replace(status("rates-1"), trials=(trial(0), trial(1)))
    for options, said in (
        ([], "trial: none: rates-1 is a sweep: give a trial, or best"),
        (["--trial", "2"], "trial: 2: give 0 to 1"),
        (["--trial", "first"], "--trial: 'first': give the number of a trial"),
        (["--trial", "best"], "trial: 'best': no trial has a loss yet"),
        (["--trial", "1"], "trial: 1: has not begun"),
    ):
        assert run(["export", "rates-1", "--to", str(tmp_path / "out"), *options]) == 2
        assert said in capsys.readouterr().err
