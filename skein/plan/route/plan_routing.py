"""A plan's schedules as one order of all its ops: what it takes as it is can then be reckoned for any fleet."""

import itertools
import math
from collections import deque
from dataclasses import replace

import numpy as np

from skein.plan.order import ways_of
from skein.plan.plan import Plan, PlannedOp
from skein.plan.route.evaluate import timeline
from skein.plan.route.job_problem import Posed
from skein.plan.route.kernels.arrays import fixed, op_seconds
from skein.plan.route.problem import I64, Problem, Routing
from skein.plan.route.room import Crowded, with_room
from skein.types import WorkerId

_NUM_SORTINGS = 16
"""Each brings the order nearer to that of time; a handful is enough."""


def routing_of(plan: Plan, posed: Posed) -> Routing | None:
    """The routing that `plan` is, if each worker keeps to its list; None if some list cannot be kept to so strictly.

    Where the slots of `posed` are too few for it, `with_room` has those that it needs.

    Args:
        plan: whose problem `posed` is.
        posed: with the plan's own placement and paths.
    """
    sequence = listed_sequence(plan)
    if sequence is None:
        return None
    routing = Routing(worker_of=posed.worker_of, path=posed.path, sequence=sequence)
    room = with_room(posed.problem, routing)
    return None if isinstance(room, Crowded) else in_time(room, routing)


def listed_sequence(plan: Plan) -> I64 | None:
    """Some order of all ops, as in `Routing`, in which each worker keeps to its list; None if there is none."""
    ways = ways_of(plan.paths)
    placed = list(itertools.chain(*ways))
    number_of = {x.op: number for number, x in enumerate(placed)}
    lists = {schedule.worker: deque(schedule.ops) for schedule in plan.schedules}
    done: set[PlannedOp] = set()
    waiting: dict[int, list[WorkerId]] = {}
    sequence: list[int] = []
    to_try = deque(lists)
    while to_try:
        worker = to_try.popleft()
        ops = lists[worker]
        while ops:
            microbatch = int(ops[0].microbatch)
            number = number_of.get(ops[0])
            if number is None or any(ways[microbatch][x].op not in done for x in placed[number].at.awaited):
                # A worker is woken by the microbatch that it waits for, not looked at again for every op.
                waiting.setdefault(microbatch, []).append(worker)
                break
            done.add(ops.popleft())
            sequence.append(number)
            to_try.extend(waiting.pop(microbatch, ()))
    return None if any(lists.values()) else np.array(sequence, np.int64)


def in_time(problem: Problem, routing: Routing) -> Routing | None:
    """The same lists in order of time, for links serve first what comes first; None if slots run out in it."""
    before_s, seconds = math.inf, op_seconds(problem, routing.worker_of, routing.path)
    arrays = fixed(problem)
    for _ in range(_NUM_SORTINGS):
        try:
            found = timeline(problem, routing, arrays)
        except ValueError:
            return None
        if found.step_s == before_s:
            break
        before_s = found.step_s
        # By their ends, for then outputs ask for links; of those that end together, who takes no time stays behind.
        ends_s = (found.begin_s + seconds).ravel()[routing.sequence]
        routing = replace(routing, sequence=routing.sequence[np.argsort(ends_s, kind="stable")])
    return routing
