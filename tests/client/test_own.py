"""What stands in the way of Skein's own packages is named in one line, before any of it runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from client.doctor.finding import Verdict
from client.doctor.installation import packages
from skein.own import NAMES, PackageFault, package_faults
from tests.contract.source import ROOT

SHOUT = "print('I run'); raise RuntimeError('never')\n"


def skein(*arguments: str, path: tuple[Path, ...]) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-P", "-m", "skein", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("name", NAMES)
def test_a_module_of_the_same_name_is_named_and_not_run(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(SHOUT)
    # The interpreter finds the other one first, whichever way Skein is installed.
    done = skein("--version", path=(tmp_path, ROOT))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {name}: {tmp_path}/{name}.py is found before Skein's own {ROOT}")
    assert "PYTHONPATH" in done.stderr
    assert "pipx" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_package_that_was_written_over_is_named(tmp_path: Path) -> None:
    site = tmp_path / "site"
    for name in ("skein", "client"):
        shutil.copytree(ROOT / name, site / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("coordinator", "worker"):
        (site / name).mkdir()
        shutil.copy(ROOT / name / "__init__.py", site / name)
    assert skein("--version", path=(site,)).returncode == 0
    (site / "worker" / "__init__.py").write_text('"""Workers for a queue."""\n' + SHOUT)
    done = skein("jobs", path=(site,))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"worker: {site}/worker/__init__.py is not Skein's any more" in done.stderr
    shutil.rmtree(site / "coordinator")
    assert f"coordinator: is not in {site}" in skein("jobs", path=(site,)).stderr


def test_everything_is_our_own_here() -> None:
    assert list(package_faults()) == []


def test_doctor_tells_what_stands_in_the_way_and_who_else_has_the_name() -> None:
    [fine] = packages([], {"client": ["skein-train"], "worker": ["skein-train"]})
    assert fine.verdict is Verdict.OK
    found = list(
        packages(
            [PackageFault(name="client", found="/x/client.py is found before ours", cure="rename it")],
            {"worker": ["skein-train", "some-queue"]},
        )
    )
    assert [(one.check, one.verdict) for one in found] == [
        ("client", Verdict.FAILED),
        ("worker", Verdict.WARNING),
    ]
    assert "some-queue has one too" in found[1].found
