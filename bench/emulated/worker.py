"""`python -m bench.emulated.worker FILE`: an ordinary worker, but for what its device and its links are said to be.

It says the emulated speed and memory of itself, dials peers through the relay, and lets each op take its emulated time:
the op is really carried out, and what is left of the time is slept. An op that takes longer than it should is told of.
It waits for FILE to appear, so that programs can be started together and join one after the other.
"""

import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from bench.emulated.fleet import WORKER_HOST, EmulatedWorker, OpTimes
from bench.stub import run_stub
from skein.protocol.worker.ops import ApplyOp, ComputeOp, Op, TensorKey
from skein.topology.fleet import Profile
from worker.compute.ops import Compute, Done
from worker.compute.payload import Payload
from worker.process import WorkerSetting

_log = logging.getLogger("worker.emulated")

_POLL_S = 0.05


def seconds_of(op: Op, times: OpTimes) -> float:
    """How long an op is to take; what is not work on a microbatch takes its own time."""
    if not isinstance(op, ComputeOp):
        return 0.0
    at = op.chunk.stage
    return op.kind.row.cost.seconds(
        times.forward_s[at], times.backward_s[at], times.loss_s[at], times.weight_s[at]
    )


class EmulatedCompute(Compute):
    """Carries ops out, and waits until their time is over."""

    def __init__(self, device: torch.device, *, times: OpTimes) -> None:
        super().__init__(device)
        self._times = times
        self._num_late = 0
        self._late_s = 0.0

    def run(self, op: Op, operands: Mapping[TensorKey, Payload]) -> Done:
        """As `Compute.run`, but not quicker than emulated."""
        began_s = time.perf_counter()
        done = super().run(op, operands)
        takes_s = seconds_of(op, self._times)
        left_s = takes_s - (time.perf_counter() - began_s)
        if left_s > 0:
            time.sleep(left_s)
        elif takes_s:
            self._num_late += 1
            self._late_s -= left_s
        if isinstance(op, ApplyOp):
            self._tell()
        return done

    def _tell(self) -> None:
        if self._num_late:
            _log.warning("late_ops=%d by_s=%.3f: the machine is too slow", self._num_late, self._late_s)
        self._num_late, self._late_s = 0, 0.0


def adapted(worker: EmulatedWorker, setting: WorkerSetting) -> WorkerSetting:
    """`setting` with an emulated device behind emulated links."""
    profile = Profile(
        device="cpu",
        device_name="emulated",
        flops_per_s=worker.flops_per_s,
        memory_bytes=worker.memory_bytes,
    )
    return replace(
        setting,
        measure=lambda _: profile,
        way_to=lambda address: worker.ways[address],
        compute=partial(EmulatedCompute, times=worker.times),
    )


def main() -> int:
    """Be the worker that the file describes, as soon as there is one."""
    path = Path(sys.argv[1])
    while not path.exists():
        time.sleep(_POLL_S)
    worker = EmulatedWorker.model_validate_json(path.read_bytes())
    return run_stub(
        partial(adapted, worker),
        join=worker.join,
        name=worker.name,
        site=worker.site,
        listen=WORKER_HOST,
        port=worker.port,
    )


if __name__ == "__main__":
    sys.exit(main())
