"""What is told of a job's past: logs, incidents, checkpoints."""

import datetime
import json

import pytest

from client.cli import run
from client.cli.job.incidents import COLUMNS
from skein.protocol.log.incident import total
from skein.protocol.log.records import IncidentKind, Remedy
from skein.types import Condition, JobId, JobState, Step
from skein.wire.shown.plain import plain
from skein.wire.views import CheckpointView
from tests.client.cli.said import Captured, lines
from tests.client.conftest import Scripted
from tests.client.scripted import START_S, status, whole_story
from tests.support.incidents import incident, replayed


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


def test_checkpoints_are_deleted_all_or_one(coordinator: Scripted, capsys: Captured) -> None:
    coordinator.script.checkpoints = [seen(version, Condition.WHOLE) for version in (10, 20, 30)]
    assert run(["checkpoints", "delete", "first-job-1", "--version", "20"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["VERSION", "10", "30"]
    assert run(["checkpoints", "delete", "first-job-1"]) == 0
    assert capsys.readouterr().out == "first-job-1 has no checkpoint any more\n"
    assert coordinator.script.checkpoints == []


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
