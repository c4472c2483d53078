"""The stub that workers of tests and comparisons are: ordinary ones, but for parts that are put in others' places."""

import asyncio
from collections.abc import Callable
from typing import Literal

from bench.cluster import ANY_ROOT
from worker.daemon import WorkerOptions, run_worker
from worker.process import WorkerSetting


def run_stub(
    adapt: Callable[[WorkerSetting], WorkerSetting],
    *,
    join: str,
    name: str,
    site: str = "default",
    listen: str = "127.0.0.1",
    port: int = 0,
    device: Literal["cpu", "cuda"] = "cpu",
    devices: str | None = None,
) -> int:
    """Be a worker on `device` that reads and writes wherever it is told, as `adapt` makes it; gives the exit code.

    `devices` are those of a mesh; None: it is none.
    """
    options = WorkerOptions(
        join=join,
        name=name,
        site=site,
        listen=listen,
        port=port,
        device=device if devices is None else "auto",
        devices=devices,
        data_roots=(ANY_ROOT,),
        checkpoint_roots=(str(ANY_ROOT),),
    )
    return asyncio.run(run_worker(options, adapt=adapt))
