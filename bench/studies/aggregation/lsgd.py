"""Leader SGD beside elastic averaging: out of a shallow well, down to a low-rank factor, and on data of unlike kinds.

All methods begin at equal points, follow exact gradients and exchange after every step, unless a row says otherwise.
Down to a factor each has the step size that suits it best; of elastic averaging the better of its two published
elasticities counts, and its centre may win. Descent without any exchange stands beside them: on exact gradients from
eight starts there is nothing to gain from others, only less to lose.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from statistics import median

from torch import Tensor

from bench.report import Row, spread
from bench.studies.aggregation import lsgd_digits
from bench.studies.aggregation.easgd import tied
from bench.studies.aggregation.landscapes import (
    Landscape,
    LeaderSteps,
    best_loss,
    double_well,
    factorisation,
    terms_of,
)
from bench.studies.aggregation.measured import Measured
from bench.studies.plot import Chart, Line

RANKS = (1, 5, 10)
SEEDS = (0, 1, 2, 3, 4)
WELL_STEPS = 400
WELL_PULL = 0.05
DEEPER_WELL = -1.009854
ENOUGH = 1e-6
_MOST_STEPS = 600
LEARNING_RATES = (0.1, 0.2, 0.3, 0.4)
_BETAS = (0.9, 0.43)
"""Elastic averaging's published ones; divided by the number of workers."""
_PULL = 0.1
STEP_S = dict(enumerate((1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 4.0)))
"""How long a step takes each of eight walkers, where they are not equally fast."""
_TAU = 4
_CHART_STEPS = 120

Trace = Iterator[Sequence[Tensor]]
"""The points that may be best after each step."""


def measure(*, is_quick: bool) -> Measured:
    """Rows on both landscapes, on unequal speeds and on digits, and the descent to a factor of rank 5."""
    seeds = SEEDS[:1] if is_quick else SEEDS
    rows = (
        *well_rows(),
        *(row for rank in RANKS for row in factor_rows(rank, seeds)),
        *speed_rows(seeds),
        *lsgd_digits.rows(is_quick=is_quick),
    )
    return Measured(rows=rows, charts={"lsgd": _chart(factorisation(5, seed=0, learning_rate=0.2))})


# --- methods ---


def led(place: Landscape, *, pull: float = _PULL) -> Trace:
    """Our rule."""
    walkers = LeaderSteps(place, pull=pull)
    for step in range(_MOST_STEPS):
        walkers.step(step)
        yield walkers.points


def averaged(place: Landscape, *, elasticity: float) -> Trace:
    """Elastic averaging: the workers, and the centre at the end."""
    found = tied(place.starts, elasticity=elasticity)
    for _ in range(_MOST_STEPS):
        found.step([place.grad(x) for x in found.workers], learning_rate=place.learning_rate)
        yield [*found.workers, found.centre]


def num_steps_to(place: Landscape, trace: Trace) -> float:
    """After how many steps the best point's loss is below `ENOUGH`; infinite if never."""
    found = (step for step, points in enumerate(trace, start=1) if best_loss(place, points) < ENOUGH)
    return float(next(found, math.inf))


# --- the double well ---


def well_rows() -> Iterator[Row]:
    """Where walkers on both sides of the hump are after some hundred steps."""
    place = double_well()
    ours, theirs = (
        _after(trace, WELL_STEPS)
        for trace in (led(place, pull=WELL_PULL), averaged(place, elasticity=WELL_PULL))
    )
    off = max(abs(float(x) - DEEPER_WELL) for x in ours)
    yield Row(
        what=f"double well, LSGD: distance of the farther walker from the deeper minimum after {WELL_STEPS} steps",
        value=off,
        unit="x",
        against=f"EASGD: {max(abs(float(x) - DEEPER_WELL) for x in theirs[:2]):.4f}",
        ratio=off / max(abs(float(x) - DEEPER_WELL) for x in theirs[:2]),
        goal="value <= 1e-6",
        holds=off <= 1e-6,
        spread=0.0,
    )
    steepest, stuck = (max(abs(float(place.grad(x))) for x in points) for points in (ours, theirs[:2]))
    yield Row(
        what="double well, LSGD: steepest slope where a walker rests",
        value=steepest,
        unit="|df/dx|",
        against=f"EASGD: {stuck:.4f}, its walkers at {float(theirs[0]):+.4f} and {float(theirs[1]):+.4f}, "
        f"its centre at {float(theirs[2]):+.4f}",
        ratio=steepest / stuck,
        goal="value <= 1e-14, and EASGD's above 0.1",
        holds=steepest <= 1e-14 and stuck > 0.1,
        spread=0.0,
    )


def _after(trace: Trace, num_steps: int) -> Sequence[Tensor]:
    for step, points in enumerate(trace, start=1):
        if step == num_steps:
            return [x.clone() for x in points]
    raise ValueError(f"the trace ends before step {num_steps}")


# --- low rank ---

LSGD, ALONE = "LSGD", "no exchange"
EASGD = tuple(f"EASGD, beta {beta:g}" for beta in _BETAS)


def traces(place: Landscape) -> dict[str, Trace]:
    """All methods on one landscape, by label."""
    elastic = {
        label: averaged(place, elasticity=beta / len(place.starts))
        for label, beta in zip(EASGD, _BETAS, strict=True)
    }
    return {LSGD: led(place), **elastic, ALONE: averaged(place, elasticity=0.0)}


def factor_rows(rank: int, seeds: Sequence[int]) -> Iterator[Row]:
    """Steps to a loss of 1e-6, medians over matrices; the goal is fewer for every one of them."""
    counts_by_rate = [counted(rank, seeds, rate) for rate in LEARNING_RATES]
    best = {
        label: min((counts[label] for counts in counts_by_rate), key=median) for label in counts_by_rate[0]
    }
    yield _row(f"rank {rank}, LSGD", best[LSGD], _better(best), is_judged=True)
    yield _row(f"rank {rank}, no exchange", best[ALONE], _better(best), is_judged=False)
    smallest = counts_by_rate[0]
    what = f"rank {rank}, LSGD, all with step size {LEARNING_RATES[0]:g}"
    yield _row(what, smallest[LSGD], _better(smallest), is_judged=False)


def counted(rank: int, seeds: Sequence[int], learning_rate: float) -> dict[str, list[float]]:
    """Steps that each method takes, by label, for each matrix; infinite for never."""
    counts: dict[str, list[float]] = defaultdict(list)
    for seed in seeds:
        place = factorisation(rank, seed=seed, learning_rate=learning_rate)
        for label, trace in traces(place).items():
            counts[label].append(num_steps_to(place, trace))
    return counts


def _better(counts: Mapping[str, Sequence[float]]) -> list[float]:
    """Matrix by matrix, what the better elasticity takes."""
    return [min(pair) for pair in zip(*(counts[label] for label in EASGD), strict=True)]


def _row(what: str, counts: Sequence[float], others: Sequence[float], *, is_judged: bool) -> Row:
    ratios = [own / other for own, other in zip(counts, others, strict=True)]
    return Row(
        what=f"{what}: steps until the best of 8 has a loss of {ENOUGH:g}",
        value=median(counts),
        unit="steps",
        against=f"the better EASGD: {median(others):g}",
        ratio=median(ratios),
        goal="ratio < 1 for every matrix" if is_judged else "none",
        holds=not is_judged or max(ratios) < 1,
        spread=spread(counts),
    )


def _chart(place: Landscape) -> Chart:
    """The best loss by step, down to where it is enough."""
    lines = []
    for look, (label, trace) in enumerate(traces(place).items()):
        points = [(0.0, best_loss(place, place.starts))]
        for step, at in enumerate(islice(trace, _CHART_STEPS), start=1):
            points.append((float(step), best_loss(place, at)))
            if points[-1][1] < ENOUGH:
                break
        lines.append(Line(label=label, look=look, points=tuple(points)))
    return Chart(
        title="Eight walkers factorise a matrix of rank 5",
        description="Loss of the best walker by step: leader SGD and walkers that never talk fall together to 1e-6; "
        "elastic averaging takes longer, and with the smaller beta does not get there.",
        x_label="steps",
        y_label="loss of the best walker",
        lines=tuple(lines),
        y_from=ENOUGH,
        is_log=True,
    )


# --- unequal speeds ---


def local_steps_by_walker(step_s: Mapping[int, float], tau: int) -> dict[int, int]:
    """How many local steps each walker makes between two elections, `tau` on average, if nobody waits for the slowest.

    A common count of finished steps reaches tau times the number of walkers; then each ends the step it is at. So fast
    walkers make more steps, and an election waits for at most one step.

    Source: the counter of LSGD's asynchronous server.
    """
    done = [(step_s[who], who, 1) for who in sorted(step_s)]
    heapq.heapify(done)
    for _ in range(tau * len(step_s) - 1):
        _, who, num_done = done[0]
        heapq.heapreplace(done, ((num_done + 1) * step_s[who], who, num_done + 1))
    at_s = done[0][0]
    # Steps that end this near to each other, as a share of a step, end together.
    return {who: max(1, math.ceil(at_s / step_s[who] - 1e-9)) for who in sorted(step_s)}


def speed_rows(seeds: Sequence[int]) -> Iterator[Row]:
    """Seconds to a loss of 1e-6 where walkers are not equally fast."""
    equal, unequal = dict.fromkeys(range(len(STEP_S)), _TAU), local_steps_by_walker(STEP_S, _TAU)
    waited, own = (
        [seconds_to(factorisation(5, seed=seed, learning_rate=0.2), counts) for seed in seeds]
        for counts in (equal, unequal)
    )
    ratios = [mine / other for mine, other in zip(own, waited, strict=True)]
    yield Row(
        what=f"rank 5, LSGD, steps of 1 to 4 s, {_TAU} on average between exchanges: as many as each can make",
        value=median(own),
        unit="s",
        against=f"{_TAU} steps each: {median(waited):g} s",
        ratio=median(ratios),
        goal="ratio < 1 for every matrix",
        holds=max(ratios) < 1,
        spread=spread(own),
    )


def seconds_to(place: Landscape, num_steps: Mapping[int, int]) -> float:
    """When the best loss is below `ENOUGH`, step by step in order of their ends; an exchange waits for all."""
    walkers, now_s = LeaderSteps(place, pull=_PULL), 0.0
    terms = terms_of(place, 0)
    for _ in range(_MOST_STEPS):
        ends = sorted((k * STEP_S[who], who, k) for who in num_steps for k in range(1, num_steps[who] + 1))
        for end_s, who, k in ends:
            walkers.local_step(who, terms, talks=k == num_steps[who])
            if best_loss(place, walkers.points[who : who + 1]) < ENOUGH:
                return now_s + end_s
        walkers.exchange(terms)
        now_s += max(end_s for end_s, _, _ in ends)
    return math.inf
