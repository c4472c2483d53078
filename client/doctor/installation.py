"""Checks of what is installed: whose packages these are, Python, Ray, torch with its devices, open files."""

import importlib.util
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import packages_distributions

import skein
from client.doctor.finding import DoctorFinding, doubtful, fine, wrong
from skein.own import NAMES, PackageFault, install_hint, package_faults

MIN_FILES = 4096
_TORCH_S, _DRIVER_S = 60.0, 10.0
_TORCH = (
    "import json, torch; print(json.dumps([torch.__version__, torch.version.cuda, torch.get_num_threads(), "
    "[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]]))"
)
_DISTRIBUTION = "skein-train"


def look_at_installation(role: str | None) -> Iterator[DoctorFinding]:
    """Findings on all of it.

    Args:
        role: client, worker or coordinator, if this machine is to be one only; others' needs are passed over then.
    """
    yield fine("skein", f"release {skein.__version__}, protocol {skein.PROTOCOL_VERSION}")
    yield from packages(package_faults(), packages_distributions())
    yield fine("python", f"{'.'.join(map(str, sys.version_info[:3]))}, {os.cpu_count()} cores")
    if role in (None, "coordinator"):
        yield _ray(is_needed=role is not None)
        # The hard limit: services raise their own to it.
        yield open_files_finding(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    if role in (None, "worker"):
        yield from _torch(is_needed=role is not None)


def packages(found: Iterable[PackageFault], owners: Mapping[str, Sequence[str]]) -> Iterator[DoctorFinding]:
    """Whether the packages that Skein imports are its own, and whether others use their names.

    Args:
        found: what stands in their place.
        owners: distributions by the top-level names that they have.
    """
    whole = list(found)
    for fault in whole:
        yield wrong(fault.name, fault.found, fault.cure)
    others = {name: sorted({*owners.get(name, ())} - {_DISTRIBUTION}) for name in NAMES}
    for name, rivals in others.items():
        if rivals:
            cure = "whichever is installed last writes over the other: give Skein an environment of its own (pipx)"
            yield doubtful(name, f"{', '.join(rivals)} has one too", cure)
    if not whole and not any(others.values()):
        yield fine("packages", f"{', '.join(NAMES)} are Skein's own")


def _ray(*, is_needed: bool) -> DoctorFinding:
    if importlib.util.find_spec("ray") is not None:
        return fine("ray", "installed")
    return _missing("ray", "coordinator", is_needed=is_needed)


def _missing(package: str, role: str, *, is_needed: bool) -> DoctorFinding:
    if is_needed:
        return wrong(package, "not installed", f"a {role} needs it: {install_hint(role)}")
    return doubtful(package, "not installed", f"fine unless a {role} shall run here: {install_hint(role)}")


def _torch(*, is_needed: bool) -> Iterator[DoctorFinding]:
    """Findings on torch, which is asked in a process of its own (a client does without it), and on its devices."""
    if importlib.util.find_spec("torch") is None:
        yield _missing("torch", "worker", is_needed=is_needed)
        return
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _TORCH], capture_output=True, text=True, check=True, timeout=_TORCH_S
        )
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip().splitlines() or [f"exit code {error.returncode}"]
        yield wrong("torch", f"does not load ({said[-1]})", "install it anew, for this machine's device")
        return
    except subprocess.TimeoutExpired:
        cure = "see whether this disk is slow, or a driver hangs: nvidia-smi"
        yield wrong("torch", f"has not loaded after {_TORCH_S:.0f} s", cure)
        return
    version, cuda, num_threads, devices = json.loads(done.stdout)
    yield fine("torch", version)
    yield devices_finding(devices, num_threads, cuda=cuda, driver=_driver())


def devices_finding(
    devices: Sequence[str], num_threads: int, *, cuda: str | None, driver: str | None
) -> DoctorFinding:
    """Whether torch sees the devices that this machine has.

    Args:
        devices: names of those that torch sees.
        num_threads: that it takes on the CPU.
        cuda: version that torch was built for; None: for CPUs.
        driver: line of NVIDIA's driver about its devices; None: there is none.
    """
    if devices:
        return fine("devices", f"{', '.join(devices)} ({driver or 'driver not asked'})")
    if driver is None:
        return fine("devices", f"CPU with {num_threads} threads")
    found = f"torch sees no GPU, but the driver has {driver}"
    if cuda is None:
        cure = "this torch was built for CPUs: install one for CUDA, or go on with the CPU"
        return doubtful("devices", found, cure)
    cure = f"it was built for CUDA {cuda}: a newer driver, or a torch for an older CUDA; see CUDA_VISIBLE_DEVICES too"
    return doubtful("devices", found, cure)


def _driver() -> str | None:
    """First line of NVIDIA's driver about its devices."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=_DRIVER_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)


def open_files_finding(limit: int) -> DoctorFinding:
    """Whether so many open files are enough; each worker and client is several connections."""
    if limit == resource.RLIM_INFINITY or limit >= MIN_FILES:
        return fine("open files", f"up to {limit}")
    cure = f"raise it before a coordinator for many workers: ulimit -Hn {MIN_FILES}, as root"
    return doubtful("open files", f"up to {limit}", cure)
