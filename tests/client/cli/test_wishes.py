"""Pausing, resuming, cancelling, and whatever else changes what is there."""

from dataclasses import replace
from pathlib import Path

import pytest

from client.cli import run
from client.cli.fleet import via_text
from skein.config.resources import parse_labels
from skein.protocol.messages.ways import COORDINATOR_RELAY
from skein.types import JobState, WorkerId
from skein.wire.v1 import jobs_pb2
from skein.wire.views import Ended, StateChanged
from tests.client.cli.said import Captured, lines
from tests.client.conftest import Scripted
from tests.client.scripted import event, link, step_body, worker
from tests.client.test_sdk import assert_exported, keep_checkpoint


def test_measuring_again_shows_what_was_found_and_its_doubt(coordinator: Scripted, capsys: Captured) -> None:
    coordinator.script.workers = [replace(worker(name), measured_age_s=500.0) for name in ("w1", "w2")]
    assert run(["measure"]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["w1", "w2"]
    assert all("30 ± 10%" in row for row in rows)
    assert run(["measure", "w2", "--json"]) == 0
    assert [found["worker"] for found in lines(capsys.readouterr().out)] == ["w2"]


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


def test_workers_and_links_say_by_which_way_they_are_reached(coordinator: Scripted, capsys: Captured) -> None:
    me = WorkerId("w1")
    coordinator.script.workers = [
        replace(worker("w1"), reached_by=(COORDINATOR_RELAY, me, WorkerId("w3"))),
        replace(
            worker("w2"), offers_relay=True, labels=parse_labels(["gpu=h100", "disk=ssd"]), offers=("books",)
        ),
    ]
    assert run(["workers"]) == 0
    out = capsys.readouterr().out
    assert "127.0.0.1:9 (by the coordinator, called back, by w3)" in out
    assert "127.0.0.1:9 (relays)" in out
    assert "attic (disk=ssd, gpu=h100, data://books)" in out
    vias = (None, COORDINATOR_RELAY, me, WorkerId("w3"))
    assert [via_text(replace(link(), via=via)) for via in vias] == [
        "-",
        "the coordinator",
        "called back",
        "w3",
    ]


def test_a_job_is_paused_and_goes_on(coordinator: Scripted, capsys: Captured) -> None:
    assert run(["pause", "first-job-1", "--reason", "lunch"]) == 0
    assert run(["resume", "first-job-1", "--steps", "900"]) == 0
    assert run(["resume", "first-job-1", "--new-data"]) == 0
    assert run(["cancel", "first-job-1", "--discard"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "first-job-1 held",
        "first-job-1 pending",
        "first-job-1 pending",
        "first-job-1 cancelled",
    ]
    assert err == ""
    assert coordinator.script.wishes == [
        jobs_pb2.PauseRequest(job="first-job-1", reason="lunch"),
        jobs_pb2.ResumeRequest(job="first-job-1", steps=900),
        jobs_pb2.ResumeRequest(job="first-job-1", takes_new_data=True),
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


def test_export_writes_where_it_is_told(coordinator: Scripted, tmp_path: Path, capsys: Captured) -> None:
    weights = keep_checkpoint(coordinator.script)
    out = tmp_path / "out"
    assert run(["export", "first-job-1", "--to", str(out), "--max-shard-bytes", "1 GB"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert_exported(out, weights)
    assert run(["export", "first-job-1", "--to", str(tmp_path / "again"), "--json"]) == 0
    [found] = lines(capsys.readouterr().out)
    assert (found["job"], found["version"], found["out"]) == ("first-job-1", 3, str(tmp_path / "again"))
