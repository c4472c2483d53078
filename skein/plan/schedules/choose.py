"""The op schedule for given times, memory and links: whatever is legal is simulated, and the quickest wins."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from skein.errors import UserError
from skein.plan.schedules.check import violations
from skein.plan.schedules.cost import Cut, Links
from skein.plan.schedules.depth import kept_weights, latency_aware_depths
from skein.plan.schedules.ops import OpKind, Schedule, Shape
from skein.plan.schedules.simulate import Simulation, simulate
from skein.plan.schedules.split import one_f_one_i
from skein.plan.schedules.table import GENERATORS
from skein.plan.schedules.whole import one_f_one_b

_TIE = 1e-9
"""Makespans that differ by less than this part differ by rounding: they add the same times in another order."""

_SPARE = (0, 1)
"""Forwards per hop beyond what measured times ask for: with unequal workers or split backwards one more often pays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A schedule that may be run, and what it takes. `cut` is the one of those given that it is for."""

    name: str
    cut: Cut
    schedule: Schedule
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
        cuts: of the model for these workers, for instance whole shares, two chunks in a V and two in a loop.
        links: between the workers.
        memory_bytes: what each worker has for activations; None if that is no matter.
        may_split: whether the workers can do input and weight gradients apart.
    """
    ranking: list[Candidate] = []
    rejected: list[Rejected] = []
    for cut in cuts:
        name_by_schedule: dict[Schedule, str] = {}
        for name, make in _proposals(cut, cut.shape(num_microbatches), links, memory_bytes):
            try:
                schedule = make()
            except UserError as error:
                rejected.append(Rejected(name=name, reason=str(error)))
                continue
            first = name_by_schedule.setdefault(schedule, name)
            if first != name:
                rejected.append(Rejected(name=name, reason=f"is the same as {first} here"))
            elif not may_split and _is_split(schedule):
                rejected.append(Rejected(name=name, reason="splits backwards, which the workers do not"))
            elif wrong := violations(schedule, stages=cut.stages, memory_bytes=memory_bytes):
                rejected.append(Rejected(name=name, reason=_told(wrong)))
            else:
                simulation = simulate(schedule, cut.stages, links)
                ranking.append(Candidate(name=name, cut=cut, schedule=schedule, simulation=simulation))
    return Choice(ranking=_ranked(ranking), rejected=tuple(rejected))


def _proposals(
    cut: Cut, shape: Shape, links: Links, memory_bytes: Sequence[int] | None
) -> Iterator[tuple[str, Callable[[], Schedule]]]:
    """Names and how to make them, which may turn out to be impossible."""
    label = f" v{cut.num_chunks}" if cut.num_chunks > 1 else ""
    for name, generator in GENERATORS.items():
        if generator.does(cut.num_chunks, cut.placement):
            yield name + label, partial(generator.make, shape)
    if cut.num_chunks == 1:
        for num_spare in _SPARE:
            label = f" +{num_spare}" if num_spare else ""
            depths = latency_aware_depths(
                cut, links, shape.num_microbatches, memory_bytes, num_spare=num_spare
            )
            kept = kept_weights(cut, depths, shape.num_microbatches, memory_bytes)
            yield "one_f_one_b_deep" + label, partial(one_f_one_b, shape, depths)
            yield "zb_deep" + label, partial(one_f_one_i, shape, depths, kept)


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


def _is_split(schedule: Schedule) -> bool:
    return any(op.kind is OpKind.BACKWARD_INPUT for op in schedule.ops_by_worker[0])
