"""Measures this worker's own device, once, at start-up."""

import platform
import time
from pathlib import Path

import psutil
import torch

from skein.topology.fleet import Profile

_SIZES = {"cpu": 1024, "cuda": 4096}
_SMALL_CPU_SIZE, _FEW_THREADS = 256, 4
"""A product of few threads shall end within one slice of the operating system's scheduler."""
_MEMORY_SHARE = 0.8
"""Of what is free now; the rest is for the framework, fragmentation and others."""


def measure_device(device: torch.device, *, seconds: float = 0.5) -> Profile:
    """What `device` can do: the fastest fp32 matrix product found in `seconds`, with the threads torch uses now.

    The fastest, because workers that start together on one machine measure at the same time and would otherwise
    measure each other. Blocks for a little longer than `seconds`.
    """
    return Profile(
        device=str(device),
        device_name=_name(device),
        flops_per_s=_flops_per_s(device, seconds),
        memory_bytes=int(_free_bytes(device) * _MEMORY_SHARE),
    )


def _flops_per_s(device: torch.device, seconds: float) -> float:
    size = _SIZES.get(device.type, 1024)
    if device.type == "cpu" and torch.get_num_threads() <= _FEW_THREADS:
        size = _SMALL_CPU_SIZE
    a_MK = torch.ones(size, size, device=device)
    b_KN = torch.ones(size, size, device=device)
    out_MN = torch.empty(size, size, device=device)
    torch.mm(a_MK, b_KN, out=out_MN)  # the first one also starts threads and loads kernels
    _synchronize(device)
    fastest_s, until_s = float("inf"), time.perf_counter() + seconds
    while fastest_s == float("inf") or time.perf_counter() < until_s:
        began_s = time.perf_counter()
        torch.mm(a_MK, b_KN, out=out_MN)
        _synchronize(device)
        fastest_s = min(fastest_s, time.perf_counter() - began_s)
    return 2 * size**3 / fastest_s


def _synchronize(device: torch.device) -> None:
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
