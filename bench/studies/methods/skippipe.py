"""SkipPipe's planner, the reference: genetic placement, then conflict-based search for one wave's paths."""

import numpy as np

from bench.studies.methods.conflicts import (
    Entry,
    Judge,
    Trips,
    avoid_collisions,
    spread_over_stages,
    spread_over_workers,
)
from bench.studies.methods.genetic import place, skippipe_scoring
from bench.studies.methods.method import MayGoOn
from bench.studies.methods.wave import Wave, refusal, repeated, true_costs, unit_costs, wave_of
from skein.plan.plan import Infeasible
from skein.plan.route.evaluate import ordered
from skein.plan.route.kernels.arrays import COST, HOP, op_array
from skein.plan.route.kernels.simulate import simulate
from skein.plan.route.problem import I64, Problem, Routing


def skippipe(problem: Problem, *, seed: int, may_go_on: MayGoOn) -> tuple[Problem, Routing] | Infeasible:
    """The plan of the published search, or why it has none. Plans that shut out collisions are judged by simulation."""
    worker_of = _placed(problem, seed, may_go_on)
    if isinstance(worker_of, Infeasible):
        return worker_of
    wave = wave_of(problem, true_costs(problem, worker_of))
    trips = Trips(wave, may_go_on)
    entry = avoid_collisions(trips, spread_over_stages(trips), _judge(wave, worker_of))
    return _answer(trips, worker_of, entry)


def skip_blind(problem: Problem, *, seed: int, may_go_on: MayGoOn) -> tuple[Problem, Routing] | Infeasible:
    """The same placement with paths that keep within slots but know no costs: what knowing them is worth."""
    worker_of = _placed(problem, seed, may_go_on)
    if isinstance(worker_of, Infeasible):
        return worker_of
    wave = wave_of(problem, unit_costs(problem))
    trips = Trips(wave, may_go_on)
    return _answer(trips, worker_of, spread_over_workers(trips, spread_over_stages(trips)))


def _placed(problem: Problem, seed: int, may_go_on: MayGoOn) -> I64 | Infeasible:
    return refusal(problem) or place(problem, skippipe_scoring(problem), seed=seed, may_go_on=may_go_on)


def _judge(wave: Wave, worker_of: I64) -> Judge:
    """Makespans of the whole step, workers taking what is ready."""
    problem, stage_of = wave.problem, wave.problem.stage_of
    ops, slots = op_array(problem.ops), problem.slots[worker_of, stage_of]
    op_s = problem.op_s[ops[:, COST]][:, worker_of, stage_of]
    end_s, no_rows = np.empty(problem.num_microbatches), np.empty((0, 1))

    def makespan_s(entry: Entry) -> float:
        path = repeated(wave, entry.trips)
        way = np.ascontiguousarray(path[:, ops[:, HOP]])
        return simulate(
            way, worker_of, ops, op_s, problem.transfer_s, problem.wire_s, slots, np.inf, no_rows, end_s,
        )  # fmt: skip

    return makespan_s


def _answer(trips: Trips, worker_of: I64, entry: Entry | None) -> tuple[Problem, Routing] | Infeasible:
    wave = trips.wave
    if entry is None:
        why = "with the ways tried" if trips.may_go_on() else "in the time given"
        return Infeasible(reason=f"no plan that keeps within all slots was found {why}")
    routing = ordered(wave.problem, worker_of, repeated(wave, entry.trips))
    if routing is None:
        return Infeasible(reason="the paths found wait for slots for ever")
    return wave.problem, routing
