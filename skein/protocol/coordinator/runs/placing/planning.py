"""Inputs of a request for a plan: the fleet as it is now, the plan that was recorded, and what workers hold."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from skein.config.job import ParallelSpec
from skein.plan.changing.clauses import About, parse_clauses
from skein.plan.check import misplaced_stages, violations
from skein.plan.plan import ChunkPlan, Plan
from skein.protocol.coordinator.runs.placing.sources import holders_by_stage
from skein.protocol.coordinator.runs.watching.measuring import Measured
from skein.protocol.log.history import JobHistory
from skein.protocol.log.records import DataCounted
from skein.protocol.membership.membership import Entry
from skein.protocol.messages.reports import Ack, ChunksReady
from skein.topology.fleet import Fleet, Link, rounded
from skein.topology.relays import shared_links
from skein.types import ChunkRef, Step, WorkerId


def fleet_of(
    entries: Iterable[Entry], links: Mapping[tuple[WorkerId, WorkerId], Link], measured: Measured
) -> Fleet:
    """Fleet of these workers and the links between them, as measured by themselves and while the job ran."""
    workers = tuple(entry.fleet_worker for entry in entries)
    known = {worker.worker for worker in workers}
    between = [links[pair] for pair in sorted(links) if known.issuperset(pair)]
    return rounded(measured.on(Fleet(workers=workers, links=shared_links(between, links.values())), links))


def num_wanted(parallel: ParallelSpec) -> int:
    """Workers that a job asks for: one for each chunk."""
    return parallel.stages * parallel.replicas


def recorded_plan(job: JobHistory, fleet: Fleet) -> Plan | None:
    """The recorded plan, if it is complete, all its workers are here and none could be added.

    Then nothing has changed but processes, and with equal sums in equal order the curve goes on unchanged.
    """
    plan = None if job.plan is None else job.plan.plan
    if plan is None or len(plan.workers) < min(num_wanted(job.spec.parallel), len(fleet.workers)):
        return None
    if violations(plan, job.spec, fleet):
        return None
    # What the plan moved was moved then.
    return replace(plan, reason=plan.reason.before(About.MOVES))


def held_plan(acks: Mapping[WorkerId, Ack], *, version: Step, parallel: ParallelSpec) -> Plan | None:
    """Chunks that members hold at `version`, as a plan without paths; None if a stage is missing or no cut has it."""
    held = holders_by_stage(acks, version)
    stages = tuple(sorted(held, key=lambda stage: stage.index))
    # A worker may say that it holds layers 3 to 0.
    is_cut_so = parallel.may_have(len(stages) - parallel.layout.num_head_stages)
    if not is_cut_so or any(misplaced_stages(stages)):
        return None
    chunks = sorted(ChunkRef(stage=stage.index, worker=w) for stage, holders in held.items() for w in holders)
    return Plan(
        layout=parallel.layout,
        stages=stages,
        chunks=tuple(ChunkPlan(chunk=chunk, slots=1) for chunk in chunks),
        paths=(),
        evaluation_paths=(),
        schedules=(),
        alternates=(),
        groups=(),
        predicted_step_s=0.0,
        lower_bound_s=0.0,
        reason=parse_clauses("held"),
    )


def who_reads_other_data(
    origins: Sequence[WorkerId],
    ready: Mapping[WorkerId, ChunksReady],
    acks: Mapping[WorkerId, Ack],
    *,
    version: Step,
    trained_on: DataCounted | None = None,
) -> tuple[WorkerId, ...]:
    """Workers of `origins`, sorted, that have other data than the job, or than most of them where that is not recorded.

    Args:
        origins: workers at which paths begin.
        ready: their reports.
        acks: what they held when the generation was opened: a worker that computed `version` is believed first.
        version: the version that the log has reached.
        trained_on: data of the steps so far; None: of none that are recorded.
    """
    if trained_on is not None:
        fixed = trained_on.fingerprint, trained_on.num_train_samples, trained_on.num_validation_samples
        return tuple(origin for origin in origins if _data_of(ready[origin]) != fixed)
    believed = [o for o in origins if version > 0 and any(c.version == version for c in acks[o].chunks)]
    found = {origin: _data_of(ready[origin]) for origin in origins}
    [(usual, _)] = Counter(found[origin] for origin in believed or origins).most_common(1)
    return tuple(origin for origin in origins if found[origin] != usual)


def _data_of(report: ChunksReady) -> tuple[str, int, int]:
    return report.data_fingerprint, report.num_train_samples, report.num_validation_samples


def fingerprint_of(ready: Mapping[WorkerId, ChunksReady]) -> str:
    """Fingerprint of the data that a generation's members read; "" where none of them reads any."""
    return max((report.data_fingerprint for report in ready.values()), default="")
