"""A report as text for people."""

from collections.abc import Iterator, Sequence

from client.planning.messages import Objective
from client.planning.report import Report, StepParts, SubsetRow
from skein.units import format_bytes

_MAX_SUBSETS = 12
_MAX_LINKS = 8
_MAX_LOST = 3
_INDENT = "  "


def report_lines(report: Report, *, all_paths: bool) -> Iterator[str]:
    """The report, section by section; paths one by one where `all_paths`, else by the stages that they visit."""
    yield (
        f"{report.instance}: {report.num_microbatches} microbatches on {report.num_workers} workers, "
        f"{report.num_stages} stages, {report.path_len} in each path; {report.method}, seed {report.seed}"
    )
    yield from (f"warning: {text}" for text in report.warnings)
    yield from _section("placement", _placement(report))
    yield from _section("paths", _paths(report) if all_paths else _subsets(report.subsets))
    yield from _section("step", _step(report))
    yield from _section("workers", _workers(report))
    yield from _section("links", _links(report))
    if report.aggregation is not None:
        yield from _section("aggregation", iter((report.aggregation.words,)))
    yield from _section("search", _effort(report))


def _section(title: str, lines: Iterator[str]) -> Iterator[str]:
    """A title and what is under it; nothing if nothing is."""
    found = list(lines)
    if found:
        yield ""
        yield title
        yield from (_INDENT + line for line in found)


def _placement(report: Report) -> Iterator[str]:
    for stage, workers in enumerate(report.placement):
        yield f"stage {stage}  {', '.join(workers)}"


def _subsets(subsets: Sequence[SubsetRow]) -> Iterator[str]:
    for row in subsets[:_MAX_SUBSETS]:
        yield f"{row.num_microbatches:>4} x stages {' '.join(map(str, row.stages))}"
    if len(subsets) > _MAX_SUBSETS:
        rest = sum(row.num_microbatches for row in subsets[_MAX_SUBSETS:])
        yield f"{rest:>4} on {len(subsets) - _MAX_SUBSETS} other ways: --paths lists all"


def _paths(report: Report) -> Iterator[str]:
    for row in report.paths:
        hops = ", ".join(f"{stage}: {worker}" for stage, worker in zip(row.stages, row.workers, strict=True))
        yield f"microbatch {row.microbatch:>3}  back after {row.end_s:7.2f} s  {hops}"


def _step(report: Report) -> Iterator[str]:
    parts, is_step = report.parts, report.objective is Objective.STEP
    yield f"last backward     {in_seconds(parts.makespan_s)}"
    yield f"aggregation adds  {in_seconds(parts.exposed_s)}{'' if is_step else ', not counted below'}"
    yield f"step              {in_seconds(parts.step_s)}"
    what = "step" if is_step else "last backward"
    yield f"under 3 % jitter  {in_seconds(parts.jittered_mean_s)} on average ({what})"
    if report.bound is None:
        yield "lower bound       none yet: raise --budget-s"
    else:
        gap = f"{report.bound.gap:.1%}".replace("%", " %")
        bound = report.bound
        yield f"lower bound       {in_seconds(bound.seconds)} ({bound.binding}); this plan is {gap} above it"
    yield f"critical way      {_way(parts)}"
    yield from _longest(parts)


def _way(parts: StepParts) -> str:
    """Parts that the critical way sums up from."""
    named = [
        ("computing", parts.compute_s),
        ("on links", parts.transfer_s),
        ("waiting for links", parts.queued_s),
        (f"aggregating stage {parts.reduced_stage}", parts.reduction_s),
    ]
    return " + ".join(f"{in_seconds(value)} {name}" for name, value in named if value > 0)


def _longest(parts: StepParts) -> Iterator[str]:
    for title, sums in (("worker", parts.compute_s_by_worker), ("link", parts.transfer_s_by_link)):
        if sums:
            name, value = next(iter(sums.items()))
            yield f"  longest {title:<8}{name}, {in_seconds(value)}"
    if parts.slot_waits_by_worker:
        waits = ", ".join(
            f"{name} ({count} x)" for name, count in list(parts.slot_waits_by_worker.items())[:4]
        )
        yield f"  waits for a slot at {waits}"


def _workers(report: Report) -> Iterator[str]:
    parts = report.parts
    of_s = parts.step_s if report.objective is Objective.STEP else parts.makespan_s
    rows = [
        (
            row.worker,
            " ".join(map(str, row.stages)) or "-",
            f"{row.held} of {row.slots}",
            _memory(row.held_bytes, row.memory_bytes),
            f"{row.busy_s / of_s:.0%}".replace("%", " %"),
        )
        for row in report.workers
    ]
    yield from table(("WORKER", "STAGES", "SLOTS", "MEMORY", "BUSY"), rows)
    for row in report.workers:
        if row.device_bytes is not None:
            held = _memory(row.device_bytes, row.device_room_bytes)
            rest = (
                ""
                if row.num_used_devices == row.num_devices
                else f"; a stage is on {row.num_used_devices} of them at most"
            )
            yield f"{row.worker}: the fullest of its {row.num_devices} devices holds {held}{rest}"


def _memory(held_bytes: int | None, memory_bytes: int | None) -> str:
    if held_bytes is None:
        return "-"
    return format_bytes(held_bytes) + ("" if memory_bytes is None else f" of {format_bytes(memory_bytes)}")


def _links(report: Report) -> Iterator[str]:
    rows = [
        (
            f"{row.sender} -> {row.receiver}",
            str(row.num_tensors),
            "-" if row.tensor_bytes is None else format_bytes(row.tensor_bytes),
            format_bytes(row.reduction_bytes),
            in_seconds(row.tensors_s),
        )
        for row in report.links[:_MAX_LINKS]
    ]
    yield from table(("LINK", "TENSORS", "BYTES", "AGGREGATION", "TIME"), rows)
    if len(report.links) > _MAX_LINKS:
        yield f"and {len(report.links) - _MAX_LINKS} more: --json has all"


def _effort(report: Report) -> Iterator[str]:
    effort = report.effort
    if report.settled:
        yield report.settled
    if report.started:
        name, *others = (f"{x.name} {in_seconds(x.seconds)}" for x in report.started[: 1 + _MAX_LOST])
        yield f"began with {name}" + (f", rather than {', then '.join(others)}" if others else "")
    first = "" if effort.first_plan_s is None else f", first plan after {effort.first_plan_s:.2f} s"
    moves = (
        f", {effort.num_moves:,} routings looked at ({effort.moves_per_s:,.0f}/s)" if effort.num_moves else ""
    )
    yield f"{effort.seconds:.2f} s in {effort.num_processes} process{'es' * (effort.num_processes > 1)}{first}{moves}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Aligned columns."""
    lines = [tuple(columns), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(map(str.ljust, line, widths)).rstrip()


def in_seconds(value: float) -> str:
    """
    >>> in_seconds(63.345), in_seconds(0.00123), in_seconds(0.0), in_seconds(1460.2)
    ('63.3 s', '0.00123 s', '0 s', '1,460 s')
    """
    return f"{value:,.0f} s" if value >= 1000 else f"{value:.3g} s"
