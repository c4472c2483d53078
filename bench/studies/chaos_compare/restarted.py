"""`python -m bench.studies.chaos_compare.restarted FILE`: one of some replicas that restart together from a file.

Plain data parallelism over gloo. Whoever misses a peer ends; somebody else starts all of them again.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch says not what it exports

from bench.studies.chaos_compare.replica import Replica, run_part
from bench.studies.chaos_compare.replica_file import Part
from bench.studies.chaos_compare.told import Kind
from skein.wire.channel import split_address

_STEP = "made_steps"
_PATIENCE = timedelta(seconds=60)


def train(part: Part) -> None:
    """From the newest checkpoint, or the beginning, to the last step."""
    replica = Replica(part)
    host, port = split_address("meeting", part.meeting)
    store = TCPStore(host, port, part.num_replicas, part.replica == 0, timeout=_PATIENCE)
    dist.init_process_group(
        "gloo", store=store, rank=part.replica, world_size=part.num_replicas, timeout=_PATIENCE
    )
    for step in range(_load(replica), part.job.total_steps):
        loss_sum, num_tokens = replica.compute(step)
        # The last element counts the tokens, so that one sum does for both.
        total = torch.cat([replica.gradients(), torch.tensor([float(num_tokens)])])
        dist.all_reduce(total)
        replica.apply(step, total[:-1] / total[-1])
        replica.tell(Kind.APPLIED, step, loss_sum, num_tokens)
        if part.replica == 0 and (step + 1) % part.checkpoint_every_steps == 0:
            _save(replica, step + 1)


def _save(replica: Replica, num_steps: int) -> None:
    unfinished = replica.part.checkpoint.with_suffix(".unfinished")
    save_file(replica.state() | {_STEP: torch.tensor(num_steps)}, unfinished)
    unfinished.replace(replica.part.checkpoint)


def _load(replica: Replica) -> int:
    if not replica.part.checkpoint.exists():
        return 0
    state = load_file(replica.part.checkpoint)
    num_steps = int(state.pop(_STEP))
    replica.load(state)
    return num_steps


if __name__ == "__main__":
    sys.exit(run_part(train))
