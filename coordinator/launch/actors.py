"""Worker daemons on a Ray cluster with GPUs: one actor per worker, one GPU per actor, one process below each.

The actor only reserves the GPU and keeps the daemon alive; the daemon speaks gRPC like any other and never Ray.
"""

import os
import signal
import subprocess
from collections.abc import Sequence
from typing import cast

import ray
from ray.actor import ActorHandle

from coordinator.launch.subprocesses import worker_command
from skein.errors import UserError
from skein.wire.process.tether import tethered


class WorkerHost:
    """Runs one worker daemon where Ray gives it a GPU. Ray restarts it, and with it the daemon.

    It does one thing at a time: then all of it is on the main thread, and the daemon is tied to that.
    """

    def __init__(self, join: str, options: Sequence[str]) -> None:
        # Ray has set CUDA_VISIBLE_DEVICES to the one that is ours.
        self._process = subprocess.Popen(
            tethered(worker_command(join, options), number=signal.SIGKILL), stdin=subprocess.DEVNULL
        )

    def ended(self) -> int | None:
        """The daemon's exit code; None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Have it hand over its work and go."""
        self._process.terminate()

    def visible_devices(self) -> str:
        """What the daemon sees of the machine's GPUs."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")


def start_worker_actors(
    join: str, num_workers: int, *, options: Sequence[str] = ()
) -> "list[ActorHandle[WorkerHost]]":
    """Workers on the cluster that this process is connected to, one GPU each.

    Raises:
        UserError: the cluster has fewer GPUs.
    """
    num_gpus = int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]
    if not 1 <= num_workers <= num_gpus:
        raise UserError("workers", num_workers, f"the Ray cluster has {num_gpus} GPUs: give 1 to that many")
    actor = ray.remote(WorkerHost).options(num_gpus=1, num_cpus=1, max_restarts=-1)
    return [cast("ActorHandle[WorkerHost]", actor.remote(join, tuple(options))) for _ in range(num_workers)]
