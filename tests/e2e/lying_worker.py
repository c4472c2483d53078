"""`python -m tests.e2e.lying_worker --join ADDRESS --name NAME --since STEP`: its gradients have another sign."""

import argparse
import sys
from dataclasses import replace
from functools import partial

import torch

from bench.stub import run_stub
from skein.protocol.worker.ops import PackOp
from worker.compute.ops import Compute
from worker.compute.payload import SHARD, pack, unpack
from worker.compute.visits.visiting import Outputs
from worker.process import WorkerSetting


class LyingCompute(Compute):
    """Hands the opposite of its sums to whoever adds them up, from a step on."""

    def __init__(self, device: torch.device, *, since: int) -> None:
        super().__init__(device)
        self._since = since

    def _pack(self, op: PackOp) -> Outputs:
        outputs = super()._pack(op)
        if op.step < self._since:
            return outputs
        return {
            key: pack({SHARD: -unpack(payload, self.device)[SHARD]})
            if not isinstance(payload, dict)
            else {SHARD: -payload[SHARD]}
            for key, payload in outputs.items()
        }


def lying(since: int, setting: WorkerSetting) -> WorkerSetting:
    """`setting` of a worker that lies."""
    return replace(setting, compute=partial(LyingCompute, since=since))


def main() -> int:
    """Be a worker."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.lying_worker")
    parser.add_argument("--join", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--since", required=True, type=int)
    args = parser.parse_args()
    return run_stub(partial(lying, args.since), join=args.join, name=args.name)


if __name__ == "__main__":
    sys.exit(main())
