"""Workers that have come so far in a job of two stages, for tests of what comes then."""

from typing import TypeVar

from skein.plan.ops import Direction
from skein.plan.plan import Plan
from skein.protocol.messages.reports import Report
from skein.protocol.messages.tensors import HopTensor, Phase
from skein.protocol.worker.ops import (
    OpFailed,
)
from skein.types import MicrobatchId, Step
from tests.support.hands import Hand, record
from tests.support.plans import chunk, grid_plan, path, plan_of
from tests.support.reports import attempt, ledger

PLAN = grid_plan(stages=2, replicas=1, num_microbatches=2)
"""`w0a` holds stage 0, `w1a` stage 1; two microbatches."""
ALONE = plan_of(
    [chunk(0, "w0a"), chunk(1, "w0a")], [path(chunk(0, "w0a"), chunk(1, "w0a"))] * 2, num_shards=1
)
"""`w0a` holds everything."""
FAILED = OpFailed(is_fatal=False, reason="out of memory")
R = TypeVar("R")


def hop(
    direction: Direction,
    microbatch: int,
    at: int,
    *,
    plan: Plan = PLAN,
    phase: Phase = Phase.TRAIN,
    step: int = 0,
) -> HopTensor:
    return HopTensor(
        direction=direction,
        phase=phase,
        step=Step(step),
        microbatch=MicrobatchId(microbatch),
        hop=at,
        path=plan.paths[microbatch % len(plan.paths)],
    )


def gradient(microbatch: int, *, step: int = 0) -> HopTensor:
    """What stage 1 sends back to stage 0."""
    return hop(Direction.BACKWARD, microbatch, 0, step=step)


def ready(plan: Plan = PLAN, worker: str = "w0a") -> Hand:
    """A worker that waits for its first step."""
    hand = Hand(worker)
    hand.connect()
    hand.settle(plan)
    return hand


def stepping() -> Hand:
    """The first stage's worker in step 0, both forwards done."""
    hand = ready()
    hand.start()
    hand.run_all()
    return hand


def accumulated() -> Hand:
    """The same with both backwards done."""
    hand = stepping()
    for microbatch in (0, 1):
        hand.arrive(gradient(microbatch))
        hand.run_all()
    return hand


def voted() -> Hand:
    """The same with the result of its group joined."""
    hand = accumulated()
    hand.prepare("s0", [ledger(0, "w0a", 0, 1)])
    hand.run_all()
    return hand


DECIDED = record(attempts={"s0": attempt(), "s1": attempt()})


def only(reports: list[Report], kind: type[R]) -> R:
    [report] = reports
    assert isinstance(report, kind)
    return report
