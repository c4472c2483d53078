"""Devices of a worker, as its operator names them, and as no other mesh on this machine has them."""

import fcntl
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from skein.config.mesh.tensor import MOST_DEVICES
from skein.errors import UserError

_FORM = re.compile(r"(cpu)(?::([1-9]\d{0,8}))?|(cuda):(\d{1,9})", re.ASCII)
_HINT = "give cuda:0,cuda:1 or so, or cpu:2 for two processes on the processors"


def parse_devices(text: str) -> tuple[str, ...]:
    """Device of each process.

    Raises:
        UserError: the devices are unlike, too many, or no devices.

    >>> parse_devices("cpu:2"), parse_devices("cuda:0,cuda:2"), parse_devices("cpu")
    (('cpu', 'cpu'), ('cuda:0', 'cuda:2'), ('cpu',))
    """
    found: list[str] = []
    for part in map(str.strip, text.split(",")):
        form = _FORM.fullmatch(part)
        if form is None:
            raise UserError("devices", part, f"no device of torch's: {_HINT}")
        num_more = 1 if form[3] else int(form[2] or 1)
        if len(found) + num_more > MOST_DEVICES:
            raise UserError("devices", text, f"too many for one mesh: give at most {MOST_DEVICES}")
        found += [f"cuda:{int(form[4])}"] if form[3] else ["cpu"] * num_more
    if len({device.partition(":")[0] for device in found}) > 1:
        raise UserError("devices", text, f"devices that share each layer must be alike: {_HINT}")
    if len(set(found)) < len(found) and found[0] != "cpu":
        raise UserError("devices", text, f"a device is named twice: {_HINT}")
    return tuple(found)


@contextmanager
def claimed(devices: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Have these GPUs until the end of the block, or of the process; processors may be several meshes'.

    A GPU is known by what CUDA_VISIBLE_DEVICES calls it. Only meshes of one user, who has `folder`, know of each other.

    Raises:
        UserError: another mesh has one of them.
        OSError: nothing can be written there.
    """
    with ExitStack() as stack:
        for device in devices:
            if device.startswith("cuda:"):
                stack.callback(os.close, _claim(device, folder, environment))
        yield


def _claim(device: str, folder: Path, environment: Mapping[str, str]) -> int:
    number = device.partition(":")[2]
    visible = [x.strip() for x in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if x.strip()]
    known = visible[int(number)] if int(number) < len(visible) else number
    name = re.sub(r"[^A-Za-z0-9-]", "-", known)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        hint = f"the mesh of process {holder} on this machine has it: end that first, or name another"
        raise UserError("devices", device, hint) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock
