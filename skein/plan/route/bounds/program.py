"""Whether a step of T seconds is out of reach: a linear program over the lots of all origins at once.

Every plan picks num_origins different workers, a lot for each (`skein.plan.route.bounds.lots`), and gives the other
workers at most one role each: later hops, or the loss of a `LINE`. Then, with x_w = 1 where w has later hops,

- *work*: later hops of all lots at w take f + b each, and idle gaps (`skein.plan.route.bounds.catalogue`); they fit
  between the soonest arrival of a forward and the latest way home of a backward, a window of T - head_w - tail_w,
  times x_w;
- *visits*: so they are no more than the whole number of f + b in that window;
- *ramps*: before a worker's first backward can start it runs forwards only, no more than it has slots, and after its
  last forward can end backwards only, no more than slots; the rest of both times it idles, and the window is less;
- *slots*: they hold slots of w from forward to backward, within that window, each slot but the first taken a forward
  later and left a backward sooner than the one before;
- *losses* of a `LINE` likewise.

At prices of these seconds a plan pays, for every choice of roles, at least the cheapest lots of its origins less the
prices of the windows it opens: an assignment problem. If the least of that is above zero, no plan exists. That is all
the proof; the program only looks for prices, so its rounding cannot make the answer wrong.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from skein.plan.route.bounds.catalogue import Catalogue, Prices, offers
from skein.plan.route.bounds.lots import alone_s, cheapest_lots
from skein.plan.route.bounds.trips import FAR, Bools, Trips
from skein.plan.route.problem import F64, Problem

_NUM_POINTS = 600
_PROOF = 1e-7
"""Payment that is no proof yet, as a part of the prices' sum times T: far more than rounding adds up to."""
_MOST_COLUMNS = 250
"""Kept from one question to the next."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Column:
    """A lot of `count` microbatches at `origin`, and the seconds it asks of every worker; see `Prices`."""

    origin: int
    count: int
    end_s: float
    work_s: F64
    visits: F64
    hold_s: F64
    loss_s: F64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Windows:
    """Room that each worker has for a role, by the end of the step; see `Prices`."""

    work_s: F64
    visits: F64
    hold_s: F64
    loss_s: F64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """Plans in which the workers of `origins` are origins and those of `others` are none.

    Args:
        last: prices that proved most where this case comes from, and the lots' prices at them.
    """

    origins: frozenset[int]
    others: frozenset[int]
    last: "Priced"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Priced:
    """Cost of the cheapest lots at `prices`: lots[count] is (num_workers,)."""

    prices: Prices
    lots: dict[int, F64]


@dataclass(slots=True, kw_only=True, eq=False)
class Program:
    """The program of one problem; `is_proven_beyond` may be asked for any ends, in any order."""

    problem: Problem
    trips: Trips
    listed: Catalogue
    columns: list[Column] = field(default_factory=list)
    num_rounds_left: int = 0
    ramps: "Ramps" = field(init=False)
    twins: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.ramps = ramps_of(self.problem, self.trips)
        self.twins = twins_of(self.problem)

    def is_proven_beyond(self, end_s: float, *, num_rounds: int, may_split: bool) -> bool:
        """Whether no plan ends by `end_s`. False may mean that it is not known.

        Args:
            end_s: the step's end.
            num_rounds: programs that may be solved.
            may_split: whether to decide cases on who is an origin, or to leave that to broken shares.
        """
        self.num_rounds_left = num_rounds
        # A lot that ends sooner is one of this step too, so answers to other questions are a start.
        self.columns = [column for column in self.columns if column.end_s <= end_s][-_MOST_COLUMNS:]
        size = self.problem.num_workers
        even, zero = np.ones(size) / size, np.zeros(size)
        first = self._priced(Prices(work=zero, visit=zero, hold=zero, loss=zero), end_s)
        self._priced(Prices(work=even, visit=zero, hold=zero, loss=even), end_s)
        open_cases = [Case(origins=frozenset(), others=frozenset(), last=first)]
        while open_cases:
            case = open_cases.pop()
            windows = windows_of(self.trips, self.ramps, end_s, case)
            if self._is_paid(case.last, windows, case, end_s):
                continue
            parts = self._settle(case, windows, end_s)
            if parts is None or (parts and not may_split):
                return False
            open_cases += parts
        return True

    def _settle(self, case: Case, windows: Windows, end_s: float) -> list[Case] | None:
        """The cases that `case` falls into, none if it holds no plan; None if nothing more can be proven."""
        priced = case.last
        while self.num_rounds_left > 0:
            self.num_rounds_left -= 1
            usable = [column for column in self.columns if column.origin not in case.others]
            solved = self._solve(usable, windows, case)
            if solved is None:
                return None
            excess, prices, shares = solved
            # The lots fit, so no price speaks against this case as a whole; its parts may still be empty.
            if excess <= _PROOF:
                return cases_of(case, shares, self.twins, priced)
            num_before = len(self.columns)
            priced = self._priced(prices, end_s)
            if self._is_paid(priced, windows, case, end_s):
                return []
            if len(self.columns) == num_before:
                return None
        return None

    def _is_paid(self, priced: Priced, windows: Windows, case: Case, end_s: float) -> bool:
        prices = priced.prices
        total = float(prices.work.sum() + prices.visit.sum() + prices.hold.sum() + prices.loss.sum())
        return self._least(priced, windows, case) > _PROOF * end_s * total

    def _priced(self, prices: Prices, end_s: float) -> Priced:
        """The cheapest lots at `prices`; they become columns."""
        of = offers(self.trips, self.listed, prices, end_s, _NUM_POINTS)
        lots_price = {}
        for count in sorted(set(self.problem.num_by_origin), reverse=True):
            lots_price[count] = np.full(self.problem.num_workers, FAR)
            fits = alone_s(self.trips, self.trips.least_s(), count) <= end_s
            for slots in np.unique(self.trips.slots[0][fits]):
                workers = np.flatnonzero(fits & (self.trips.slots[0] == slots))
                lots = cheapest_lots(self.trips, of.tariff, workers, count, end_s)
                lots_price[count][workers] = lots.price
                for i, origin in enumerate(workers):
                    if np.isfinite(lots.price[i]):
                        mixed = [
                            x for length in lots.length_s[i] for x in of.mixture(int(origin), float(length))
                        ]
                        self.columns.append(self._column(int(origin), count, end_s, mixed))
        return Priced(prices=prices, lots=lots_price)

    def _column(self, origin: int, count: int, end_s: float, mixed: list[tuple[int, float]]) -> Column:
        trips, size = self.trips, self.problem.num_workers
        rows = np.array([row for row, _ in mixed])
        shares = np.array([share for _, share in mixed])
        work_s, visits, hold_s, loss_s = np.zeros((4, size))
        for hop in range(1, trips.num_hops):
            # `np.add.at`, for one worker may be on several of the mixed trips.
            worker = self.listed.workers[rows, hop]
            np.add.at(work_s, worker, shares * trips.both_s[hop][worker])
            np.add.at(visits, worker, shares)
            np.add.at(hold_s, worker, shares * self.listed.held_s[rows, hop])
        if trips.num_hops > 1:
            np.add.at(
                work_s, self.listed.workers[rows, trips.num_hops - 1], shares * self.listed.idle_s[rows]
            )
        if not trips.is_loop:
            worker = self.listed.workers[rows, -1]
            np.add.at(loss_s, worker, shares * trips.loss_s[worker])
        return Column(
            origin=origin,
            count=count,
            end_s=end_s,
            work_s=work_s,
            visits=visits,
            hold_s=hold_s,
            loss_s=loss_s,
        )

    def _least(self, priced: Priced, windows: Windows, case: Case) -> float:
        """The cheapest assignment of roles to workers."""
        from scipy.optimize import linear_sum_assignment

        problem, prices = self.problem, priced.prices
        later = -(prices.work * windows.work_s + prices.visit * windows.visits + prices.hold * windows.hold_s)
        roles = [priced.lots[count] for count in problem.num_by_origin]
        num_last = 0 if self.trips.is_loop else problem.stage_sizes[-1]
        roles += [-prices.loss * windows.loss_s] * num_last
        roles += [later] * (problem.num_chunks - len(roles))
        roles += [np.zeros(problem.num_workers)] * (problem.num_workers - problem.num_chunks)
        costs = np.array(roles)
        costs[: problem.stage_sizes[0], sorted(case.others)] = FAR
        costs[problem.stage_sizes[0] :, sorted(case.origins)] = FAR
        far = 1e12 * (1.0 + float(np.abs(costs[np.isfinite(costs)]).max()))
        costs = np.where(np.isfinite(costs), costs, far)
        return float(costs[linear_sum_assignment(costs)].sum())

    def _solve(self, columns: list[Column], windows: Windows, case: Case) -> tuple[float, Prices, F64] | None:
        """By how many seconds the best mixture of `columns` overruns its windows, and the prices that say so."""
        from scipy.optimize import linprog

        problem, size, num = self.problem, self.problem.num_workers, len(columns)
        num_last = 0 if self.trips.is_loop else problem.stage_sizes[-1]
        counts = sorted(set(problem.num_by_origin), reverse=True)
        work, last, over = num, num + size, num + 2 * size
        worker = np.arange(size)
        # Rows by worker: work, visits, slots, losses, at most one role; last, how many have later hops.
        # One overrun loosens all windows alike, which keeps the sum of prices at 1 or below.
        above = np.zeros((5 * size + 1, over + 1))
        for begin, asked, window, role in (
            (0, "work_s", windows.work_s, work),
            (size, "visits", windows.visits, work),
            (2 * size, "hold_s", windows.hold_s, work),
            (3 * size, "loss_s", windows.loss_s, last),
        ):
            if num:
                above[begin : begin + size, :num] = np.array([getattr(column, asked) for column in columns]).T
            above[begin + worker, role + worker] = -window
            above[begin : begin + size, over] = -1.0
        above[4 * size + np.array([column.origin for column in columns], int), np.arange(num)] = 1.0
        above[4 * size + worker, work + worker] = above[4 * size + worker, last + worker] = 1.0
        above[5 * size, work:last] = 1.0
        limits = np.concatenate(
            [np.zeros(4 * size), np.ones(size), [problem.num_chunks - problem.stage_sizes[0] - num_last]]
        )
        must = sorted(case.origins)
        equal = np.zeros((len(counts) + 1 + len(must), over + 1))
        for i, count in enumerate(counts):
            equal[i, :num] = [column.count == count for column in columns]
        equal[len(counts), last:over] = 1.0
        for i, origin in enumerate(must):
            equal[len(counts) + 1 + i, :num] = [column.origin == origin for column in columns]
        wanted = [*(problem.num_by_origin.count(count) for count in counts), num_last, *(1 for _ in must)]
        aim = np.zeros(over + 1)
        aim[over] = 1.0
        found = linprog(aim, A_ub=above, b_ub=limits, A_eq=equal, b_eq=wanted, method="highs")
        if found.status != 0:
            return None
        # Rounding may turn a sign, and only prices of at least 0 prove anything.
        price = np.maximum(0.0, -found.ineqlin.marginals)
        shares = np.zeros(size)
        np.add.at(shares, [column.origin for column in columns], found.x[:num])
        prices = Prices(
            work=price[:size],
            visit=price[size : 2 * size],
            hold=price[2 * size : 3 * size],
            loss=price[3 * size : 4 * size],
        )
        return float(found.fun), prices, shares


def twins_of(problem: Problem) -> list[list[int]]:
    """Workers in groups, ascending, within which any two may change places and nothing is different."""
    groups: list[list[int]] = []
    for worker in range(problem.num_workers):
        for group in groups:
            if _are_twins(problem, group[0], worker):
                group.append(worker)
                break
        else:
            groups.append([worker])
    return groups


def _are_twins(problem: Problem, a: int, b: int) -> bool:
    order = np.arange(problem.num_workers)
    order[[a, b]] = b, a
    rows = (problem.forward_s, problem.backward_s, problem.loss_s, problem.slots)
    return all(np.array_equal(x[order], x) for x in rows) and np.array_equal(
        problem.transfer_s[np.ix_(order, order)], problem.transfer_s
    )


def cases_of(case: Case, shares: F64, twins: list[list[int]], last: Priced) -> list[Case] | None:
    """Cases that `case` falls into, by a worker whose share as an origin is broken; if all are whole, one case in which
    they are decided, and the others. None if all were decided already.

    Of twins the first ones are the origins, as may be said without loss.
    """

    def part(origins: Iterable[int], others: Iterable[int]) -> Case:
        return Case(origins=case.origins | set(origins), others=case.others | set(others), last=last)

    broken = [
        (abs(float(shares[group].sum()) % 1.0 - 0.5), group)
        for group in twins
        if (np.abs(shares[group] - np.round(shares[group])) > 1e-6).any()
    ]
    if broken:
        # The least decided group: both its cases differ most from this one.
        _, group = min(broken)
        undecided = [worker for worker in group if worker not in case.origins and worker not in case.others]
        decided = sum(worker in case.origins for worker in group)
        place = min(int(float(shares[group].sum()) - decided + 1e-6), len(undecided) - 1)
        return [part((), undecided[place:]), part(undecided[: place + 1], ())]
    undecided = [w for w in range(len(shares)) if w not in case.origins and w not in case.others]
    if not undecided:
        return None
    chosen = [worker for worker in undecided if shares[worker] > 0.5]
    rest = [worker for worker in undecided if shares[worker] <= 0.5]
    return [*(part(chosen[:i], [worker]) for i, worker in enumerate(chosen)), part(chosen, rest)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ramps:
    """Limits that keep workers from working at both ends of a step.

    Args:
        head_s: [hop, worker, origin] least from the step's start to a forward; of hops 1 ... K - 1.
        rest_s: same, from a forward's end to its backward's start.
        tail_s: same, from a backward's end to the step's end.
        out_s: (num_workers,) all forwards that a worker's slots hold, at most; `home_s`: all backwards.
    """

    head_s: F64
    rest_s: F64
    tail_s: F64
    out_s: F64
    home_s: F64


def ramps_of(problem: Problem, trips: Trips) -> Ramps:
    """The ramps of `problem`."""
    ways, stages = trips.ways_s(), list(problem.skippable)
    shape = (trips.num_hops - 1, problem.num_workers, problem.num_workers)
    return Ramps(
        head_s=np.array([head_s for head_s, _ in ways]).reshape(shape),
        rest_s=np.array(trips.rests_s()).reshape(shape),
        tail_s=np.array([tail_s for _, tail_s in ways]).reshape(shape),
        out_s=trips.slots[1] * problem.forward_s[:, stages].max(axis=1, initial=0.0),
        home_s=trips.slots[1] * problem.backward_s[:, stages].max(axis=1, initial=0.0),
    )


def windows_of(trips: Trips, ramps: Ramps, end_s: float, case: Case) -> Windows:
    """See the top of the file; who is no origin sends no microbatch and gets none back."""
    may_be = np.ones(len(trips.loss_s), np.bool_)
    may_be[sorted(case.others)] = False
    loss_s = np.maximum(0.0, end_s - trips.head_s(may_be) - trips.tail_s(may_be))
    if trips.num_hops == 1:
        nothing = np.zeros(len(loss_s))
        return Windows(work_s=nothing, visits=nothing, hold_s=nothing, loss_s=loss_s)
    head_s = ramps.head_s[:, :, may_be].min(axis=(0, 2), initial=FAR)
    tail_s = ramps.tail_s[:, :, may_be].min(axis=(0, 2), initial=FAR)
    open_s = np.maximum(0.0, end_s - head_s - tail_s)
    both_s = trips.both_s[1:].min(axis=0)
    both_s = np.where(np.isfinite(both_s), both_s, 0.0)
    idle_s = _ramp_idle_s(trips, ramps, end_s, may_be, head_s, tail_s)
    slots = trips.slots[1]
    hold_s = np.zeros(len(open_s))
    # Each further slot opens later and closes sooner, so using all of them need not hold most.
    for used in range(1, int(slots.max(initial=0)) + 1):
        held_s = used * open_s - used * (used - 1) / 2 * both_s
        hold_s = np.where(used <= slots, np.maximum(hold_s, held_s), hold_s)
    visits = np.floor(
        np.maximum(0.0, open_s - idle_s.sum(axis=0)) / np.maximum(both_s, 1e-12) * (1 + 1e-12) + 1e-9
    )
    # A short gap may be part of each ramp's idle time, which must not count twice.
    op_s = np.minimum(trips.forward_s[1:].min(axis=0), trips.backward_s[1:].min(axis=0))
    work_s = np.maximum(0.0, open_s - np.maximum(0.0, idle_s - op_s).sum(axis=0))
    return Windows(work_s=work_s, visits=np.minimum(visits, 1e9), hold_s=hold_s, loss_s=loss_s)


def _ramp_idle_s(trips: Trips, ramps: Ramps, end_s: float, may_be: Bools, head_s: F64, tail_s: F64) -> F64:
    """(2, num_workers) idle time before a worker's first backward can start and after its last forward can end."""
    rest_s = ramps.rest_s[:, :, may_be]
    first_s = (ramps.head_s[:, :, may_be] + trips.forward_s[1:, :, None] + rest_s).min(
        axis=(0, 2), initial=FAR
    )
    last_s = (rest_s + trips.backward_s[1:, :, None] + ramps.tail_s[:, :, may_be]).min(
        axis=(0, 2), initial=FAR
    )
    is_apart = first_s + last_s <= end_s
    with np.errstate(invalid="ignore"):
        up_s = np.maximum(0.0, first_s - head_s - ramps.out_s)
        down_s = np.maximum(0.0, last_s - tail_s - ramps.home_s)
    return np.where(is_apart, np.array([up_s, down_s]), 0.0)
