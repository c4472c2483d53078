"""The op schedule for given times, memory and links: whatever is legal is simulated, and the quickest wins."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from skein.errors import UserError
from skein.plan.route.schedules.named import NAMED_ORDERS, Named
from skein.plan.route.schedules.shape import PipelinePlacement, Shape
from skein.plan.route.schedules.split import one_f_one_i
from tests.support.scheduling.depth import depth_options, kept_weights
from tests.support.scheduling.legality import violations
from tests.support.scheduling.ops import PipelineOpKind, PipelineSchedule, one_f_one_b, schedule_of
from tests.support.scheduling.pricing import Cut, Links
from tests.support.scheduling.simulate import Simulation, simulate
from tests.support.scheduling.vocabulary import one_f_one_b_shards, v_half_shards

_TIE = 1e-9
"""Makespans that differ by less than this part differ by rounding: they add the same times in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A schedule that may be run, and what it takes. `cut` is the one of those given that it is for."""

    name: str
    cut: Cut
    schedule: PipelineSchedule
    simulation: Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A schedule that may not, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """All schedules that were looked at. Without anything in `ranking`, nothing fits and `rejected` says why."""

    ranking: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]


def choose(
    num_microbatches: int,
    cuts: Sequence[Cut],
    links: Links,
    memory_bytes: Sequence[int] | None = None,
    *,
    may_split: bool = True,
) -> Choice:
    """Every schedule for these cuts, simulated, least makespan first.

    Of equally quick ones the simpler goes first: whole backwards, then fewer chunks, then less memory.

    Args:
        num_microbatches: of a step.
        cuts: of the model for these workers, for instance whole shares, two chunks in a V and two in a loop. Those with
            vocabulary shards have orders of their own.
        links: between the workers.
        memory_bytes: what each worker has for activations; None if that is no matter.
        may_split: whether the workers can do input and weight gradients apart.
    """
    ranking: list[Candidate] = []
    rejected: list[Rejected] = []
    for cut in cuts:
        name_by_schedule: dict[PipelineSchedule, str] = {}
        for name, options in _proposals(cut, cut.shape(num_microbatches), links, memory_bytes):
            best = _best(name, options, cut, links, memory_bytes)
            if isinstance(best, Rejected):
                rejected.append(best)
                continue
            first = name_by_schedule.setdefault(best.schedule, name)
            if first != name:
                rejected.append(Rejected(name=name, reason=f"is the same as {first} here"))
            elif not may_split and _is_split(best.schedule):
                rejected.append(Rejected(name=name, reason="splits backwards, which the workers do not"))
            else:
                ranking.append(best)
    return Choice(ranking=_ranked(ranking), rejected=tuple(rejected))


_Make = Callable[[], PipelineSchedule]


def _proposals(
    cut: Cut, shape: Shape, links: Links, memory_bytes: Sequence[int] | None
) -> Iterator[tuple[str, Sequence[_Make]]]:
    """Names and how to make them, perhaps in several ways of which the best counts; some may be impossible."""
    label = f" v{cut.num_chunks}" if cut.num_chunks > 1 else ""
    if cut.shards:
        yield from _with_shards(cut, shape.num_microbatches, links)
        return
    for name, named in NAMED_ORDERS.items():
        if named.does(cut.num_chunks, cut.placement):
            yield name + label, [partial(_named, named, shape)]
    if cut.num_chunks == 1:
        options = depth_options(cut, links, shape.num_microbatches, memory_bytes)
        yield "one_f_one_b_deep", [partial(one_f_one_b, shape, depths) for depths in options]
        kept = [kept_weights(cut, depths, shape.num_microbatches, memory_bytes) for depths in options]
        yield "zb_deep", [partial(_deep, shape, *pair) for pair in zip(options, kept, strict=True)]


def _named(named: Named, shape: Shape) -> PipelineSchedule:
    return schedule_of(shape, named.make(shape))


def _deep(shape: Shape, depths: Sequence[int], kept: Sequence[int]) -> PipelineSchedule:
    return schedule_of(shape, one_f_one_i(shape, depths, kept))


def _with_shards(cut: Cut, num_microbatches: int, links: Links) -> Iterator[tuple[str, Sequence[_Make]]]:
    if cut.num_chunks == 1:
        for name, is_split in (("one_f_one_b_shards", False), ("one_f_one_i_shards", True)):
            yield name, [partial(one_f_one_b_shards, cut, links, num_microbatches, is_split=is_split)]
    elif cut.num_chunks == 2 and cut.placement is PipelinePlacement.V:
        yield "v_half_shards v2", [partial(v_half_shards, cut, links, num_microbatches)]


def _best(
    name: str, options: Sequence[_Make], cut: Cut, links: Links, memory_bytes: Sequence[int] | None
) -> Candidate | Rejected:
    judged = [_judge(name, make, cut, links, memory_bytes) for make in options]
    legal = [x for x in judged if isinstance(x, Candidate)]
    return _ranked(legal)[0] if legal else next(x for x in judged if isinstance(x, Rejected))


def _judge(
    name: str, make: _Make, cut: Cut, links: Links, memory_bytes: Sequence[int] | None
) -> Candidate | Rejected:
    try:
        schedule = make()
    except UserError as error:
        return Rejected(name=name, reason=str(error))
    if wrong := violations(schedule, stages=cut.costs, memory_bytes=memory_bytes):
        return Rejected(name=name, reason=_told(wrong))
    simulation = simulate(schedule, cut.costs, links)
    return Candidate(name=name, cut=cut, schedule=schedule, simulation=simulation)


def _told(wrong: Sequence[str]) -> str:
    return wrong[0] + (f", and {len(wrong) - 1} more like it" if len(wrong) > 1 else "")


def _ranked(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    by_time = sorted(candidates, key=lambda x: (x.simulation.makespan_s, x.name))
    levelled = sorted(
        zip(_levels(by_time), by_time, strict=True), key=lambda pair: (pair[0], _complexity(pair[1]))
    )
    return tuple(candidate for _, candidate in levelled)


def _levels(by_time: Sequence[Candidate]) -> Iterator[int]:
    """Equal numbers for makespans that are equal but for rounding."""
    level, first_s = 0, 0.0
    for i, candidate in enumerate(by_time):
        if i == 0 or candidate.simulation.makespan_s > first_s * (1 + _TIE):
            level, first_s = i, candidate.simulation.makespan_s
        yield level


def _complexity(candidate: Candidate) -> tuple[bool, int, int, str]:
    most_bytes = max(peak.num_bytes for peak in candidate.simulation.peaks)
    return _is_split(candidate.schedule), candidate.cut.num_chunks, most_bytes, candidate.name


def _is_split(schedule: PipelineSchedule) -> bool:
    return any(op.kind is PipelineOpKind.BACKWARD_INPUT for op in schedule.ops_by_worker[0])
