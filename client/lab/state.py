"""Files of a lab in its folder, so that other commands find it, and can clear up after one that died."""

import hashlib
import json
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from client.lab.network import namespaces
from client.lab.preset import COORDINATOR, Endpoint, Preset
from skein.errors import UserError
from skein.wire.process.state_dir import default_state_dir

Mode = Literal["namespaces", "proxy"]

_STOP_S = 10.0
_POLL_S = 0.05


class LabFile(BaseModel):
    """All that one lab is, written once before it begins.

    Args:
        preset_name: as it was asked for.
        reason: why this mode.
        data_roots: folders that workers read data from.
        door: host:port of the coordinator for commands on this machine.
        metrics_door: likewise of its metrics.
        enrol_port: where the coordinator gives workers their identities.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    preset_name: str
    preset: Preset
    mode: Mode
    reason: str
    seed: int
    endpoints: tuple[Endpoint, ...]
    has_services: bool
    has_closed_homes: bool
    data_roots: tuple[str, ...] = ()
    door: str
    metrics_door: str
    enrol_port: int


class LabFolder:
    """The folder of a lab: a log of each service and `lab.log`, the coordinator's state with the identity of its admin,
    the line by which workers join and their identities, and the folder to which a `checkpoint.url` may lead.

    `prefix` begins the names of this lab's namespaces; no other folder has the same.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()
        self.logs = self.path / "logs"
        self.coordinator_state = self.path / "coordinator"
        self.admin = self.coordinator_state / "authority" / "admin.json"
        self.line = self.path / "line"
        self.worker_state = self.path / "workers"
        self.checkpoints = self.path / "checkpoints"
        self._lab_file = self.path / "lab.json"
        self._processes_file = self.path / "processes"
        digest = hashlib.blake2b(os.fsencode(self.path), digest_size=4).hexdigest()
        self.prefix = f"skein-{digest}-"

    def namespace(self, endpoint: Endpoint) -> str:
        """Namespace of the endpoint's processes."""
        return f"{self.prefix}{endpoint.name}"

    def wan_namespace(self, endpoint: Endpoint) -> str:
        """Namespace of the endpoint's WAN device: behind NAT, its home's."""
        ending = namespaces.HOME_ENDING if endpoint.is_behind_nat else ""
        return f"{self.namespace(endpoint)}{ending}"

    def write(self, lab: LabFile) -> None:
        """Make the folder, for nobody else to read."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.path.chmod(0o700)
        self.logs.mkdir(exist_ok=True)
        self._lab_file.write_text(lab.model_dump_json(indent=1), encoding="utf-8")

    def read(self) -> LabFile | None:
        """The lab of this folder; None if there is none.

        Raises:
            UserError: another release wrote it.
        """
        try:
            return LabFile.model_validate_json(self._lab_file.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise UserError("--dir", str(self.path), f"{self._lab_file.name} is not a lab's") from error

    def note_process(self, process: int) -> None:
        """Write down a process that must not outlive the lab."""
        with self._processes_file.open("a", encoding="ascii") as file:
            file.write(json.dumps([process, psutil.Process(process).create_time()]) + "\n")

    def noted_processes(self) -> list[psutil.Process]:
        """Processes noted that still run; a number that was given to another process since does not count."""
        found = []
        with suppress(FileNotFoundError):
            for line in self._processes_file.read_text(encoding="ascii").splitlines():
                number, created_s = json.loads(line)
                with suppress(psutil.NoSuchProcess):
                    process = psutil.Process(number)
                    if process.create_time() == created_s and runs(process):
                        found.append(process)
        return found

    def has_remains(self) -> bool:
        """A lab runs here, or left something behind."""
        return self._lab_file.exists() or bool(self._remaining() or namespaces.with_prefix(self.prefix))

    def clear(self) -> int:
        """End whatever is left of the lab and remove its namespaces; logs and state stay. How many processes it was.

        Works on what a lab left behind that was killed, too.
        """
        num_ended = end_processes(self._remaining())
        for name in namespaces.with_prefix(self.prefix):
            namespaces.remove(name)
        for path in (self.path / "control.sock", self._processes_file, self._lab_file):
            path.unlink(missing_ok=True)
        return num_ended

    def _remaining(self) -> list[psutil.Process]:
        found = {process.pid: process for process in self.noted_processes()}
        for process in list(found.values()):
            with suppress(psutil.Error):
                found |= {child.pid: child for child in process.children(recursive=True)}
        for name in namespaces.with_prefix(self.prefix):
            for number in namespaces.processes_in(name):
                with suppress(psutil.NoSuchProcess):
                    found[number] = psutil.Process(number)
        found.pop(os.getpid(), None)
        return [found[number] for number in sorted(found)]


def default_folder() -> Path:
    """Folder of a lab when nobody names one: below XDG_STATE_HOME, or the place that stands for it."""
    return default_state_dir("skein-lab")


def end_processes(processes: Sequence[psutil.Process]) -> int:
    """SIGTERM, then SIGKILL to those who take long; how many there were."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)  # a frozen one would not hear the other
                process.send_signal(number)
        until_s = time.monotonic() + _STOP_S
        while any(runs(process) for process in processes) and time.monotonic() < until_s:
            time.sleep(_POLL_S)
    return len(processes)


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended, though its parent may not have noticed yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def coordinator_of(lab: LabFile) -> Endpoint:
    """The coordinator among a lab's endpoints."""
    [found] = (x for x in lab.endpoints if x.name == COORDINATOR)
    return found
