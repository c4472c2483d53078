"""Everything at a glance: in the terminal, and by a link to the page."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from client.cli import run
from skein.types import JobState
from skein.wire.shown.plain import plain
from skein.wire.views import PageLink, WorkerState
from tests.client.cli.said import Captured
from tests.client.conftest import Scripted
from tests.client.scripted import status, worker


def test_top_shows_jobs_and_workers_with_what_the_queue_waits_for(
    coordinator: Scripted, capsys: Captured
) -> None:
    waits = replace(status("waits-2", state=JobState.PENDING), reason="needs 4 workers, 1 is free")
    coordinator.script.jobs["waits-2"] = waits
    coordinator.script.workers.append(worker("w2", state=WorkerState.IDLE))
    assert run(["top", "--once"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "1 job at work, 1 waiting, 0 held; 2 workers, 1 idle, 0 lost"
    assert told[2].startswith("waits-2")
    assert "needs 4 workers, 1 is free" in told[2]
    assert [line.split()[0] for line in told[-2:]] == ["w1", "w2"]


def test_a_long_story_cuts_itself_and_no_other_column(coordinator: Scripted, capsys: Captured) -> None:
    story = "no trial could be trained; " + "stage 0 needs more memory than any worker has; " * 9
    coordinator.script.jobs["waits-2"] = replace(status("waits-2", state=JobState.PENDING), reason=story)
    assert run(["top", "--once"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[2].split()[:4] == ["waits-2", "first-job", "pending", "2/3"]
    assert told[2].rstrip().endswith("…")
    assert "no trial could be trained" in told[2]


def test_top_gives_programs_what_lists_of_jobs_and_workers_give(
    coordinator: Scripted, capsys: Captured
) -> None:
    assert run(["top", "--once", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    script = coordinator.script
    assert found == {"jobs": plain(list(script.jobs.values())), "workers": plain(script.workers)}


def test_a_name_cannot_speak_to_the_terminal(coordinator: Scripted, capsys: Captured) -> None:
    hostile = replace(status(), name="[red]\x1b[2J\x07", reason="\x1b]0;owned\x07")
    coordinator.script.jobs = {"first-job-1": hostile}
    assert run(["top", "--once"]) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert "[red]?[2J?" in told


def test_there_is_no_authority_to_trust_where_nobody_is_asked(
    coordinator: Scripted, tmp_path: Path, capsys: Captured
) -> None:
    assert run(["page", "--authority", str(tmp_path / "a.pem")]) == 2
    assert "there is none to write: this coordinator asks for no certificates" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("shown", "url", "said"),
    [
        (PageLink(address="127.0.0.1:7412", link="", link_s=300.0), "http://127.0.0.1:7412/", ""),
        (PageLink(address="[::1]:7412", link="x", link_s=300.0), "http://[::1]:7412/login?link=x", ""),
        (
            PageLink(address="0.0.0.0:7412", link="x", link_s=300.0, is_encrypted=True),
            "https://127.0.0.1:7412/login?link=x",
            "a browser warns until it trusts this cluster's authority: skein page --authority FILE writes the one to "
            "import there\n",
        ),
    ],
)
def test_a_link_leads_to_where_the_coordinator_is_reached(
    shown: PageLink, url: str, said: str, coordinator: Scripted, capsys: Captured
) -> None:
    coordinator.script.page = shown
    assert run(["page"]) == 0
    assert capsys.readouterr() == (f"{url}\n", said)
    assert run(["page", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"url": url}
