"""`python -m bench.detect_worker FILE`: a worker behind wires, whose ops never end once FILE.stuck exists."""

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from bench.chaosing.wires import ChaosWorker
from bench.chaosing.worker import behind_wires
from bench.emulated.fleet import WORKER_HOST
from bench.stub import run_stub
from skein.protocol.worker.ops import Op, TensorKey
from worker.compute.ops import Compute, Done
from worker.compute.payload import Payload
from worker.process import WorkerSetting

_POLL_S = 0.1


def stuck_file(told: Path) -> Path:
    """The file whose existence makes the worker that is told by `told` get stuck."""
    return told.with_suffix(".stuck")


class StickyCompute(Compute):
    """Carries ops out, until it is told to begin one and never end it; the process beats on, as with a hung device."""

    def __init__(self, device: torch.device, *, stuck: Path) -> None:
        super().__init__(device)
        self._stuck = stuck

    def run(self, op: Op, operands: Mapping[TensorKey, Payload]) -> Done:
        """As `Compute.run`, if it comes to that."""
        while self._stuck.exists():
            time.sleep(_POLL_S)
        return super().run(op, operands)


def sticky(told: Path, worker: ChaosWorker, setting: WorkerSetting) -> WorkerSetting:
    """`setting` behind wires, with ops that may get stuck."""
    return replace(behind_wires(worker, setting), compute=partial(StickyCompute, stuck=stuck_file(told)))


def main() -> int:
    """Be the worker that the file describes."""
    told = Path(sys.argv[1])
    worker = ChaosWorker.model_validate_json(told.read_bytes())
    adapt = partial(sticky, told, worker)
    return run_stub(adapt, join=worker.join, name=worker.name, listen=WORKER_HOST, port=worker.port)


if __name__ == "__main__":
    sys.exit(main())
