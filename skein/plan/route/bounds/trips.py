"""Round trips of one microbatch over workers, whoever holds which stage: what bounds are made of.

Everything here relaxes a `Problem`: at each hop a worker is taken at its cheapest stage among those that a legal path
can have there, and only what every placement must obey is kept (a worker holds no more chunks than its share).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from skein.plan.route.problem import F64, Problem

FAR = np.inf
Bools = npt.NDArray[np.bool_]
MOST_CLOSED = 300
"""Workers up to which shortest trips end where they began; a few seconds of cubic work."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trips:
    """Costs of trips; a trip is `num_hops` workers and then the one that computes the loss.

    Args:
        num_hops: K; hop 0 is the origin.
        is_loop: the loss is computed by the origin; otherwise by a worker of its own.
        is_single: a worker holds one chunk at most, so that the workers of a trip differ.
        forward_s: (K, num_workers) least of a worker as hop h on the way there; infinite where it can hold no stage of
            that hop. Ops that are off the way count for nothing, which only lowers bounds.
        backward_s: same, on the way back.
        both_s: same, both of one stage.
        loss_s: (num_workers,).
        link_s: (num_workers, num_workers) one way; the diagonal is infinite if `is_single`.
        slots: (2, num_workers) most microbatches that a worker may hold as origin, and at any later hop.
    """

    num_hops: int
    is_loop: bool
    is_single: bool
    forward_s: F64
    backward_s: F64
    both_s: F64
    loss_s: F64
    link_s: F64
    slots: F64

    def pair_s(self) -> F64:
        """(num_workers, num_workers) a link and back."""
        both_ways_s: F64 = self.link_s + self.link_s.T
        return both_ways_s

    def least_s(self) -> F64:
        """(num_workers,) the shortest round trip from each origin, over walks that may come back to a worker."""
        trip_s: F64 = self.both_s[0] + self.loss_least_s()
        return trip_s

    def loss_least_s(self) -> F64:
        """(num_workers,) the part of the shortest round trip after the origin's forward and before its backward."""
        pair_s = self.pair_s()
        if not self.is_loop:
            rest_s: F64 = (pair_s + self.loss_s).min(axis=1)
            for hop in range(self.num_hops - 1, 0, -1):
                rest_s = (pair_s + (self.both_s[hop] + rest_s)).min(axis=1)
            return rest_s
        if self.num_hops == 1:
            return self.loss_s.copy()
        if len(pair_s) > MOST_CLOSED:
            return self._open_least_s(pair_s)
        least_s: F64 = (pair_s.T + self.both_s[1][:, None] + self.closing_s()[0]).min(axis=0)
        return least_s

    def closing_s(self) -> tuple[F64, ...]:
        """For hops 1 ... K - 1, [w, o]: least from the end of w's forward to its backward's start, the loss at o.

        Of a `LOOP`; walks may come back to a worker, but not to the origin before the loss.
        """
        pair_s = self.pair_s()
        found = [pair_s + self.loss_s]
        for hop in range(self.num_hops - 1, 1, -1):
            closed_s = _least_sum(pair_s, self.both_s[hop][:, None] + found[-1])
            if self.is_single:
                np.fill_diagonal(closed_s, FAR)
            found.append(closed_s)
        return tuple(reversed(found))

    def rests_s(self) -> tuple[F64, ...]:
        """For hops 1 ... K - 1, [w, o]: least from the end of w's forward to its backward's start, in a trip from o."""
        if self.is_loop:
            return self.closing_s() if self.num_hops > 1 else ()
        pair_s, size = self.pair_s(), len(self.loss_s)
        found: list[F64] = [(pair_s + self.loss_s).min(axis=1)]
        for hop in range(self.num_hops - 1, 1, -1):
            found.append((pair_s + (self.both_s[hop] + found[-1])).min(axis=1))
        return tuple(np.repeat(x[:, None], size, axis=1) for x in reversed(found[: self.num_hops - 1]))

    def ways_s(self) -> tuple[tuple[F64, F64], ...]:
        """For hops 1 ... K - 1, [w, o]: least from the step's start to w's forward and from its backward to the end."""
        out_s, home_s = self.forward_s[0][None, :] + self.link_s.T, self.link_s + self.backward_s[0][None, :]
        found = [(out_s, home_s)]
        for hop in range(1, self.num_hops - 1):
            out_s = _least_sum(self.link_s.T, self.forward_s[hop][:, None] + out_s)
            home_s = _least_sum(self.link_s, self.backward_s[hop][:, None] + home_s)
            found.append((out_s, home_s))
        return tuple(found[: self.num_hops - 1])

    def _open_least_s(self, pair_s: F64) -> F64:
        """The same if the last link may lead to anybody: cubic work becomes quadratic."""
        rest_s = pair_s.min(axis=1)
        for hop in range(self.num_hops - 1, 0, -1):
            rest_s = (pair_s + (self.both_s[hop] + rest_s)).min(axis=1)
        whole_s: F64 = rest_s + self.loss_s
        return whole_s

    def head_s(self, is_origin: Bools | None = None) -> F64:
        """(num_workers,) from the start of the step to a worker's first forward as a later hop, at least.

        `is_origin` (num_workers,): who may be an origin; None: all.
        """
        forward_s = self.forward_s[0] if is_origin is None else np.where(is_origin, self.forward_s[0], FAR)
        head_s: F64 = (forward_s[:, None] + self.link_s).min(axis=0)
        return head_s

    def tail_s(self, is_origin: Bools | None = None) -> F64:
        """(num_workers,) from a worker's last backward as a later hop to the end of the step, at least."""
        backward_s = self.backward_s[0] if is_origin is None else np.where(is_origin, self.backward_s[0], FAR)
        tail_s: F64 = (self.link_s + backward_s).min(axis=1)
        return tail_s


def trips_of(problem: Problem) -> Trips:
    """The trips of `problem`."""
    is_single = problem.most_chunks == 1
    link_s = problem.transfer_s.copy()
    if is_single:
        np.fill_diagonal(link_s, FAR)
    stages = stages_at(problem)
    holds = problem.slots > 0
    later = sorted({stage for at in stages[1:] for stage in at})
    slots = np.stack([problem.slots[:, 0], problem.slots[:, later].max(axis=1, initial=0)])
    return Trips(
        num_hops=problem.num_hops,
        is_loop=problem.layout.comes_back,
        is_single=is_single,
        forward_s=_least(problem.out_s, holds, stages),
        backward_s=_least(problem.home_s, holds, stages),
        both_s=_least(problem.out_s + problem.home_s, holds, stages),
        loss_s=problem.end_s[:, -1],
        link_s=link_s,
        slots=np.minimum(problem.num_microbatches, slots).astype(np.float64),
    )


def stages_at(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Stages that some legal path has at each of its hops; the loss hop of a `LINE` apart."""
    last = problem.num_stages - 1
    is_line = not problem.layout.comes_back
    top = last - is_line
    # (highest stage, whether the one below it was visited, swaps): all that decides what may follow.
    layers = [{(0, True, 0): {0}}]
    for _ in range(problem.num_hops - 1):
        layer: dict[tuple[int, bool, int], set[int]] = {}
        for front, is_below_visited, swaps in layers[-1]:
            for stage in range(front + 1, min(front + problem.max_jump, top) + 1):
                layer.setdefault((stage, stage == front + 1, swaps), set()).add(stage)
            if not is_below_visited and swaps < problem.max_swaps:
                layer.setdefault((front, True, swaps + 1), set()).add(front - 1)
        layers.append(layer)
    alive = {key for key in layers[-1] if not is_line or last - key[0] <= problem.max_jump}
    found = [_of(layers[-1], alive)]
    for layer in reversed(layers[:-1]):
        alive = {key for key in layer if _nexts(key, problem, top) & alive}
        found.append(_of(layer, alive))
    return tuple(reversed(found))


def least_visits(problem: Problem, stage: int) -> int:
    """Least visits of a stage in any plan: skippable ones are alike, but which of them has one more is free."""
    if stage not in problem.skippable:
        return problem.num_microbatches
    fixed = problem.num_stages - len(problem.skippable)
    return problem.num_microbatches * (problem.path_len - fixed) // len(problem.skippable)


def _nexts(key: tuple[int, bool, int], problem: Problem, top: int) -> set[tuple[int, bool, int]]:
    front, is_below_visited, swaps = key
    ups = range(front + 1, min(front + problem.max_jump, top) + 1)
    found = {(stage, stage == front + 1, swaps) for stage in ups}
    if not is_below_visited and swaps < problem.max_swaps:
        found.add((front, True, swaps + 1))
    return found


def _of(layer: dict[tuple[int, bool, int], set[int]], alive: set[tuple[int, bool, int]]) -> tuple[int, ...]:
    return tuple(sorted({stage for key in alive for stage in layer[key]}))


def _least(seconds: F64, holds: Bools, stages: tuple[tuple[int, ...], ...]) -> F64:
    """(num_hops, num_workers) least over the stages of each hop; infinite where none can be held or reached."""
    allowed = np.where(holds, seconds, FAR)
    return np.array([allowed[:, list(at)].min(axis=1) if at else np.full(len(seconds), FAR) for at in stages])


def _least_sum(first_s: F64, then_s: F64) -> F64:
    """Least of `first_s[a, x] + then_s[x, b]` over x, row by row to keep memory small."""
    return np.stack([(row[:, None] + then_s).min(axis=0) for row in first_s])
