"""Small changes of a routing that keep it legal, each with its undoing, as compiled loops.

Rules of this file
- A move keeps how often each stage is visited, how many microbatches start where, and each path's rules; a routing
  that is legal stays legal. Only slots are left to `run_sequence`.
- A move touches two seats or two paths at most, so undoing it is putting these back.
"""

from typing import NamedTuple

import numpy as np

from skein.plan.route.kernels.arrays import FOLLOWERS, U64, Fixed, State
from skein.plan.route.kernels.compiled import compiled
from skein.plan.route.problem import F64, I64

NOTHING, SEATS, PATHS = 0, 1, 2
"""Parts of a routing that a move can change."""
_TRIES = 6


class Undo(NamedTuple):
    """seats: (2,) exchanged; microbatches: (2,) whose path changed; rows: (2, num_hops + 1) what it was."""

    seats: I64
    microbatches: I64
    rows: I64


def undo_space(state: State) -> Undo:
    """Room for one move's undoing."""
    two = np.zeros(2, np.int64)
    return Undo(seats=two, microbatches=two.copy(), rows=np.zeros((2, state.path.shape[1]), np.int64))


def dice(seed: int) -> U64:
    """State of the generator that the compiled loops draw from; `seed` is any 64-bit number."""
    return np.array([(seed | 1) & (2**64 - 1)], np.uint64)


@compiled
def draw(random: U64) -> float:
    """A number in [0, 1). Source: xorshift64 (Marsaglia 2003, "Xorshift RNGs")."""
    x = random[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    random[0] = x
    return float(x >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@compiled
def below(random: U64, limit: int) -> int:
    """A whole number in [0, limit)."""
    return int(draw(random) * limit)


@compiled
def is_legal(fixed: Fixed, path: I64, m: int) -> bool:
    """Whether the stages of a microbatch's path are distinct and keep to the limits on swaps and jumps."""
    front = 0
    swaps = 0
    end = fixed.num_hops if fixed.is_loop else fixed.num_hops + 1
    for hop in range(1, end):
        stage = fixed.stage_of[path[m, hop]]
        for earlier in range(1, hop):
            if fixed.stage_of[path[m, earlier]] == stage:
                return False
        if stage < front:
            swaps += 1
            if front - stage > 1:
                return False
        elif stage - front > fixed.max_jump:
            return False
        front = max(front, stage)
    return swaps <= fixed.max_swaps


@compiled
def _sort_stages(fixed: Fixed, path: I64, m: int) -> None:
    """Put a path's hops between its ends in ascending order of stages."""
    for hop in range(2, fixed.num_hops):
        chunk = path[m, hop]
        to = hop - 1
        while to >= 1 and fixed.stage_of[path[m, to]] > fixed.stage_of[chunk]:
            path[m, to + 1] = path[m, to]
            to -= 1
        path[m, to + 1] = chunk


@compiled
def _holds_stage(fixed: Fixed, state: State, worker: int, stage: int, except_chunk: int) -> bool:
    """Whether `worker` holds a chunk of that stage, or of one that is to be apart from it."""
    for chunk in range(fixed.apart_chunks[stage, 0], fixed.apart_chunks[stage, 1]):
        if chunk != except_chunk and state.holder[chunk] == worker:
            return True
    return False


@compiled
def _may_sit(fixed: Fixed, state: State, seat: int, worker: int) -> bool:
    """Whether `worker` has room for the chunk of `seat` and holds none of its stage, or of those apart from it, yet."""
    if seat >= len(fixed.stage_of):
        return True
    stage = fixed.stage_of[seat]
    return fixed.slots[worker, stage] >= 1 and not _holds_stage(fixed, state, worker, stage, seat)


@compiled
def exchange_seats(fixed: Fixed, state: State, undo: Undo, random: U64) -> int:
    """Two workers, or a worker and an idle one, take each other's place."""
    a, b = below(random, len(fixed.stage_of)), below(random, len(state.holder))
    first, second = state.holder[a], state.holder[b]
    if first == second:
        return NOTHING
    undo.seats[0], undo.seats[1] = a, b
    state.holder[a], state.holder[b] = second, first
    if _may_sit(fixed, state, a, second) and _may_sit(fixed, state, b, first):
        return SEATS
    state.holder[a], state.holder[b] = first, second
    return NOTHING


@compiled
def _remember(state: State, undo: Undo, a: int, b: int) -> None:
    undo.microbatches[0], undo.microbatches[1] = a, b
    for hop in range(state.path.shape[1]):
        undo.rows[0, hop] = state.path[a, hop]
        undo.rows[1, hop] = state.path[b, hop]


@compiled
def take_back(state: State, undo: Undo, changed: int) -> None:
    """Undo a move."""
    if changed == SEATS:
        a, b = undo.seats[0], undo.seats[1]
        state.holder[a], state.holder[b] = state.holder[b], state.holder[a]
    else:
        for hop in range(state.path.shape[1]):
            state.path[undo.microbatches[0], hop] = undo.rows[0, hop]
            state.path[undo.microbatches[1], hop] = undo.rows[1, hop]


@compiled
def _exchange_chunks(fixed: Fixed, state: State, random: U64, a: int, b: int) -> bool:
    """Two microbatches that visit one stage at different chunks exchange these."""
    mine = below(random, fixed.num_hops + (0 if fixed.is_loop else 1) - 1) + 1
    stage = fixed.stage_of[state.path[a, mine]]
    for hop in range(1, fixed.num_hops + (0 if fixed.is_loop else 1)):
        if fixed.stage_of[state.path[b, hop]] == stage:
            chunk = state.path[a, mine]
            state.path[a, mine] = state.path[b, hop]
            state.path[b, hop] = chunk
            return bool(state.path[a, mine] != chunk)
    return False


@compiled
def _move_visit(fixed: Fixed, state: State, random: U64, a: int) -> bool:
    """A microbatch visits another chunk of a stage."""
    hop = below(random, fixed.num_hops + (0 if fixed.is_loop else 1) - 1) + 1
    stage = fixed.stage_of[state.path[a, hop]]
    begin, end = fixed.first_chunk[stage], fixed.first_chunk[stage + 1]
    chunk = begin + below(random, end - begin)
    if chunk == state.path[a, hop]:
        return False
    state.path[a, hop] = chunk
    return True


@compiled
def _exchange_stages(fixed: Fixed, state: State, random: U64, a: int, b: int) -> bool:
    """Two microbatches each leave out a stage that the other visits from now on."""
    if fixed.num_hops < 2:
        return False
    mine, theirs = below(random, fixed.num_hops - 1) + 1, below(random, fixed.num_hops - 1) + 1
    chunk, other = state.path[a, mine], state.path[b, theirs]
    if fixed.stage_of[chunk] == fixed.stage_of[other]:
        return False
    state.path[a, mine], state.path[b, theirs] = other, chunk
    _sort_stages(fixed, state.path, a)
    _sort_stages(fixed, state.path, b)
    return is_legal(fixed, state.path, a) and is_legal(fixed, state.path, b)


@compiled
def _visits(fixed: Fixed, state: State, stage: int) -> int:
    count = 0
    for m in range(len(state.trip_s)):
        for hop in range(1, fixed.num_hops):
            if fixed.stage_of[state.path[m, hop]] == stage:
                count += 1
    return count


@compiled
def _trade_stage(fixed: Fixed, state: State, random: U64, a: int) -> bool:
    """A microbatch visits a stage instead of another that has one visit more, where visits cannot all be equal."""
    if fixed.num_hops < 2:
        return False
    hop = below(random, fixed.num_hops - 1) + 1
    stage = fixed.stage_of[state.path[a, hop]]
    last = len(state.reduce_s) - 1 if fixed.is_loop else len(state.reduce_s) - 2
    other = below(random, last) + 1
    if other == stage or _visits(fixed, state, stage) <= _visits(fixed, state, other):
        return False
    begin, end = fixed.first_chunk[other], fixed.first_chunk[other + 1]
    state.path[a, hop] = begin + below(random, end - begin)
    _sort_stages(fixed, state.path, a)
    return is_legal(fixed, state.path, a)


@compiled
def _exchange_bodies(fixed: Fixed, state: State, a: int, b: int, begin: int) -> bool:
    """Two microbatches exchange their hops from `begin` on (0: all but the origin's loss)."""
    for hop in range(begin, fixed.num_hops + (0 if fixed.is_loop else 1)):
        chunk = state.path[a, hop]
        state.path[a, hop] = state.path[b, hop]
        state.path[b, hop] = chunk
    if fixed.is_loop:
        state.path[a, fixed.num_hops] = state.path[a, 0]
        state.path[b, fixed.num_hops] = state.path[b, 0]
    return begin <= 1 or (is_legal(fixed, state.path, a) and is_legal(fixed, state.path, b))


@compiled
def _exchange_neighbours(fixed: Fixed, state: State, random: U64, a: int) -> bool:
    """A microbatch visits two stages in the other order."""
    if fixed.num_hops < 3 or fixed.max_swaps == 0:
        return False
    hop = below(random, fixed.num_hops - 2) + 1
    chunk = state.path[a, hop]
    state.path[a, hop] = state.path[a, hop + 1]
    state.path[a, hop + 1] = chunk
    return is_legal(fixed, state.path, a)


@compiled
def change_paths(fixed: Fixed, state: State, undo: Undo, shares: F64, random: U64) -> int:
    """Make a move of a kind drawn by `shares` (6,), cumulative; NOTHING if it would not be legal."""
    num_microbatches = len(state.trip_s)
    has_body = fixed.num_hops + (0 if fixed.is_loop else 1) > 1
    if not has_body:
        return NOTHING
    kind = draw(random)
    a, b = below(random, num_microbatches), below(random, num_microbatches)
    _remember(state, undo, a, b)
    if kind < shares[0]:
        is_done = a != b and _exchange_chunks(fixed, state, random, a, b)
    elif kind < shares[1]:
        # Twice the same one: so undoing and refitting leave `b` alone.
        _remember(state, undo, a, a)
        if fixed.has_spare_visits and draw(random) < 0.3:
            is_done = _trade_stage(fixed, state, random, a)
        else:
            is_done = _move_visit(fixed, state, random, a)
    elif kind < shares[2]:
        is_done = a != b and _exchange_stages(fixed, state, random, a, b)
    elif kind < shares[3]:
        is_done = a != b and _exchange_bodies(fixed, state, a, b, below(random, 2))
    elif kind < shares[4]:
        is_done = a != b and _exchange_bodies(fixed, state, a, b, below(random, fixed.num_hops) + 1)
    else:
        _remember(state, undo, a, a)
        is_done = _exchange_neighbours(fixed, state, random, a)
    if is_done:
        return PATHS
    # Tried in place and taken back: a copy of all paths would cost more.
    take_back(state, undo, PATHS)
    return NOTHING


@compiled
def _awaits(graph: I64 | None, op: int, other: int) -> bool:
    """Whether an op waits for an other one of its microbatch, or at least comes after it."""
    if graph is None:
        return True
    for follower in graph[other, FOLLOWERS:]:  # noqa: SIM110 (machine code has no generators)
        if follower == op:
            return True
    return False


@compiled
def pull_forward(state: State, waited_s: F64, graph: I64 | None, random: U64) -> I64:
    """An op that waited for its worker is put before up to three others there: (from, to), or (-1, -1).

    It stays behind those of its microbatch that it waits for; `graph` as in `Fixed`.
    """
    found = np.full(2, -1)
    for _ in range(_TRIES):
        at = below(random, len(state.sequence))
        # An op that began with its input gains nothing from an earlier place.
        if waited_s[at] <= 0.0:
            continue
        m, op = state.sequence[at], state.op[at]
        worker = state.holder[state.way[m, op]]
        # Past several ops at once, for passing just one of them may make the step longer.
        left = below(random, 3)
        to = -1
        for before in range(at - 1, -1, -1):
            other, its_op = state.sequence[before], state.op[before]
            if other == m and _awaits(graph, op, its_op):
                break
            if state.holder[state.way[other, its_op]] == worker:
                to = before
                if left == 0:
                    break
                left -= 1
        if to >= 0:
            shift(state, at, to)
            found[0], found[1] = at, to
            return found
    return found


@compiled
def shift(state: State, at: int, to: int) -> None:
    """Put the op at place `at` of the sequence to place `to`; those between make room."""
    m, op = state.sequence[at], state.op[at]
    step = -1 if to < at else 1
    for place in range(at, to, step):
        state.sequence[place], state.op[place] = state.sequence[place + step], state.op[place + step]
    state.sequence[to], state.op[to] = m, op
