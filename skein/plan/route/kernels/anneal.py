"""Simulated annealing over placement, paths and order together, as compiled loops.

First on a surrogate that needs no schedule, the p-norm of what origins and chunks must do at least; then on the step
itself, run in sequence order. The threshold of each move is drawn before it is evaluated, so that most evaluations end
early. Source of surrogate, objective and threshold: measurements on SkipPipe's instances (arXiv 2502.19913's problem).
"""

from typing import NamedTuple

import numpy as np

from skein.plan.route.kernels.arrays import LAST, U64, VISIT, Fixed, State
from skein.plan.route.kernels.compiled import compiled
from skein.plan.route.kernels.cost import (
    BLOCKED,
    NEVER,
    Scratch,
    fit_chunk,
    fit_stage,
    fit_trip,
    fit_way,
    run_graph,
    run_line,
    smoothness,
    sort_sequence,
)
from skein.plan.route.kernels.moves import (
    NOTHING,
    PATHS,
    Undo,
    change_paths,
    draw,
    exchange_seats,
    pull_forward,
    shift,
    take_back,
)
from skein.plan.route.kernels.simulate import simulate
from skein.plan.route.problem import F64, I64

_AGAIN_OPS = 20.0
"""A move after which slots do not suffice in the old order is tried in a new one, at times: always on problems of so
few ops, for half of the moves on twice as many. It costs several evaluations, and on large problems gains little."""
_TIE = 1e-3
"""Weight of smoothness between the best of all: enough to tell ties apart."""


class Cooling(NamedTuple):
    """Settings of an annealing.

    num_moves: proposals. first_s, last_s: temperature, in seconds of the objective, falling geometrically.
    seat_share, order_share: of the proposals. evenness: weight of `smoothness` beside the step's seconds.
    path_shares: (6,) of the kinds of path moves, cumulative.
    """

    num_moves: int
    first_s: float
    last_s: float
    seat_share: float
    order_share: float = 0.2
    evenness: float = 1.5
    path_shares: F64 = np.cumsum([0.3, 0.25, 0.2, 0.12, 0.08, 0.05])


@compiled
def refit(fixed: Fixed, state: State, undo: Undo, changed: int) -> None:
    """Bring up to date what follows from the seats or paths that a move touched."""
    if changed == PATHS:
        for microbatch in undo.microbatches:
            fit_way(fixed, state, microbatch)
            fit_trip(fixed, state, microbatch)
        return
    for seat in undo.seats:
        if seat < len(fixed.stage_of):
            fit_chunk(fixed, state, seat)
            fit_stage(fixed, state, fixed.stage_of[seat])
            first = fixed.stage_of[seat] - (len(state.reduce_s) - fixed.num_tied)
            if fixed.tied_bytes > 0.0 and first >= 0:
                fit_stage(fixed, state, first)
    for microbatch in range(len(state.trip_s)):
        fit_trip(fixed, state, microbatch)


@compiled
def surrogate_s(fixed: Fixed, state: State, chain_s: F64, load_s: F64) -> float:
    """The 16-norm over origins of their microbatches' trips per slot, and over workers of their work, in seconds."""
    chain_s[:] = 0.0
    load_s[:] = 0.0
    for m in range(len(state.trip_s)):
        chain_s[state.path[m, 0]] += state.trip_s[m] / state.slots[state.path[m, 0]]
        for hop in range(fixed.num_hops):
            chunk = state.path[m, hop]
            load_s[state.holder[chunk]] += state.spent_s[VISIT, chunk]
        chunk = state.path[m, fixed.num_hops]
        load_s[state.holder[chunk]] += state.spent_s[LAST, chunk]
    # A norm, not the maximum, which most moves leave as it is; scaled, for a 16th power of seconds would vanish.
    longest_s = 1e-300
    for origin in range(len(chain_s)):
        longest_s = max(longest_s, chain_s[origin])
    for worker in range(len(load_s)):
        longest_s = max(longest_s, load_s[worker])
    total = 0.0
    for origin in range(len(chain_s)):
        total += (chain_s[origin] / longest_s) ** 16
    for worker in range(len(load_s)):
        total += (load_s[worker] / longest_s) ** 16
    for stage in range(len(state.reduce_s)):
        total += 0.05 * (state.reduce_s[stage] / longest_s) ** 2
    return float(longest_s * total**0.0625 + state.move_s.sum())


@compiled
def anneal_surrogate(fixed: Fixed, state: State, undo: Undo, cooling: Cooling, random: U64) -> float:
    """Anneal placement and paths on the surrogate; leaves the best in `state`, without a sequence."""
    chain_s, load_s = np.zeros(int(fixed.first_chunk[1])), np.zeros(fixed.transfer_s.shape[0])
    now_s = surrogate_s(fixed, state, chain_s, load_s)
    best_s, best_holder, best_path = now_s, state.holder.copy(), state.path.copy()
    for number in range(cooling.num_moves):
        warmth_s = cooling.first_s * (cooling.last_s / cooling.first_s) ** (number / cooling.num_moves)
        if draw(random) < cooling.seat_share:
            changed = exchange_seats(fixed, state, undo, random)
        else:
            changed = change_paths(fixed, state, undo, cooling.path_shares, random)
        if changed == NOTHING:
            continue
        refit(fixed, state, undo, changed)
        there_s = surrogate_s(fixed, state, chain_s, load_s)
        # -log of a uniform draw: what is worse by x is taken with probability exp(-x / warmth).
        if there_s <= now_s - warmth_s * np.log(draw(random) + 1e-300):
            now_s = there_s
            if now_s < best_s:
                best_s = now_s
                best_holder[:] = state.holder
                best_path[:] = state.path
        else:
            # Put back, not copied: a move touches two seats or paths, a copy would take all of them.
            take_back(state, undo, changed)
            refit(fixed, state, undo, changed)
    state.holder[:] = best_holder
    state.path[:] = best_path
    return best_s


@compiled
def _least_s(state: State, chain_s: F64) -> float:
    """Seconds that no order can beat: an origin's trips one after the other in its slots."""
    chain_s[:] = 0.0
    for m in range(len(state.trip_s)):
        chain_s[state.path[m, 0]] += state.trip_s[m]
    most_s = 0.0
    for origin in range(len(chain_s)):
        most_s = max(most_s, chain_s[origin] / state.slots[origin])
    return most_s


@compiled
def order_first_come(fixed: Fixed, state: State, begin_s: F64, end_s: F64) -> bool:
    """Put the sequence in the order in which workers take what is ready; False if that comes to a halt.

    `begin_s` (num_microbatches, ops of each) and `end_s` (num_microbatches,) are working space.
    """
    step_s = simulate(
        state.way,
        state.holder,
        fixed.ops,
        state.op_s,
        fixed.transfer_s,
        fixed.wire_s,
        state.slots,
        NEVER,
        begin_s,
        end_s,
    )
    if step_s == NEVER:
        return False
    width = begin_s.shape[1]
    # A stable sort, so that of equal starts the order stays by microbatch.
    order = np.argsort(begin_s.copy().reshape(begin_s.size), kind="mergesort")
    for at in range(len(order)):
        state.sequence[at] = order[at] // width
        state.op[at] = order[at] % width
    return True


@compiled
def anneal(
    fixed: Fixed,
    graph: I64 | None,
    state: State,
    best: State,
    work: Scratch,
    undo: Undo,
    cooling: Cooling,
    random: U64,
) -> float:
    """Anneal everything on the step's seconds, from `state` with a sequence; the best goes to `best`.

    The best is the shortest step, what is moved added, and of equal ones the smoothest; returns that. `graph` is that
    of `fixed`, by itself so that only the loop is compiled that is needed.
    """
    chain_s = np.zeros(int(fixed.first_chunk[1]))
    now = run_line(fixed, state, work, NEVER) if graph is None else run_graph(fixed, state, work, NEVER)
    now += cooling.evenness * smoothness(work) + state.move_s.sum()
    sort_sequence(state, work)
    # A copy: runs of refused moves overwrite `work`, and moves of the order go by what was accepted.
    waited_s = work.waited_s.copy()
    sequence, op = state.sequence.copy(), state.op.copy()
    begin_s = np.zeros((len(state.trip_s), len(fixed.ops)))
    again_share = min(1.0, _AGAIN_OPS / len(sequence))
    least = NEVER
    kept = NEVER
    for number in range(cooling.num_moves):
        warmth_s = cooling.first_s * (cooling.last_s / cooling.first_s) ** (number / cooling.num_moves)
        at = to = -1
        kind = draw(random)
        if kind < cooling.order_share:
            found = pull_forward(state, waited_s, graph, random)
            at, to = found[0], found[1]
            if at < 0:
                continue
            # An op's new place changes no seat and no path, so nothing has to be refitted.
            changed = NOTHING
        else:
            if kind < cooling.order_share + cooling.seat_share:
                changed = exchange_seats(fixed, state, undo, random)
            else:
                changed = change_paths(fixed, state, undo, cooling.path_shares, random)
            if changed == NOTHING:
                continue
            refit(fixed, state, undo, changed)
        # Drawn first, so that the run below can end as soon as it is clear that the move will be refused.
        threshold = now - warmth_s * np.log(draw(random) + 1e-300)
        # Every microbatch ends after its trip, so smoothness is at least (0.65 + 0.5) mean trips.
        move_s = state.move_s.sum()
        limit_s = threshold - cooling.evenness * 1.1 * state.trip_s.mean() - move_s
        there = NEVER
        is_ordered_anew = False
        # A look at trips alone refuses many a move before a run over all ops.
        if _least_s(state, chain_s) <= limit_s:
            there = (
                run_line(fixed, state, work, limit_s)
                if graph is None
                else run_graph(fixed, state, work, limit_s)
            )
            # New seats or paths may only want another order; a new order that blocks is simply a bad one.
            if there == BLOCKED and at < 0 and draw(random) < again_share:
                sequence[:] = state.sequence
                op[:] = state.op
                is_ordered_anew = True
                if order_first_come(fixed, state, begin_s, work.input_s):
                    there = (
                        run_line(fixed, state, work, limit_s)
                        if graph is None
                        else run_graph(fixed, state, work, limit_s)
                    )
            if there == BLOCKED:
                there = NEVER
            if there < NEVER:
                there += move_s
                # The best is told by length; what is accepted also by smoothness, for length alone gives no slope.
                kept = there + _TIE * smoothness(work)
                there += cooling.evenness * smoothness(work)
        if there <= threshold:
            now = there
            # Links serve in sequence order, so the sequence is kept in order of time.
            sort_sequence(state, work)
            waited_s[:] = work.waited_s
            if kept < least:
                least = kept
                best.holder[:] = state.holder
                best.path[:] = state.path
                best.sequence[:] = state.sequence
                best.op[:] = state.op
        elif at >= 0:
            shift(state, to, at)
        else:
            if is_ordered_anew:
                state.sequence[:] = sequence
                state.op[:] = op
            take_back(state, undo, changed)
            refit(fixed, state, undo, changed)
    return least
