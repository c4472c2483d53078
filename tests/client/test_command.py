"""`skein` as a process: exit codes, one-line errors, and that nothing stays behind."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from client.api import Client
from client.local import LocalFleet, NotStarted, free_port
from skein.wire.process.tether import tethered_arguments
from tests.client.scripted import Script, serving
from tests.support.extent import part

SKEIN = (sys.executable, "-P", "-m", "client.cli")
END_S = 20.0
"""Far above what ending takes; reached only when something stays."""


def skein(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*SKEIN, *arguments], capture_output=True, text=True, check=False)


HEAVY = (
    "numpy",
    "pydantic",
    "cryptography",
    "rich",
    "skein.config.job",
    "skein.plan.plan",
    "skein.wire.views",
)
"""Packages whose imports take most of a client's time."""


@pytest.mark.parametrize("module", ["client.api", "client.cli", "client.cli.job.listing"])
def test_a_list_of_jobs_waits_for_no_import_that_it_does_not_need(module: str) -> None:
    look = f"import sys, {module}; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_list_of_jobs_is_decoded_without_the_job_model() -> None:
    look = (
        "import sys; from client.cli import run; from client.cli.job import listing\n"
        "from skein.wire.v1 import ids_pb2, jobs_pb2\n"
        "row = jobs_pb2.JobStatus(job='a-1', state=ids_pb2.JOB_STATE_RUNNING, loss=1.5)\n"
        "print(*listing.job_row(listing.listed_job(row)))\n"
        f"print(*(name for name in {HEAVY} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["a-1  running 0/0 1.5 - 0 - 0", ""]


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    part([
        (["jobs", "--coordinator", "127.0.0.1:9"], 1, "127.0.0.1:9: nothing listens there: start it, or check "),
        (["worker", "up", "--join", "nowhere"], 2, "join: 'nowhere': give host:port, for example"),
        (["coordinator", "up", "--prt", "1"], 2, "error: No such option '--prt'"),
        (["coordinator", "up", "--port", "0"], 2, "port: 0: give a port between 1 and 65535"),
    ], every=2),
)  # fmt: skip
def test_errors_are_one_line_without_a_trace(arguments: list[str], code: int, error: str) -> None:
    done = skein(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.count("\n") == 1
    assert error in done.stderr


def test_help_loads_nothing_that_it_does_not_need() -> None:
    program = (
        "import sys; from client.cli import run; code = run(['--help']); "
        "heavy = {'grpc', 'pydantic', 'rich', 'numpy', 'torch', 'ray'} & set(sys.modules); "
        "sys.exit(f'loaded {sorted(heavy)}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Run a worker" not in done.stdout
    assert "submit" in done.stdout


@pytest.mark.parametrize("service", part(["coordinator", "worker"], every=2))
def test_help_of_the_services_is_their_own(service: str) -> None:
    done = skein(service, "up", "--help")
    assert done.returncode == 0
    assert "--insecure" in done.stdout


PROGRAMS = [("sim",), ("bench", "wire"), ("bench", "plan"), ("bench", "recovery")]


@pytest.mark.parametrize("arguments", part(PROGRAMS, every=4))
def test_help_of_programs_is_that_of_the_command(arguments: tuple[str, ...]) -> None:
    done = skein(*arguments, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: skein {' '.join(arguments)} ")


@pytest.mark.parametrize(
    ("shell", "file"),
    part([
        ("bash", "share/bash-completion/completions/skein"),
        ("zsh", "share/zsh/site-functions/_skein"),
        ("fish", "config/fish/completions/skein.fish"),
    ], every=3),
)  # fmt: skip
def test_what_completes_commands_is_put_where_the_shell_looks(
    shell: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    assert f"wrote {tmp_path / file}" in skein("completion", "--install").stdout
    assert "_SKEIN_COMPLETE" in (tmp_path / file).read_text()


def test_a_shell_that_cannot_be_completed_in_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/dash")
    done = skein("completion", "--install")
    assert (done.returncode, done.stderr) == (
        2,
        "error: SHELL: 'dash': name the shell: skein completion bash|zsh|fish\n",
    )


def test_bash_completes_what_was_installed(tmp_path: Path) -> None:
    program = tmp_path / "skein"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m client.cli "$@"\n')
    program.chmod(0o755)
    asked = (
        ". <(skein completion bash); COMP_WORDS=(skein chec); COMP_CWORD=1; "
        '_skein_completion skein; echo "${COMPREPLY[@]}"'
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout == "checkpoints\n"


def test_commands_are_completed_without_loading_them() -> None:
    program = (
        "import sys; from client.cli import run; run([]); "
        "sys.exit(f'loaded {sorted(heavy)}' if (heavy := {'grpc', 'pydantic', 'rich'} & set(sys.modules)) else 0)"
    )
    asked = {"_SKEIN_COMPLETE": "bash_complete", "COMP_WORDS": "skein su", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **asked},
    )
    assert done.stdout == "plain,submit\n"
    assert done.stderr == ""


def test_reader_that_stops_reading_is_no_error() -> None:
    with subprocess.Popen(
        [*SKEIN, "job", "schema"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""


# --- processes that must not stay behind ---


def test_tethered_process_ends_when_its_parent_is_killed() -> None:
    program = (
        "import subprocess; from skein.wire.process.tether import tethered_arguments; "
        "child = subprocess.Popen(tethered_arguments('http.server', ['--bind', '127.0.0.1', '0'])); "
        "print(child.pid, flush=True); child.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as parent:
        assert parent.stdout is not None
        # Once the child has become the server, and is tied, it says on the same pipe that it serves.
        said = sorted([parent.stdout.readline(), parent.stdout.readline()])
        assert said[1].startswith("Serving")
        child = psutil.Process(int(said[0]))
        parent.kill()
        child.wait(END_S)


def test_process_whose_parent_is_gone_already_does_not_begin() -> None:
    command = tethered_arguments("http.server", ["0"])
    command[4] = "1"  # the parent
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: process 1 is gone\n")


def test_service_that_ends_early_is_told_with_its_last_words(tmp_path: Path) -> None:
    fleet = LocalFleet(tmp_path / "fleet", num_workers=1)
    with fleet, Client(fleet.target) as client:
        fleet.state.write_text("in the way")
        with pytest.raises(
            NotStarted, match=r"coordinator ended \(exit code 1\): error: state_dir: .*File exists"
        ) as caught:
            fleet.start(client)
        _, process = fleet.started[0]
    assert str(fleet.logs / "coordinator.log") in str(caught.value)
    assert process.returncode == 1
    assert fleet.started == []


def test_port_that_is_taken_is_not_chosen() -> None:
    with serving(Script()) as target:
        port = int(target.rpartition(":")[2])
        assert free_port(port) not in (0, port)
    assert free_port(port) == port
