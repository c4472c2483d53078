"""What goes wrong at the command line: one line, the right exit code, and help."""

from pathlib import Path

import click
import pytest

from client.cli import run
from skein import PROTOCOL_VERSION
from skein.errors import RemoteError, UserError
from tests.client.cli.said import Captured
from tests.client.conftest import Scripted


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
            ["jobs", "--identity", "/nowhere"],
            "identity: '/nowhere': No such file or directory; give a file",
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

    monkeypatch.setattr("client.cli.job.listing.connect_client", break_down)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run(["jobs"]) == 1
    err = capsys.readouterr().err
    [trace] = tmp_path.glob("skein-error-*.log")
    assert err == f"error: ZeroDivisionError: by nought; this is our fault: please report it with {trace}\n"
    assert "break_down" in trace.read_text()


def test_operating_systems_error_is_one_line(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_up() -> None:
        raise OSError(28, "No space left on device", "/disk/file")

    monkeypatch.setattr("client.cli.job.listing.connect_client", fill_up)
    assert run(["jobs"]) == 1
    assert capsys.readouterr().err == "error: /disk/file: No space left on device\n"


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise click.Abort

    monkeypatch.setattr("client.cli.job.listing.connect_client", interrupt)
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
    assert capsys.readouterr().out.endswith(f"(protocol {PROTOCOL_VERSION})\n")
