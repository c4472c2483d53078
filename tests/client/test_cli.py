"""`skein` in this process: what each verb prints, to whom, and with which exit code."""

import datetime
import json
from dataclasses import replace
from pathlib import Path

import click
import pytest

from client.cli import run
from client.cli.doctor import Finding, Verdict, clock_skew, free_space, open_files
from client.cli.incidents import COLUMNS
from client.cli.show import plain
from skein.errors import RemoteError, UserError
from skein.plan.redundancy import LeftOut, Shortfall
from skein.protocol.incident import total
from skein.protocol.records import IncidentKind, Remedy
from skein.types import Condition, JobId, JobState, StageIndex, Step, WorkerId
from skein.wire.v1 import jobs_pb2
from skein.wire.views import CheckpointView, Ended, StateChanged
from tests.client.conftest import Scripted
from tests.client.scripted import (
    GOOD,
    START_S,
    Script,
    event,
    serving,
    status,
    step_body,
    whole_story,
    worker,
)
from tests.client.test_sdk import assert_exported, keep_checkpoint
from tests.support.incidents import incident, replayed

Captured = pytest.CaptureFixture[str]
TOKEN = "correct-horse-battery"


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(GOOD)
    return path


@pytest.fixture(autouse=True)
def at_coordinator(coordinator: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKEIN_COORDINATOR", coordinator.target)


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


# --- verbs ---


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


def test_status_names_stages_with_fewer_holders_than_asked(coordinator: Scripted, capsys: Captured) -> None:
    short = Shortfall(
        stage=StageIndex(1),
        num_holders=1,
        num_asked=2,
        num_steps=20,
        left_out=(LeftOut(worker=WorkerId("w2"), missing_bytes=3 * 2**20),),
    )
    [name] = coordinator.script.jobs
    coordinator.script.jobs[name] = replace(coordinator.script.jobs[name], shortfalls=(short,))
    assert run(["status", name]) == 0
    [told] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("holders")]
    assert told == (
        "holders    stage 1 has 1 holder of 2 asked (w2 lacks 3.0 MiB of memory): a death costs up to 20 steps"
    )
    assert run(["status", name, "--json"]) == 0
    assert lines(capsys.readouterr().out)[0]["shortfalls"] == [
        {
            "stage": 1,
            "num_holders": 1,
            "num_asked": 2,
            "num_steps": 20,
            "left_out": [{"worker": "w2", "missing_bytes": 3 * 2**20}],
        }
    ]


def test_checking_a_job_says_what_aggregation_costs(job_file: Path, capsys: Captured) -> None:
    assert run(["job", "check", str(job_file), *REPLICAS]) == 0
    text, cost = capsys.readouterr().out.splitlines()
    assert text.startswith("first-job: llama")
    assert cost == COST


@pytest.mark.usefixtures("coordinator")
def test_status_names_the_rule(capsys: Captured) -> None:
    assert run(["status", "first-job-1"]) == 0
    [told] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rule")]
    # One replica, but its two stages share the embedding's matrix: 256 x 128 numbers, sent once by each.
    assert told == "rule       all_reduce: each worker sends 128.0 KiB a step, as much as all-reduce in fp32"


def test_submit_under_a_key_gives_the_same_job(job_file: Path, capsys: Captured) -> None:
    for _ in range(2):
        assert run(["submit", str(job_file), "--key", "monday", "--json"]) == 0
    found = lines(capsys.readouterr().out)
    assert found == [{"job": "first-job-1", "is_new": True}, {"job": "first-job-1", "is_new": False}]


def test_dry_run_asks_nobody(coordinator: Scripted, job_file: Path, capsys: Captured) -> None:
    assert run(["submit", str(job_file), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "first-job: llama with 956k parameters, 2 stages x 1 replicas (line), 3 steps of 32 samples"
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

    monkeypatch.setattr("client.cli.follow.LineView.show", interrupt)
    assert run(["submit", str(job_file), "--wait"]) == 130
    assert capsys.readouterr().err == "detached; the job goes on: skein logs -f first-job-1\n"
    assert coordinator.script.jobs["first-job-1"].state is not JobState.CANCELLED


def test_jobs_are_a_table_or_lines_of_json(capsys: Captured) -> None:
    assert run(["jobs"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "JOB",
        "NAME",
        "STATE",
        "STEP",
        "LOSS",
        "VALIDATION",
        "TOKENS/S",
        "ETA",
        "WORKERS",
    ]
    assert row.split() == ["first-job-1", "first-job", "running", "2/3", "2.5", "-", "1.23k", "0:00", "2"]
    assert run(["jobs", "--json"]) == 0
    [found] = lines(capsys.readouterr().out)
    assert (found["job"], found["state"], found["evaluation_loss"]) == ("first-job-1", "running", None)
    assert isinstance(found["spec"], dict)


def test_nothing_in_a_list_says_what_to_do(coordinator: Scripted, capsys: Captured) -> None:
    coordinator.script.jobs.clear()
    coordinator.script.workers.clear()
    assert run(["jobs"]) == run(["workers"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "no jobs yet: skein submit FILE",
        "no workers yet: skein worker up --join HOST:PORT",
    ]


def test_status_is_complete(capsys: Captured) -> None:
    assert run(["status", "first-job-1"]) == 0
    out = capsys.readouterr().out
    for part in ("running", "2 of 3", "two stages", "planned 0.4 s", "no plan below 0.3 s", "generation 1"):
        assert part in out
    assert run(["status", "first-job-1", "--json"]) == 0
    assert lines(capsys.readouterr().out)[0]["total_steps"] == 3


def test_status_points_to_incidents(coordinator: Scripted, capsys: Captured) -> None:
    assert run(["status", "first-job-1"]) == 0
    coordinator.script.jobs["first-job-1"] = replace(status(), num_incidents=3, num_steps_lost=1)
    assert run(["status", "first-job-1"]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("incidents")]
    assert told == ["incidents  -", "incidents  3, 1 step lost: skein incidents first-job-1"]


def test_status_tells_what_an_epoch_is_and_what_ends_documents(
    coordinator: Scripted, capsys: Captured
) -> None:
    [name] = coordinator.script.jobs
    for num_samples in (0, 1000):
        coordinator.script.jobs[name] = replace(status(), num_train_samples=num_samples)
        assert run(["status", name]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("data")]
    ends = "documents end with NUL (token 0)"
    assert told == [f"data       {ends}", f"data       an epoch is 1,000 samples, 32 steps; {ends}"]


def test_status_shows_planned_beside_measured(capsys: Captured) -> None:
    assert run(["status", "first-job-1"]) == 0
    out = capsys.readouterr().out
    assert "median 0.6 s" in out
    rows = [line.split() for line in out.partition("CHUNK OR LINK")[2].splitlines()[1:]]
    assert rows == [
        ["step", "400", "ms", "600", "ms", "+50%"],
        ["stage", "0", "on", "w1", "forward", "100", "ms", "125", "ms", "+25%"],
        ["stage", "0", "on", "w1", "backward", "200", "ms", "200", "ms", "+0%"],
        ["stage", "1", "on", "w2", "forward", "100", "ms", "-", "-"],
        ["stage", "1", "on", "w2", "backward", "100", "ms", "-", "-"],
        ["w1", "->", "w2", "transfer", "2.50", "s", "5.00", "s", "+100%"],
    ]
    assert run(["status", "first-job-1", "--json"]) == 0
    [told] = lines(capsys.readouterr().out)
    assert told["measured_step_s"] == 0.6
    assert told["chunk_times"] == plain(status().chunk_times)
    assert told["transfer_times"] == plain(status().transfer_times)


def test_logs_tell_the_story(coordinator: Scripted, capsys: Captured) -> None:
    assert run(["logs", "first-job-1", "-f"]) == 0
    told = [line.partition("  ")[2] for line in capsys.readouterr().out.splitlines()]
    assert told == [
        "pending: submitted",
        "step 1  loss 3  norm 1.5  tokens/s 200",
        "step 2  loss 2  norm 1.5  tokens/s 200",
        "w1  INFO  all is well",
        "step 3  loss 1  norm 1.5  tokens/s 200",
        "step 3  validation loss 1.25",
        "finished: as told",
    ]
    coordinator.script.jobs["first-job-1"] = status(state=JobState.FINISHED, step=3)
    assert run(["logs", "first-job-1", "--json"]) == 0
    assert len(lines(capsys.readouterr().out)) == len(whole_story())


def test_logs_can_begin_late(coordinator: Scripted, capsys: Captured) -> None:
    coordinator.script.jobs["first-job-1"] = status(state=JobState.FINISHED, step=3)

    def told(*options: str) -> list[str]:
        assert run(["logs", "first-job-1", *options]) == 0
        return [line.partition("  ")[2] for line in capsys.readouterr().out.splitlines()]

    whole = told()
    assert told("--tail", "0") == []
    assert told("--tail", "2") == whole[-2:]
    assert told("--tail", "99", "-f") == told("-f") == whole
    # The story is of 2023.
    assert told("--since", "1 h") == []
    instant = datetime.datetime.fromtimestamp(START_S + 5).isoformat()
    assert told("--since", instant) == whole[-2:]
    assert told("--since", instant, "--tail", "1") == whole[-1:]
    assert run(["logs", "first-job-1", "--since", "yesteryear"]) == 2
    assert "--since: 'yesteryear': give how long ago" in capsys.readouterr().err


@pytest.mark.parametrize("tail", [0, 2, 99])
def test_following_logs_tells_each_event_once(tail: int, coordinator: Scripted, capsys: Captured) -> None:
    # Of a job that runs: what is known, then what comes, across a stream that breaks.
    coordinator.script.break_after = [5, 1]
    assert run(["logs", "first-job-1", "-f", "--json", "--tail", str(tail)]) == 0
    keys = [(told["sequence"], told["line_number"]) for told in lines(capsys.readouterr().out)]
    wanted = [event.key for event in whole_story()]
    assert keys == wanted[len(wanted) - min(tail, len(wanted)) :]


def seen(version: int, condition: Condition, reason: str = "") -> CheckpointView:
    return CheckpointView(
        job=JobId("first-job-1"),
        version=Step(version),
        url=None,
        num_files=4,
        num_bytes=3 << 20,
        wall_s=START_S,
        condition=condition,
        reason=reason,
    )


def test_checkpoints_are_listed_and_verified_one_by_one(coordinator: Scripted, capsys: Captured) -> None:
    coordinator.script.checkpoints = [seen(10, Condition.WHOLE), seen(20, Condition.WHOLE)]
    assert run(["checkpoints", "list", "first-job-1"]) == 0
    assert coordinator.script.verified == []
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split()[0] == "10"
    assert second.split()[3:] == ["4", "3.0", "MiB", "whole", "coordinator", "-"]
    assert run(["checkpoints", "verify", "first-job-1"]) == 0
    assert coordinator.script.verified == [10, 20]


def test_a_damaged_checkpoint_makes_verify_fail_and_says_why(coordinator: Scripted, capsys: Captured) -> None:
    damaged = seen(20, Condition.DAMAGED, "stage-000 is not there")
    coordinator.script.checkpoints = [seen(10, Condition.WHOLE), damaged]
    assert run(["checkpoints", "verify", "first-job-1", "--version", "10"]) == 0
    capsys.readouterr()
    assert run(["checkpoints", "verify", "first-job-1", "--json"]) == 1
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["version"], one["condition"], one["reason"]) for one in told] == [
        (10, "whole", ""),
        (20, "damaged", "stage-000 is not there"),
    ]


def test_incidents_are_a_table_with_totals(coordinator: Scripted, capsys: Captured) -> None:
    coordinator.script.incidents = [
        incident(seconds=2.0, remedy=Remedy.RETRIED, num_retried=8, reason=""),
        incident(kind=IncidentKind.STALLED, workers=(), silent_s=0.0, num_steps_lost=3),
        incident(replayed=(replayed(1, 2, 5), replayed(2, 2, 3)), seconds=0.25, reason="stream\nbroke"),
    ]
    assert run(["incidents", "first-job-1", "--limit", "2"]) == 0
    head, first, second, gap, *totals = capsys.readouterr().out.splitlines()
    assert tuple(head.split()) == COLUMNS
    tail = ["620", "ms", "4", "-", "0", "3", "8", "stream", "broke"]
    assert first.split()[2:] == ["41", "stalled", "-", "resumed", "-", "410", "ms", *tail]
    cells = [second[head.index(name) :].partition("  ")[0] for name in COLUMNS]
    assert cells[1:5] == ["41", "worker_lost", "w3", "resumed"]
    assert cells[5:] == ["300 ms", "410 ms", "250 ms", "4", "1: 2, 5; 2: 2-3", "0", "0", "8", "stream broke"]
    assert gap == ""
    assert totals == [
        "incidents  3 (2 worker_lost, 1 stalled), the newest 2 listed",
        "remedies   2 resumed, 1 retried",
        "steps      3 lost",
        "samples    24 repeated",
        "work       12 hops rerouted, 4 contributions replayed, 8 microbatches begun anew",
        "time       2.87 s in all, half within 620 ms, 99 % within 2.00 s",
    ]


def test_totals_of_incidents_may_be_had_alone(coordinator: Scripted, capsys: Captured) -> None:
    coordinator.script.incidents = [incident()] * 3
    assert run(["incidents", "first-job-1", "--limit", "0"]) == 0
    assert capsys.readouterr().out.startswith("incidents  3 (3 worker_lost), the newest 0 listed\n")


def test_a_job_without_incidents_says_so(capsys: Captured) -> None:
    assert run(["incidents", "first-job-1"]) == 0
    assert capsys.readouterr().out == "no incidents in first-job-1\n"


def test_incidents_in_json_are_one_object(coordinator: Scripted, capsys: Captured) -> None:
    coordinator.script.incidents = [incident(seconds=1.0), incident(seconds=3.0, wall_s=70.0)]
    assert run(["incidents", "first-job-1", "--limit", "1", "--json"]) == 0
    [found] = lines(capsys.readouterr().out)
    assert found["job"] == "first-job-1"
    assert found["incidents"] == [plain(incident(seconds=3.0, wall_s=70.0))]
    assert found["totals"] == plain(total([incident(seconds=1.0), incident(seconds=3.0)]))


def test_measuring_again_shows_what_was_found_and_its_doubt(coordinator: Scripted, capsys: Captured) -> None:
    coordinator.script.workers = [replace(worker(name), measured_age_s=500.0) for name in ("w1", "w2")]
    assert run(["measure"]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["w1", "w2"]
    assert all("30 ± 10%" in row for row in rows)
    assert run(["measure", "w2", "--json"]) == 0
    assert [found["worker"] for found in lines(capsys.readouterr().out)] == ["w2"]


def test_a_job_without_a_step_has_no_speed(coordinator: Scripted, capsys: Captured) -> None:
    [(name, now)] = coordinator.script.jobs.items()
    coordinator.script.jobs[name] = replace(now, step_s=0.0, measured_step_s=None, predicted_step_s=0.0)
    assert run(["status", name]) == 0
    assert "s a step" not in capsys.readouterr().out


def test_a_prediction_that_is_far_off_is_told_instead_of_how_good_the_plan_is(
    coordinator: Scripted, capsys: Captured
) -> None:
    [(name, now)] = coordinator.script.jobs.items()
    off = replace(now, predicted_step_s=2.42e-3, measured_step_s=1.59, predicted_spread=0.4)
    coordinator.script.jobs[name] = off
    assert run(["status", name]) == 0
    out = capsys.readouterr().out
    assert "planned 0.00242 s ± 40% by first measurements: off by 657 times" in out
    assert "no plan below" not in out
    [row] = [line for line in out.splitlines() if line.startswith("step ")]
    assert row.split()[-2:] == ["657", "times"]


def test_workers_links_drain_and_cancel(capsys: Captured) -> None:
    assert run(["workers"]) == run(["links"]) == run(["drain", "w1"]) == run(["cancel", "first-job-1"]) == 0
    out = capsys.readouterr().out
    assert (
        "w1      working  attic  127.0.0.1:9  cpu     50       8.0 GiB  first-job-1  0       0.2 s ago" in out
    )
    assert "w1    w2  12.50 ms  1.0 MiB/s" in out
    assert out.splitlines()[-2:] == ["w1 draining", "first-job-1 cancelled"]
    for verb in (["workers"], ["links"], ["drain", "w1"], ["cancel", "first-job-1"]):
        assert run([*verb, "--json"]) == 0
        assert lines(capsys.readouterr().out)


def test_a_job_is_paused_and_goes_on(coordinator: Scripted, capsys: Captured) -> None:
    assert run(["pause", "first-job-1", "--reason", "lunch"]) == 0
    assert run(["resume", "first-job-1", "--steps", "900"]) == 0
    assert run(["cancel", "first-job-1", "--discard"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == ["first-job-1 held", "first-job-1 pending", "first-job-1 cancelled"]
    assert err == ""
    assert coordinator.script.wishes == [
        jobs_pb2.PauseRequest(job="first-job-1", reason="lunch"),
        jobs_pb2.ResumeRequest(job="first-job-1", steps=900),
        jobs_pb2.CancelRequest(job="first-job-1", discards=True),
    ]
    for verb in ("pause", "resume"):
        assert run([verb, "first-job-1", "--json"]) == 0
        assert lines(capsys.readouterr().out)


def test_waiting_for_a_resumed_job_shows_what_is_new(coordinator: Scripted, capsys: Captured) -> None:
    coordinator.script.sequel = [
        event(7, StateChanged(state=JobState.PENDING, reason="resumed")),
        event(8, step_body(3)),
        event(9, Ended(state=JobState.FINISHED, reason="done")),
    ]
    assert run(["resume", "first-job-1", "--wait"]) == 0
    out, err = capsys.readouterr()
    assert out == "first-job-1 pending\n"
    pending, step, end = err.splitlines()
    assert (pending, end) == ("pending: resumed", "finished: done")
    assert "step 4/3" in step
    assert "tokens 400" in step  # with those of the steps before


@pytest.mark.parametrize("verb", ["pause", "cancel"])
def test_pausing_and_cancelling_wait_or_do_not_as_told(verb: str, capsys: Captured) -> None:
    for option in ("--wait", "--no-wait"):
        assert run([verb, "first-job-1", option]) == 0
    assert capsys.readouterr().err == ""


def test_a_job_may_begin_from_another(coordinator: Scripted, job_file: Path) -> None:
    for origin in ((), ("--from", "demo-1"), ("--from", "demo-1@30")):
        assert run(["submit", str(job_file), *origin]) == 0
    assert coordinator.script.begun_from == [("", 0), ("demo-1", 0), ("demo-1", 30)]


def test_a_version_that_is_none_is_refused(job_file: Path, capsys: Captured) -> None:
    assert run(["submit", str(job_file), "--from", "demo-1@last"]) == 2
    expected = "error: --from: 'demo-1@last': give JOB or JOB@VERSION, such as demo-1@30\n"
    assert capsys.readouterr().err == expected


def test_export_writes_where_it_is_told(coordinator: Scripted, tmp_path: Path, capsys: Captured) -> None:
    weights = keep_checkpoint(coordinator.script)
    out = tmp_path / "out"
    assert run(["export", "first-job-1", "--to", str(out), "--max-shard-bytes", "1 GB"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert_exported(out, weights)
    assert run(["export", "first-job-1", "--to", str(tmp_path / "again"), "--json"]) == 0
    [found] = lines(capsys.readouterr().out)
    assert (found["job"], found["version"], found["out"]) == ("first-job-1", 3, str(tmp_path / "again"))


def test_job_check_and_schema(job_file: Path, capsys: Captured) -> None:
    assert run(["job", "check", str(job_file)]) == 0
    assert run(["job", "check", str(job_file), "--json"]) == 0
    text, spec = capsys.readouterr().out.splitlines()
    assert text.startswith("first-job: llama")
    assert json.loads(spec)["budget"]["steps"] == 3
    assert run(["job", "schema"]) == 0
    assert "budget" in json.loads(capsys.readouterr().out)["required"]


def test_token_file_is_used(job_file: Path, tmp_path: Path, capsys: Captured) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    with serving(Script(), token=TOKEN) as target:
        assert run(["jobs", "--coordinator", target, "--token-file", str(token_file)]) == 0
        assert run(["jobs", "--coordinator", target]) == 1
    assert "the token is missing or wrong" in capsys.readouterr().err


# --- what goes wrong ---


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["sumbit", "job.yaml"], "no such command: sumbit; did you mean submit? (see skein --help)"),
        (["xyz"], "no such command: xyz; give one of demo, coordinator, worker, submit, "),
        (["worker", "upp"], "no such command: upp; did you mean up? (see skein worker --help)"),
        (["submit"], "Missing argument 'FILE' (see skein submit --help)"),
        (["jobs", "--jsn"], "No such option '--jsn'"),
        (["jobs", "--coordinator", "x"], "coordinator: 'x': give host:port"),
        (["jobs", "--timeout", "soon"], "--timeout: 'soon': give a duration such as '10 s'"),
        (
            ["jobs", "--token-file", "/nowhere"],
            "token_file: '/nowhere': No such file or directory; give a file",
        ),
        (
            ["submit", "/nowhere.yaml"],
            "job file: '/nowhere.yaml': No such file or directory; give a job file",
        ),
        (
            ["export", "first-job-1", "--to", "/tmp", "--max-shard-bytes", "big"],
            "--max-shard-bytes: 'big': give a size",
        ),
        (
            ["export", "first-job-1", "--to", "/tmp"],
            "--to: '/tmp': exists already; name a new or empty folder",
        ),
        (["demo", "--dir", "/tmp"], "--dir: '/tmp': exists already; name a new or empty folder"),
    ],
)
def test_usage_error_is_one_line_and_2(arguments: list[str], error: str, capsys: Captured) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"error: {error}")


def test_each_mistake_in_a_job_file_is_a_line(job_file: Path, capsys: Captured) -> None:
    assert run(["submit", str(job_file), "--set", "seed=-1", "--set", "precision=fp8"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(":")[:2] for line in err.splitlines()] == [["error", " precision"], ["error", " seed"]]


@pytest.mark.parametrize(
    "verb", [["status"], ["logs"], ["logs", "-f"], ["incidents"], ["cancel"], ["pause"], ["resume"]]
)
def test_unknown_job_is_one_line_and_1(verb: list[str], capsys: Captured) -> None:
    assert run([*verb, "nobody"]) == 1
    assert capsys.readouterr() == ("", "error: job: 'nobody': no such job\n")


@pytest.mark.parametrize(
    ("refusal", "text"),
    [
        (UserError("key", "monday", "has another job"), "error: key: 'monday': has another job\n"),
        (RemoteError("it is confused"), "it is confused"),
    ],
)
def test_refusal_of_the_coordinator_is_one_line_and_1(
    coordinator: Scripted, job_file: Path, capsys: Captured, refusal: UserError | RemoteError, text: str
) -> None:
    coordinator.script.error = refusal
    assert run(["submit", str(job_file)]) == 1
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1


def test_error_of_our_own_is_one_line_and_its_trace_is_in_a_file(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down() -> None:
        raise ZeroDivisionError("by nought")

    monkeypatch.setattr("client.cli.jobs.connect", break_down)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run(["jobs"]) == 1
    err = capsys.readouterr().err
    [trace] = tmp_path.glob("skein-error-*.log")
    assert err == f"error: ZeroDivisionError: by nought; this is our fault: please report it with {trace}\n"
    assert "break_down" in trace.read_text()


def test_operating_systems_error_is_one_line(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_up() -> None:
        raise OSError(28, "No space left on device", "/disk/file")

    monkeypatch.setattr("client.cli.jobs.connect", fill_up)
    assert run(["jobs"]) == 1
    assert capsys.readouterr().err == "error: /disk/file: No space left on device\n"


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise click.Abort

    monkeypatch.setattr("client.cli.jobs.connect", interrupt)
    assert run(["jobs"]) == 130


def test_nothing_at_all_shows_the_help(capsys: Captured) -> None:
    assert run([]) == 2
    assert capsys.readouterr().err.startswith("Usage: skein [OPTIONS] COMMAND")


@pytest.mark.parametrize("verbs", [[], ["job"], ["jobs"], ["job", "check"]])
def test_help_has_a_short_name_everywhere(verbs: list[str], capsys: Captured) -> None:
    assert run([*verbs, "-h"]) == 0
    assert "-h, --help" in capsys.readouterr().out


def test_version_names_the_protocol(capsys: Captured) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.endswith("(protocol 4)\n")


# --- doctor ---


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes seconds to load, and is looked at in a test of its own."""
    finding = Finding(check="torch", verdict=Verdict.OK, found="not looked at")
    monkeypatch.setattr("client.cli.doctor._torch", lambda: finding)


def test_doctor_looks_at_the_coordinator_and_its_workers(coordinator: Scripted, capsys: Captured) -> None:
    with serving(Script()) as address:
        coordinator.script.workers = [worker(address=address)]
        code = run(["doctor", "--json", "--metrics-port", "1"])
    verdict_by_check = {str(found["check"]): found["verdict"] for found in lines(capsys.readouterr().out)}
    assert verdict_by_check["coordinator"] == verdict_by_check["workers"] == "ok"
    assert verdict_by_check["torch"] == "ok"
    assert verdict_by_check["clock"] == "warning"
    assert code == 0


@pytest.mark.usefixtures("no_torch")
def test_doctor_fails_where_a_worker_cannot_be_reached(capsys: Captured) -> None:
    assert run(["doctor", "--metrics-port", "1"]) == 1
    assert (
        "failed   workers      w1 cannot be reached at 127.0.0.1:9 from here: open its port"
        in capsys.readouterr().out
    )


@pytest.mark.usefixtures("no_torch")
def test_doctor_fails_where_the_named_coordinator_is_silent(capsys: Captured) -> None:
    assert run(["doctor", "--coordinator", "127.0.0.1:9"]) == 1
    assert "failed   coordinator  no answer: 127.0.0.1:9: nothing listens there" in capsys.readouterr().out


def test_few_open_files_are_worth_a_warning() -> None:
    assert open_files(1024).verdict is Verdict.WARNING
    assert open_files(65536).verdict is Verdict.OK


def test_full_disk_is_worth_a_warning(tmp_path: Path) -> None:
    assert free_space("disk", tmp_path / "not" / "there", 1, "free some").verdict is Verdict.OK
    found = free_space("disk", tmp_path, 1 << 60, "free some")
    assert (found.verdict, found.cure) == (Verdict.WARNING, "free some (1048576.0 TiB or more)")


@pytest.mark.parametrize(
    ("their_s", "verdict"),
    [(100.0, "ok"), (99.0, "ok"), (102.0, "ok"), (98.0, "ok"), (90.0, "warning"), (104.0, "warning")],
)
def test_clock_is_compared_to_what_whole_seconds_allow(their_s: float, verdict: str) -> None:
    assert clock_skew(100.2, their_s, 100.3).verdict == verdict
