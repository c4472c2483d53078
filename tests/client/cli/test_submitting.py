"""Handing a job in: what is sent, what is said, and waiting for its end."""

import json
from pathlib import Path

import pytest

from client.cli import run
from skein.types import JobState
from tests.client.cli.said import Captured, lines
from tests.client.conftest import Scripted
from tests.client.scripted import whole_story, worker


def test_submit_prints_the_id_alone(coordinator: Scripted, job_file: Path, capsys: Captured) -> None:
    assert run(["submit", str(job_file), "--set", "budget.steps=9", "--name", "second"]) == 0
    assert capsys.readouterr() == ("second-1\n", "")
    [spec] = coordinator.script.specs
    assert (spec.name, spec.total_steps) == ("second", 9)


REPLICAS = ("--set", "parallel.replicas=2", "--set", "parallel.stages=1")
COST = "all_reduce: each worker sends 3.6 MiB a step, as much as all-reduce in fp32"


def test_submit_says_what_aggregation_costs_on_the_workers_there_are(
    coordinator: Scripted, job_file: Path, capsys: Captured
) -> None:
    coordinator.script.workers = [worker("w1"), worker("w2")]
    assert run(["submit", str(job_file), *REPLICAS]) == 0
    # 3.6 MiB at 1 MiB/s and twice 12.5 ms.
    assert capsys.readouterr() == ("first-job-1\n", f"{COST}, about 3.67 s if nothing overlaps\n")


def test_submit_warns_of_what_a_death_costs_where_workers_are_too_few(
    coordinator: Scripted, job_file: Path, capsys: Captured
) -> None:
    assert len(coordinator.script.workers) == 1
    assert run(["submit", str(job_file), *REPLICAS, "--set", "checkpoint.every_steps=2"]) == 0
    warning = "warning: stage 0 has 1 holder of 2 asked: a death costs up to 2 steps"
    assert capsys.readouterr() == ("first-job-1\n", f"{warning}\n{COST}\n")


def test_submit_warns_where_no_worker_is_there(
    coordinator: Scripted, job_file: Path, capsys: Captured
) -> None:
    coordinator.script.workers = []
    assert run(["submit", str(job_file), "--json"]) == 0
    assert capsys.readouterr().err == "warning: the job waits: no worker is alive\n"


def test_checking_a_job_says_what_aggregation_costs(job_file: Path, capsys: Captured) -> None:
    assert run(["job", "check", str(job_file), *REPLICAS]) == 0
    text, cost = capsys.readouterr().out.splitlines()
    assert text.startswith("first-job: llama")
    assert cost == COST


def test_submit_under_a_key_gives_the_same_job(job_file: Path, capsys: Captured) -> None:
    for _ in range(2):
        assert run(["submit", str(job_file), "--key", "monday", "--json"]) == 0
    found = lines(capsys.readouterr().out)
    assert found == [{"job": "first-job-1", "is_new": True}, {"job": "first-job-1", "is_new": False}]


def test_dry_run_asks_nobody(coordinator: Scripted, job_file: Path, capsys: Captured) -> None:
    assert run(["submit", str(job_file), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "first-job: llama with 956k parameters, 2 stages x 1 replica (line), 3 steps of 32 samples"
    )
    assert coordinator.script.keys == []


@pytest.mark.parametrize(
    ("state", "code", "end"),
    [
        (JobState.FINISHED, 0, "finished: as told"),
        (JobState.FAILED, 1, "error: job first-job-1 failed: as told"),
        (JobState.CANCELLED, 1, "cancelled: as told"),
    ],
)
def test_waiting_shows_progress_and_ends_as_the_job_does(
    coordinator: Scripted, job_file: Path, capsys: Captured, state: JobState, code: int, end: str
) -> None:
    coordinator.script.story = whole_story(state)
    assert run(["submit", str(job_file), "--wait"]) == code
    out, err = capsys.readouterr()
    assert out == "first-job-1\n"
    assert "step 3/3  loss 1" in err
    assert err.splitlines()[-1] == end


def test_waiting_in_json_is_one_event_per_line(job_file: Path, capsys: Captured) -> None:
    assert run(["submit", str(job_file), "--wait", "--json"]) == 0
    out, err = capsys.readouterr()
    first, *events = lines(out)
    assert first["job"] == "first-job-1"
    assert [event["event"] for event in events] == [
        "state_changed",
        "step_finished",
        "step_finished",
        "line_logged",
        "step_finished",
        "evaluation_finished",
        "ended",
    ]
    assert err == ""


def test_interrupted_wait_leaves_the_job_alone(
    coordinator: Scripted, job_file: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("client.cli.job.follow.LineView.show", interrupt)
    assert run(["submit", str(job_file), "--wait"]) == 130
    assert capsys.readouterr().err == "detached; the job goes on: skein logs -f first-job-1\n"
    assert coordinator.script.jobs["first-job-1"].state is not JobState.CANCELLED


def test_a_job_may_begin_from_another(coordinator: Scripted, job_file: Path) -> None:
    for origin in ((), ("--from", "demo-1"), ("--from", "demo-1@30")):
        assert run(["submit", str(job_file), *origin]) == 0
    assert coordinator.script.begun_from == [("", 0), ("demo-1", 0), ("demo-1", 30)]


def test_a_version_that_is_none_is_refused(job_file: Path, capsys: Captured) -> None:
    assert run(["submit", str(job_file), "--from", "demo-1@last"]) == 2
    expected = "error: --from: 'demo-1@last': give JOB or JOB@VERSION, such as demo-1@30\n"
    assert capsys.readouterr().err == expected


def test_job_check_and_schema(job_file: Path, capsys: Captured) -> None:
    assert run(["job", "check", str(job_file)]) == 0
    assert run(["job", "check", str(job_file), "--json"]) == 0
    text, spec = capsys.readouterr().out.splitlines()
    assert text.startswith("first-job: llama")
    assert json.loads(spec)["budget"]["steps"] == 3
    assert run(["job", "schema"]) == 0
    assert "budget" in json.loads(capsys.readouterr().out)["required"]
