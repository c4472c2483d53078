"""Predicted step of what a planner chooses by itself, beside whole backwards of one chunk for each worker.

    python -m bench.schedules [--budget 2] [--json]

Four equal workers of 1 TFLOP/s, 100 Gbit/s and three latencies between any two, 8 microbatches of a decoder of 32
blocks of width 512 with 256 tokens; weight gradients are taken for a half of a backward, and for less. One plan more
has memory for three quarters of what 1F1B keeps. How far plans are above the bound that is printed with them is told
for four and eight workers inside a site. Nothing runs, so the machine does not matter. Ends with one JSON line; exit
code 1 if a goal is missed.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations, product
from typing import Literal

from bench.report import Row, finish
from skein.config.data.sources import TextSource
from skein.config.data.spec import DataSpec
from skein.config.job import AUTO_CHUNKS, BatchSpec, BudgetSpec, JobSpec, ParallelSpec, PlanSpec
from skein.model.families.llama import LlamaModel, LlamaShape
from skein.plan.cut import cut
from skein.plan.load import StageLoad, stage_loads
from skein.plan.plan import Plan
from skein.plan.searched import make_searched_plan
from skein.topology.fleet import Fleet, FleetWorker, Link, Profile, StageTime
from skein.types import SiteId, WorkerId

HOPS_S = (0.00005, 0.01, 0.03)
GOALS = {1 / 2: 0.80, 1 / 3.3: 0.88}
"""Most of the step with whole backwards of one chunk, by the share of a backward that weights take."""
NEAR_S, HALVES = 0.004, 6
"""Latency at which V-Half leads those that fit into slots for so many halves of a worker's stages; 1F1B takes 8."""
MOST_OF_1F1B, MOST_APART = 0.80, 1.10
"""Bytes of activations on the fullest worker; fullest over emptiest."""
MOST_GAP = 0.15
"""Most that a plan may be above its bound inside a site."""
_FLOPS_PER_S = 1e12
_NUM_WORKERS = 4
_PROFILE = Profile(device="cpu", device_name="equal", flops_per_s=_FLOPS_PER_S, memory_bytes=64 << 30)

Chunks = Literal[1, 2, 4, "auto"]
Backward = Literal["whole", "split", "auto"]
GAPS: tuple[tuple[int, Chunks, Backward], ...] = (
    (4, 2, "whole"),
    (4, 2, "split"),
    (4, 4, "whole"),
    (4, 4, "split"),
    (8, 2, "whole"),
    (8, 2, "split"),
    (8, 4, "whole"),
    (8, 4, "split"),
)
"""Workers, chunks and backwards of plans inside a site, beside their bounds."""


def fleet(
    hop_s: float,
    share: float,
    *,
    memory_bytes: int = _PROFILE.memory_bytes,
    num_workers: int = _NUM_WORKERS,
) -> Fleet:
    """Equal workers, whose weight gradients take this share of a backward."""
    profile = replace(_PROFILE, memory_bytes=memory_bytes)
    names = tuple(WorkerId(f"w{i}") for i in range(num_workers))
    workers = tuple(FleetWorker(worker=name, site=SiteId("one"), profile=profile) for name in names)
    links = tuple(
        Link(sender=a, receiver=b, latency_s=hop_s, bytes_per_s=12.5e9) for a, b in permutations(names, 2)
    )
    return Fleet(workers=workers, links=links, stage_times=tuple(_stage_times(share, names)))


def _stage_times(share: float, names: Sequence[WorkerId]) -> Iterator[StageTime]:
    """Times of all stages that the job may be cut into, by their arithmetic."""
    spec = job(1, "whole", budget_s=0)
    cuts = [cut(spec.layers, len(names) * chunks, spec.parallel.layout) for chunks in AUTO_CHUNKS]
    for load in (load for stages in cuts for load in stage_loads(spec, stages)):
        backward_s = load.backward_flops / _FLOPS_PER_S
        for name in names:
            yield StageTime(
                worker=name,
                stage=load.stage,
                forward_s=load.forward_flops / _FLOPS_PER_S,
                backward_s=backward_s,
                weight_s=share * backward_s,
            )


def job(chunks: Chunks, backward: Backward, *, budget_s: float, num_workers: int = _NUM_WORKERS) -> JobSpec:
    """A stage for each worker, or as many chunks of each as is said, or as the planner chooses."""
    shape = LlamaShape(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=32,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    return JobSpec(
        name="schedules",
        model=LlamaModel(shape=shape),
        data=DataSpec(sources=(TextSource(path="."),), sequence_tokens=256),
        batch=BatchSpec(samples=8, microbatch_samples=1),
        parallel=ParallelSpec(stages=num_workers, chunks=chunks),
        plan=PlanSpec(backward=backward, budget_s=budget_s),
        budget=BudgetSpec(steps=1),
    )


def predicted(on: Fleet, chunks: Chunks, backward: Backward, *, budget_s: float) -> Plan:
    """The plan for these workers."""
    spec = job(chunks, backward, budget_s=budget_s, num_workers=len(on.workers))
    plan = make_searched_plan(spec, on, None, 0)
    assert isinstance(plan, Plan), plan.reason
    return plan


def loads_of(chunks: Literal[1, 2], backward: Literal["whole", "split"]) -> tuple[StageLoad, ...]:
    """Loads of the stages of so many chunks for each worker."""
    spec = job(chunks, backward, budget_s=0)
    return stage_loads(spec, cut(spec.layers, 4 * chunks, spec.parallel.layout))


def halves_bytes(num_slots: int) -> int:
    """Memory of a worker that holds two chunks with so many slots on both together."""
    loads = loads_of(2, "split")
    return 2 * max(x.fixed_bytes for x in loads) + num_slots * max(x.slot_bytes for x in loads)


def planned_bytes(plan: Plan) -> list[int]:
    """Bytes of the slots that each worker has on its two chunks."""
    loads = loads_of(2, "split")
    return [
        sum(loads[x.chunk.stage].slot_bytes * x.slots for x in plan.chunks if x.chunk.worker == worker)
        for worker in plan.workers
    ]


def row_of_memory(*, budget_s: float) -> Row:
    """Bytes of activations of two chunks in little memory, beside those of 1F1B."""
    memory_bytes = halves_bytes(HALVES)
    plan = predicted(fleet(NEAR_S, 1 / 2, memory_bytes=memory_bytes), 2, "split", budget_s=budget_s)
    planned = planned_bytes(plan)
    whole_bytes = _NUM_WORKERS * max(x.slot_bytes for x in loads_of(1, "whole"))
    ratio, apart = max(planned) / whole_bytes, max(planned) / min(planned)
    return Row(
        what=f"two chunks, split, memory for {HALVES} of 8 halves; a step of {plan.predicted_step_s:.4f} s; "
        f"fullest {apart:.2f} of the emptiest",
        value=max(planned),
        unit="bytes",
        against=f"1F1B: {whole_bytes} bytes",
        ratio=ratio,
        goal=f"<= {MOST_OF_1F1B:.2f}, apart <= {MOST_APART:.2f}",
        holds=ratio <= MOST_OF_1F1B and apart <= MOST_APART,
        spread=0.0,
    )


def row_of(hop_s: float, share: float, *, budget_s: float) -> Row:
    """What `auto` comes to at one latency."""
    on, goal = fleet(hop_s, share), GOALS[share]
    plain = predicted(on, 1, "whole", budget_s=budget_s)
    chosen = predicted(on, "auto", "auto", budget_s=budget_s)
    ratio = chosen.predicted_step_s / plain.predicted_step_s
    gap = chosen.predicted_step_s / chosen.lower_bound_s - 1
    split = "split" if chosen.paths[0].split else "whole"
    return Row(
        what=f"{hop_s * 1e3:g} ms between workers, weights {share:.2f} of a backward: "
        f"{len(chosen.stages) // 4} chunks, {split} backwards; gap {gap:.0%}",
        value=chosen.predicted_step_s,
        unit="s",
        against=f"one chunk, whole backwards: {plain.predicted_step_s:.4f} s",
        ratio=ratio,
        goal=f"<= {goal:.2f}",
        holds=ratio <= goal,
        spread=0.0,
    )


def row_of_gap(num_workers: int, chunks: Chunks, backward: Backward, *, budget_s: float) -> Row:
    """A plan inside a site beside its own bound."""
    plan = predicted(fleet(HOPS_S[0], 1 / 2, num_workers=num_workers), chunks, backward, budget_s=budget_s)
    gap = plan.predicted_step_s / plan.lower_bound_s - 1
    return Row(
        what=f"{num_workers} workers inside a site, {chunks} chunks, {backward} backwards: predicted step",
        value=plan.predicted_step_s,
        unit="s",
        against=f"its bound: {plan.lower_bound_s:.4f} s",
        ratio=1 + gap,
        goal=f"1.00 to {1 + MOST_GAP:.2f}",
        holds=0 <= gap <= MOST_GAP,
        spread=0.0,
    )


def main() -> int:
    """All shares and latencies, memory, and gaps to bounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=2.0, help="seconds of each search")
    parser.add_argument("--json", action="store_true", help="the JSON line alone")
    args = parser.parse_args()
    rows = []
    for share, hop_s in product(GOALS, HOPS_S):
        rows.append(row_of(hop_s, share, budget_s=args.budget))
        if not args.json:
            print(f"{rows[-1].what}: {rows[-1].value:.4f} s, {rows[-1].ratio:.3f} of {rows[-1].against}")
    rows.append(row_of_memory(budget_s=args.budget))
    if not args.json:
        print(f"{rows[-1].what}: {rows[-1].value} bytes, {rows[-1].ratio:.3f} of {rows[-1].against}")
    for num_workers, chunks, backward in GAPS:
        rows.append(row_of_gap(num_workers, chunks, backward, budget_s=args.budget))
        if not args.json:
            print(f"{rows[-1].what}: {rows[-1].value:.4f} s, {rows[-1].ratio:.3f} of {rows[-1].against}")
    return finish("schedules", rows)


if __name__ == "__main__":
    sys.exit(main())
