"""`python -m tests.e2e.dying_worker --join ADDRESS --name NAME --orders FILE`: a worker that ends where it is told to.

FILE appears when it is time, and holds `bench.recovering.fate.Orders`. The moments are those that the driver tells, and
a few more: "inside Forward", "inside Loss" and "inside Backward" in the midst of the op, "ended Forward" and so on
before the driver hears of its end ("ended op" of any), "inside Apply" when a chunk has been updated.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from bench.recovering.fate import Fate
from bench.stub import run_stub
from skein.protocol.messages.directives import StepRecord
from skein.protocol.worker.ops import BackwardOp, ForwardOp, LossOp, Op, TensorKey
from skein.types import GroupId
from tests.support.device import DEVICE
from worker.compute.chunk import Chunk
from worker.compute.ops import Compute, Done
from worker.compute.payload import Payload
from worker.compute.snapshots import Snapshots
from worker.process import WorkerSetting
from worker.telling.moments import op_named


class MortalSnapshots(Snapshots):
    """Tells when a chunk has been updated; what else the update clears is not cleared yet."""

    def __init__(self, fate: Fate) -> None:
        super().__init__()
        self._fate = fate

    def applied(self, chunk: Chunk, record: StepRecord, result_by_group: Mapping[GroupId, Tensor]) -> None:
        """As `Snapshots.applied`."""
        self._fate.moment("inside Apply")
        super().applied(chunk, record, result_by_group)


class MortalCompute(Compute):
    """Carries ops out, and tells of moments inside them."""

    def __init__(self, device: torch.device, *, fate: Fate) -> None:
        super().__init__(device)
        self.snapshots = MortalSnapshots(fate)
        self._fate = fate
        self._op: Op | None = None
        torch.nn.modules.module.register_module_forward_hook(self._on_module)

    def run(self, op: Op, operands: Mapping[TensorKey, Payload]) -> Done:
        """As `Compute.run`."""
        self._op = op
        done = super().run(op, operands)
        self._fate.moment(f"ended {op_named(op)}")
        self._fate.moment("ended op")
        return done

    def _on_module(self, module: torch.nn.Module, given: object, output: object) -> None:
        """Some layer's output is there; the op has more layers."""
        if self._op is None or not isinstance(self._op, ForwardOp | LossOp):
            return
        op, self._op = self._op, None  # once in each op
        if isinstance(op, ForwardOp) and isinstance(output, Tensor) and output.requires_grad:
            # It comes last: other layers have accumulated by then.
            output.register_hook(self._on_gradient)  # type: ignore[no-untyped-call]
        self._fate.moment(f"inside {op_named(op)}")

    def _on_gradient(self, gradient: Tensor) -> None:
        if isinstance(self._op, BackwardOp):
            self._fate.moment("inside Backward")


def mortal(fate: Fate, setting: WorkerSetting) -> WorkerSetting:
    """`setting` of a worker with a fate."""
    return replace(setting, compute=partial(MortalCompute, fate=fate), watch=fate.moment)


def main() -> int:
    """Be a worker until the moment comes."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.dying_worker")
    parser.add_argument("--join", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--orders", required=True, type=Path)
    args = parser.parse_args()
    adapt = partial(mortal, Fate(args.orders))
    device: Literal["cpu", "cuda"] = "cuda" if DEVICE.type == "cuda" else "cpu"
    return run_stub(adapt, join=args.join, name=args.name, device=device)


if __name__ == "__main__":
    sys.exit(main())
