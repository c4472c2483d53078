"""Measures this worker's own device, at start-up and whenever it is asked to."""

import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import psutil
import torch

from skein.topology.fleet import Profile

_SIZES = {"cpu": 1024, "cuda": 4096}
_SMALL_CPU_SIZE, _FEW_THREADS = 256, 4
"""A product of few threads shall end within one slice of the operating system's scheduler."""
_NUM_RUNS = 5
_MEMORY_SHARE = 0.8
"""Share of the memory that is free now; the rest is for the framework, fragmentation and others."""


def measure_device(device: torch.device, *, seconds: float = 0.5) -> Profile:
    """Profile of `device` now: fp32 matrix products with the threads that torch uses, in several short runs.

    Of each run the median product counts, which is neither one that was interrupted nor one that a coarse clock makes
    look short; of the runs their median, with how far they lie apart. Blocks for a little longer than `seconds`.
    """
    flops_per_s, spread = median_and_spread(_rates(device, seconds))
    return Profile(
        device=str(device),
        device_name=_name(device),
        flops_per_s=flops_per_s,
        memory_bytes=int(_free_bytes(device) * _MEMORY_SHARE),
        spread=spread,
    )


def median_and_spread(rates: Sequence[float]) -> tuple[float, float]:
    """The median of several runs, and from the slowest to the fastest as a share of it.

    >>> median_and_spread([4.0, 326.0, 5.0, 4.5, 5.0])
    (5.0, 64.4)
    """
    middle = median(rates)
    return middle, (max(rates) - min(rates)) / middle


def _rates(device: torch.device, seconds: float) -> list[float]:
    """FLOP/s of each run."""
    size = _SIZES.get(device.type, 1024)
    if device.type == "cpu" and torch.get_num_threads() <= _FEW_THREADS:
        size = _SMALL_CPU_SIZE
    a_MK = torch.ones(size, size, device=device)
    b_KN = torch.ones(size, size, device=device)
    out_MN = torch.empty(size, size, device=device)

    def product_s() -> float:
        began_s = time.perf_counter()
        torch.mm(a_MK, b_KN, out=out_MN)
        synchronize(device)
        return time.perf_counter() - began_s

    product_s()  # the first one also starts threads and loads kernels
    return [2 * size**3 / _median_s(product_s, seconds / _NUM_RUNS) for _ in range(_NUM_RUNS)]


def _median_s(product_s: Callable[[], float], seconds: float) -> float:
    """Median seconds of as many products as `seconds` hold, one at least."""
    until_s, found = time.perf_counter() + seconds, [product_s()]
    while time.perf_counter() < until_s:
        found.append(product_s())
    return max(median(found), 1e-9)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what it was asked to; processors have when they answer."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    available = int(psutil.virtual_memory().available)
    limit = _cgroup_limit()
    return available if limit is None else max(min(available, limit - psutil.Process().memory_info().rss), 0)


def _cgroup_limit() -> int | None:
    """Bytes that a container's memory limit allows, of which the machine's free memory says nothing."""
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.exists() else ""
    return int(text) if text.isdecimal() else None


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
