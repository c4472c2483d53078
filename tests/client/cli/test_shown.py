"""Jobs as they are now: lists and pages."""

import time
from dataclasses import replace

from client.cli import run
from skein.config.quota import QuotaUse
from skein.plan.changing.redundancy import LeftOut, Shortfall
from skein.protocol.coordinator.runs.incidents import OpenIncident
from skein.protocol.coordinator.runs.workers.probation import Exclusion, ExclusionCause
from skein.protocol.log.records import IncidentKind
from skein.types import JobId, JobState, StageIndex, Step, WorkerId
from skein.wire.shown.plain import plain
from tests.client.cli.said import Captured, lines
from tests.client.conftest import Scripted
from tests.client.scripted import status
from tests.coordinator.builders import job_spec


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


def test_status_names_the_rule(capsys: Captured) -> None:
    assert run(["status", "first-job-1"]) == 0
    [told] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rule")]
    # One replica, but its two stages share the embedding's matrix: 256 x 128 numbers, sent once by each.
    assert told == "rule       all_reduce: each worker sends 128.0 KiB a step, as much as all-reduce in fp32"


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
    coordinator.script.num_known = 3
    assert run(["workers"]) == 0
    assert capsys.readouterr().out.startswith("none connected, 3 known from before: ")


def test_status_is_complete(capsys: Captured) -> None:
    assert run(["status", "first-job-1"]) == 0
    out = capsys.readouterr().out
    for part in ("running", "2 of 3", "two stages", "planned 0.4 s", "no plan below 0.3 s", "generation 1"):
        assert part in out
    assert run(["status", "first-job-1", "--json"]) == 0
    assert lines(capsys.readouterr().out)[0]["total_steps"] == 3


def test_status_counts_samples_where_a_job_has_no_tokens(coordinator: Scripted, capsys: Captured) -> None:
    coordinator.script.jobs["first-job-1"] = replace(status(), spec=job_spec().canonical_json())
    assert run(["status", "first-job-1"]) == 0
    out = capsys.readouterr().out
    assert "(nats per sample)" in out
    assert [line.split()[0] for line in out.splitlines() if "per second" in line] == ["samples"]


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


def test_quotas_of_a_jobs_namespace_are_shown(coordinator: Scripted, capsys: Captured) -> None:
    [name] = coordinator.script.jobs
    uses = (
        QuotaUse(quota="workers", used=2, most=4),
        QuotaUse(quota="stored_bytes", used=1 << 30, most=4 << 30),
    )
    coordinator.script.jobs[name] = replace(coordinator.script.jobs[name], quotas=uses, namespace="lab")
    shown = "lab: workers 2 of 4, stored_bytes 1.0 GiB of 4.0 GiB"
    assert run(["queue"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"quotas of {shown}"
    assert run(["status", name]) == 0
    assert f"quotas     {shown}" in capsys.readouterr().out
    assert run(["status", name, "--json"]) == 0
    [found] = lines(capsys.readouterr().out)
    assert found["quotas"] == plain(uses)


def test_the_queue_tells_whose_turn_it_is_and_what_the_others_wait_for(
    coordinator: Scripted, capsys: Captured
) -> None:
    [name] = coordinator.script.jobs
    at_work = coordinator.script.jobs[name]
    waiting = replace(
        at_work,
        job=JobId("second-2"),
        state=JobState.PENDING,
        num_workers=0,
        waiting_since_wall_s=time.time() - 65.0,
        priority=3,
        reason="waiting for first-job-1",
    )
    over = replace(at_work, job=JobId("over-3"), state=JobState.FINISHED)
    coordinator.script.jobs |= {waiting.job: waiting, over.job: over}
    assert run(["queue"]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["JOB", "PRIORITY", "STATE", "WORKERS", "WAITING", "WHY"]
    assert first.split()[:5] == ["second-2", "3", "pending", "0", "1:05"]
    assert first.endswith("waiting for first-job-1")
    assert second.split() == ["first-job-1", "0", "running", "2", "-"]
    assert run(["queue", "--json"]) == 0
    assert [found["job"] for found in lines(capsys.readouterr().out)] == ["second-2", "first-job-1"]


def test_status_names_excluded_workers_and_a_failure_that_lasts(
    coordinator: Scripted, capsys: Captured
) -> None:
    exclusions = (
        Exclusion(worker=WorkerId("w0"), cause=ExclusionCause.LINK, reason="w1 cannot reach it: silent"),
    )
    lasting = OpenIncident(
        kind=IncidentKind.LINK_FAILED,
        workers=(WorkerId("w2"),),
        reason="w2 came back on a new stream",
        step=Step(3),
        wall_s=0.0,
    )
    [name] = coordinator.script.jobs
    coordinator.script.jobs[name] = replace(
        coordinator.script.jobs[name], exclusions=exclusions, open_incident=lasting
    )
    since = time.strftime("%H:%M:%S", time.localtime(0.0))
    words = f"link_failed w2 (w2 came back on a new stream) since {since}"
    assert run(["status", name]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "excluded   w0 (link: w1 cannot reach it: silent)" in told
    assert f"failure    {words}" in told
    assert run(["incidents", name]) == 0
    assert f"not over yet: {words}" in capsys.readouterr().out.splitlines()
    assert run(["incidents", name, "--json"]) == 0
    [shown] = lines(capsys.readouterr().out)
    assert shown["open"] == {
        "kind": "link_failed",
        "workers": ["w2"],
        "reason": "w2 came back on a new stream",
        "step": 3,
        "wall_s": 0.0,
    }
