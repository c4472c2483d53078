"""One wave of microbatches, as SkipPipe plans it: as many as the origins' slots hold, each the same in every wave.

A microbatch of a wave goes alone in the world: it computes where and when it likes, except in the windows in which it
has been told to wait. Which chunks are open to it is a set of bits.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bench.studies.methods.method import MayGoOn
from skein.plan.plan import Infeasible
from skein.plan.route.problem import F64, I64, Problem

Window = tuple[int, float, float]
"""(chunk, begin_s, end_s) in which a microbatch may not compute there."""


class Visit(NamedTuple):
    """A microbatch at a chunk; the loss counts as backward."""

    chunk: int
    begin_s: float
    end_s: float
    is_forward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """Where one microbatch goes and when it is there if nobody else is.

    Args:
        chunks: the hops, origin first.
        visits: forwards, the loss, backwards.
        finish_s: end of the last backward.
    """

    chunks: tuple[int, ...]
    visits: tuple[Visit, ...]
    finish_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Costs:
    """Of placed chunks, in seconds: (num_chunks,) lists, and hops from chunk to chunk."""

    forward_s: list[float]
    backward_s: list[float]
    loss_s: list[float]
    hop_s: list[list[float]]


def true_costs(problem: Problem, worker_of: I64) -> Costs:
    """What ops and hops take."""
    stage_of = problem.stage_of
    return Costs(
        forward_s=problem.forward_s[worker_of, stage_of].tolist(),
        backward_s=problem.backward_s[worker_of, stage_of].tolist(),
        loss_s=problem.loss_s[worker_of].tolist(),
        hop_s=problem.transfer_s[np.ix_(worker_of, worker_of)].tolist(),
    )


def unit_costs(problem: Problem) -> Costs:
    """What they take for who knows nothing: every forward and every hop 1."""
    num_chunks = problem.num_chunks
    return Costs(
        forward_s=[1.0] * num_chunks,
        backward_s=[1.5] * num_chunks,
        loss_s=[0.25] * num_chunks,
        hop_s=[[1.0] * num_chunks for _ in range(num_chunks)],
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wave:
    """What all microbatches of a wave have in common. They are numbered origin by origin, `num_slots` each.

    Args:
        problem: whose rules hold.
        num_slots: of every chunk, and microbatches of an origin.
        costs: what trips are made of.
        at_stage: the chunks of each stage as bits.
        stage_of: stage of each chunk.
        visit_s: (num_chunks, num_chunks) going on from one chunk to another, computing there, and back, both ways;
            infinite inside a stage.
    """

    problem: Problem
    num_slots: int
    costs: Costs
    at_stage: tuple[int, ...]
    stage_of: tuple[int, ...]
    visit_s: F64

    @property
    def num_microbatches(self) -> int:
        return self.problem.stage_sizes[0] * self.num_slots

    def origin(self, microbatch: int) -> int:
        return microbatch // self.num_slots


def refusal(problem: Problem) -> Infeasible | None:
    """Why equal waves cannot use the workers of this problem to the full, which is all that the method can plan."""
    reason = next(_refusals(problem), None)
    return None if reason is None else Infeasible(reason=f"waves do not fit: {reason}")


def _refusals(problem: Problem) -> Iterator[str]:
    if not problem.layout.comes_back:
        yield "they begin and end at the origin, layout loop"
    if np.ptp(problem.slots):
        yield f"chunks have {problem.slots.min()} to {problem.slots.max()} slots, all must have equally many"
    num_slots = int(problem.slots[0, 0])
    if any(count % num_slots or count != problem.num_by_origin[0] for count in problem.num_by_origin):
        yield f"origins send {problem.num_by_origin} microbatches, not equally many full waves of {num_slots}"
    holders = sorted(set(problem.stage_sizes[1:]))
    if len(holders) != 1:
        yield f"stages after the first have {holders or 'no'} holders, all must have equally many"
    visits, places = problem.stage_sizes[0] * (problem.path_len - 1), sum(problem.stage_sizes[1:])
    if visits != places:
        yield f"{visits} visits for each slot of the origins meet {places} workers, they must be as many"


def wave_of(problem: Problem, costs: Costs) -> Wave:
    """The wave of a problem that was not refused."""
    at_stage = [0] * problem.num_stages
    for chunk, stage in enumerate(problem.stage_of.tolist()):
        at_stage[stage] |= 1 << chunk
    hop_s = np.array(costs.hop_s)
    visit_s = hop_s + hop_s.T + np.array(costs.forward_s) + np.array(costs.backward_s)
    visit_s[problem.stage_of[:, None] == problem.stage_of[None, :]] = np.inf
    return Wave(
        problem=problem,
        num_slots=int(problem.slots[0, 0]),
        costs=costs,
        at_stage=tuple(at_stage),
        stage_of=tuple(problem.stage_of.tolist()),
        visit_s=visit_s,
    )


def find_trip(
    wave: Wave, microbatch: int, is_open: int, windows: tuple[Window, ...], may_go_on: MayGoOn
) -> Trip | None:
    """The trip that is over first, of equal ones the first by chunk numbers.

    None if the open chunks allow none, or if it was not found in time.

    Partial trips are taken up by the least time at which they could be over: forward so far with waits, the same way
    back, and the cheapest hops that could follow. Backwards wait like forwards, so no trip is over before that.

    Args:
        wave: where.
        microbatch: whose.
        is_open: bits of the chunks that it may visit; its origin is always open.
        windows: when it has to wait.
        may_go_on: asked at every partial trip that is taken up.
    """
    problem, costs = wave.problem, wave.costs
    origin = wave.origin(microbatch)
    release_s = (microbatch % wave.num_slots) * costs.forward_s[origin]
    by_stage = _open_by_stage(wave, is_open)
    to_go = _to_go(wave, origin, by_stage)
    num_hops = problem.num_hops
    begin_s = _free_from(windows, origin, release_s, costs.forward_s[origin])
    there_s = begin_s + costs.forward_s[origin]
    # (least finish, chunks, end of the last forward, way back so far, highest stage, swaps; trip once it is complete)
    heap: list[tuple[float, tuple[int, ...], float, float, int, int, Trip | None]] = []
    heap.append((0.0, (origin,), there_s, costs.backward_s[origin], 0, 0, None))
    while heap and may_go_on():
        _, chunks, there_s, back_s, highest, num_swaps, trip = heapq.heappop(heap)
        if trip is not None:
            return trip
        if len(chunks) == num_hops:
            trip = lay_trip(wave, chunks, release_s, windows)
            heapq.heappush(heap, (trip.finish_s, chunks, there_s, back_s, highest, num_swaps, trip))
            continue
        last, left_after = chunks[-1], to_go[num_hops - len(chunks) - 1]
        visited = {wave.stage_of[chunk] for chunk in chunks}
        for stage in range(max(1, highest - 1), min(problem.num_stages, highest + problem.max_jump + 1)):
            is_swap = stage < highest
            if stage in visited or (is_swap and num_swaps == problem.max_swaps):
                continue
            for chunk in by_stage[stage]:
                arrived_s = there_s + costs.hop_s[last][chunk]
                takes_s = costs.forward_s[chunk]
                end_s = _free_from(windows, chunk, arrived_s, takes_s) + takes_s
                home_s = back_s + costs.hop_s[chunk][last] + costs.backward_s[chunk]
                least_s = end_s + home_s + left_after[chunk]
                if least_s < np.inf:
                    item = (
                        least_s,
                        (*chunks, chunk),
                        end_s,
                        home_s,
                        max(highest, stage),
                        num_swaps + is_swap,
                    )
                    heapq.heappush(heap, (*item, None))
    return None


def lay_trip(wave: Wave, chunks: tuple[int, ...], release_s: float, windows: tuple[Window, ...]) -> Trip:
    """When a microbatch is where along `chunks`."""
    costs, origin = wave.costs, chunks[0]
    stops = [
        *((chunk, costs.forward_s[chunk], True) for chunk in chunks),
        (origin, costs.loss_s[origin], False),
        *((chunk, costs.backward_s[chunk], False) for chunk in reversed(chunks)),
    ]
    visits: list[Visit] = []
    at, now = origin, release_s
    for chunk, takes_s, is_forward in stops:
        begin_s = _free_from(windows, chunk, now + (costs.hop_s[at][chunk] if chunk != at else 0.0), takes_s)
        at, now = chunk, begin_s + takes_s
        visits.append(Visit(chunk, begin_s, now, is_forward))
    return Trip(chunks=chunks, visits=tuple(visits), finish_s=now)


def _free_from(windows: tuple[Window, ...], chunk: int, now: float, takes_s: float) -> float:
    """When `takes_s` seconds at `chunk` can begin without touching a window there."""
    has_moved = True
    while has_moved:
        has_moved = False
        for where, begin_s, end_s in windows:
            if where == chunk and now < end_s and now + takes_s > begin_s:
                now, has_moved = end_s, True
    return now


def _open_by_stage(wave: Wave, is_open: int) -> list[list[int]]:
    first = wave.problem.first_chunk.tolist()
    return [
        [chunk for chunk in range(first[stage], first[stage + 1]) if is_open >> chunk & 1]
        for stage in range(wave.problem.num_stages)
    ]


def _to_go(wave: Wave, origin: int, by_stage: list[list[int]]) -> list[list[float]]:
    """[hops left][chunk] seconds that a trip at `chunk` needs at least until it is over, its way back left out.

    Hops go to open chunks of other stages, whatever was visited before.
    """
    costs = wave.costs
    home_s = np.array([there[origin] for there in costs.hop_s]) + np.array(costs.hop_s[origin])
    home_s[origin] = 0.0
    to_go = [home_s + costs.loss_s[origin]]
    reachable = [chunk for chunks in by_stage[1:] for chunk in chunks]
    visit_s = wave.visit_s[:, reachable]
    for _ in range(wave.problem.num_hops - 1):
        to_go.append((visit_s + to_go[-1][reachable]).min(axis=1, initial=np.inf))
    return [row.tolist() for row in to_go]


def repeated(wave: Wave, trips: tuple[Trip, ...]) -> I64:
    """(num_microbatches of the step, num_hops + 1) paths: the trips wave after wave, each origin's first ones first."""
    order = sorted(range(len(trips)), key=lambda m: (m % wave.num_slots, m))
    rows = [[*trips[m].chunks, trips[m].chunks[0]] for m in order]
    num_waves = wave.problem.num_by_origin[0] // wave.num_slots
    return np.array(rows * num_waves, np.int64)
