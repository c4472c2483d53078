"""One replica group of torchft, in an environment that has it, as its file says.

A step in which somebody dies is dropped by all and made again with whoever is left; what is away contributes nothing.
The data of a step are those of its number, which is kinder to torchft than its own examples: there the samples of a
dropped step are gone. `docs/benchmarks-chaos.md` has the settings.
"""

import sys
from datetime import timedelta

from torch import Tensor
from torch.distributed import ReduceOp, TCPStore  # type: ignore[attr-defined]  # torch says not what it exports
from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]  # not among our dependencies

from bench.studies.chaos_compare.replica import Replica, run_part
from bench.studies.chaos_compare.replica_file import Part
from bench.studies.chaos_compare.told import Kind

_PATIENCE = timedelta(seconds=20)


def train(part: Part) -> None:
    """As far as the job goes; a newcomer takes over the state of the others."""
    replica = Replica(part)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Tensor]) -> None:
        replica.load(state)

    manager = Manager(
        pg=ProcessGroupGloo(timeout=_PATIENCE),
        load_state_dict=load,
        state_dict=replica.state,
        min_replica_size=1,
        timeout=_PATIENCE,
        quorum_timeout=_PATIENCE,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://{part.meeting}",
        replica_id=f"replica_{part.replica}",
        hostname="127.0.0.1",
        init_sync=False,  # every replica draws the same model
    )
    while (step := int(manager.current_step())) < part.job.total_steps:
        _step(replica, manager, step)
    manager.shutdown(wait=False)


def _step(replica: Replica, manager: Manager, step: int) -> None:
    manager.start_quorum()
    loss_sum, num_tokens = replica.compute(step)
    mean = replica.gradients() / num_tokens
    manager.wait_quorum()
    is_counted = bool(manager.is_participating())
    manager.allreduce(mean, reduce_op=ReduceOp.AVG).wait()
    if not manager.should_commit():
        replica.tell(Kind.DROPPED, step)
        return
    # Who has just been healed is at the step of the others now.
    made = int(manager.current_step()) - 1
    replica.apply(made, mean)
    replica.tell(Kind.APPLIED, made, loss_sum, num_tokens, is_counted=is_counted)


if __name__ == "__main__":
    sys.exit(run_part(train))
