"""docs/tutorial.md does what it says: its commands run on three machines of a lab, in order, as they stand.

Left out are those that install and copy, for a lab's machines share their disk. Names of machines become addresses.
"""

import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from client.lab.network import namespaces
from client.lab.start import LabOptions, RunningLab, start_lab, stop_lab
from client.lab.state import LabFolder, end_processes
from tests.contract.source import ROOT

PAGE = ROOT / "docs" / "tutorial.md"
BLOCK = re.compile(r"<!-- on: (.*?)(, and leave it running)? -->\n```bash\n(.*?)```", re.S)
MACHINES = {"first": "coordinator", "second": "north-1", "third": "south-1"}
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Block:
    """Commands for some machines, which may go on while others run."""

    machines: tuple[str, ...]
    stays: bool
    text: str


def blocks() -> list[Block]:
    return [
        Block(machines=tuple(on.split(", ")), stays=bool(stays), text=text)
        for on, stays, text in BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    ]


def test_each_block_of_commands_says_where_it_runs() -> None:
    assert len(blocks()) == PAGE.read_text(encoding="utf-8").count("```bash")
    assert {machine for block in blocks() for machine in block.machines} == {*MACHINES, "nobody"}


@pytest.mark.long
def test_the_tutorial_trains_on_three_machines(tmp_path: Path) -> None:
    if namespaces.why_not() is not None:
        return
    work, folder = tmp_path / "work", LabFolder(tmp_path / "lab")
    work.mkdir()
    _ = _program(tmp_path)
    options = LabOptions(preset="two-sites", num_workers=2, mode="namespaces", has_services=False)
    with ExitStack() as undo:
        undo.callback(stop_lab, folder)
        lab = start_lab(folder, options)
        for block in blocks():
            for machine in block.machines:
                if machine in MACHINES:
                    _run(lab, block, machine, work, undo)
    assert (work / "model" / "model.safetensors").exists()


def _program(folder: Path) -> Path:
    """`skein`, for the shells of this test."""
    program = folder / "bin" / "skein"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m client.cli "$@"\n')
    program.chmod(0o755)
    return program


def _run(lab: RunningLab, block: Block, machine: str, work: Path, undo: ExitStack) -> None:
    address_by_name = {x.name: x.address for x in lab.status.endpoints}
    text = block.text.replace("/srv/skein", str(work))
    for name, endpoint in MACHINES.items():
        text = re.sub(rf"\b{name}:(?=\d)", f"{address_by_name[endpoint]}:", text)
    [space] = (x.namespace for x in lab.status.endpoints if x.name == MACHINES[machine])
    command = ["ip", "netns", "exec", str(space), "bash", "-euc", text]
    log = work.parent / f"{machine}.log"
    environment = {
        **os.environ,
        "PATH": f"{work.parent / 'bin'}:{os.environ['PATH']}",
        "HOME": str(work.parent),
    }
    with log.open("ab") as out:
        process = subprocess.Popen(command, cwd=work, stdout=out, stderr=subprocess.STDOUT, env=environment)
    if block.stays:
        undo.callback(end_processes, [psutil.Process(process.pid)])
        _wait_until_it_listens(space, process, log)
        return
    code = process.wait(PATIENCE_S)
    assert code == 0, f"{machine}: {block.text}\n{log.read_text(encoding='utf-8', errors='replace')[-3000:]}"


def _wait_until_it_listens(space: str | None, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Until a service listens at its port, as who reads its log would see."""
    until_s = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < until_s:
        shown = subprocess.run(
            ["ip", "netns", "exec", str(space), "ss", "-Hltn"], capture_output=True, text=True, check=True
        )
        if re.search(r"\*:7411|0\.0\.0\.0:(7411|7500)|\*:7500", shown.stdout):
            return
        time.sleep(0.2)
    pytest.fail(log.read_text(encoding="utf-8", errors="replace")[-3000:])
