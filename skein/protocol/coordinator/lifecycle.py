"""Wishes of clients for a job that exists: that it ends, waits, or goes on.

Rules of this file
- A wish is recorded before anything comes of it, so a coordinator that dies in between still fulfils it.
- The state of a job is saved before it ends or waits, unless the client discards it. Nobody waits for that: a wish to
  discard may follow at any time.
- A job that ends or waits has no workers, and no other job waits for it.
"""

from skein.config.explain import Words
from skein.config.job import JobSpec, with_steps
from skein.errors import UserError
from skein.model.parameters import parameter_shapes
from skein.model.rows import whole_shapes
from skein.protocol.coordinator.coordinator_io import (
    CancelAsked,
    DeleteAsked,
    Outbox,
    PauseAsked,
    PruneCheckpoints,
    ResumeAsked,
)
from skein.protocol.coordinator.quotas import QuotaUses
from skein.protocol.coordinator.runs.checkpoints.keeping import begun_from, newest_good
from skein.protocol.coordinator.runs.checkpoints.storage import lost_beginning
from skein.protocol.coordinator.runs.run import Run
from skein.protocol.log.history import History, JobHistory
from skein.protocol.log.records import (
    CheckpointCommitted,
    CheckpointDeleted,
    HaltAsked,
    JobEnded,
    JobHeld,
    JobResumed,
)
from skein.protocol.messages.directives import Beginning
from skein.types import JobState, Step


def cancel_asked(job: JobHistory, run: Run | None, event: CancelAsked, outbox: Outbox, *, now: float) -> None:
    """End a job that has not ended; `run` is its own, if it is active."""
    if job.end is not None:
        return
    if run is None:
        reason = event.reason or ("cancelled while it was held" if job.held else "cancelled before it began")
        outbox.record(JobEnded(job=job.job, state=JobState.CANCELLED, reason=reason, wall_s=now))
        return
    reason = event.reason or "cancelled by a client"
    if event.discards:
        run.end(JobState.CANCELLED, reason, now=now)
    elif job.halt is None or job.halt.state is not JobState.CANCELLED:
        _halt(run, JobState.CANCELLED, reason, outbox, now=now)


def pause_asked(job: JobHistory, run: Run | None, event: PauseAsked, outbox: Outbox, *, now: float) -> None:
    """Have a job held that has not ended, and is not about to."""
    reason = event.reason or "paused by a client"
    is_halting = job.halt is not None and not job.ends_with_round
    if job.end is not None or job.held is not None or is_halting:
        return
    if run is None:
        outbox.record(JobHeld(job=job.job, reason=reason, wall_s=now))
    else:
        _halt(run, JobState.HELD, reason, outbox, now=now)


def round_end_asked(job: JobHistory, run: Run | None, reason: str, outbox: Outbox, *, now: float) -> None:
    """Have an array end with the round that it is in, so that its rows go on in others."""
    if run is not None:
        _halt(run, JobState.FINISHED, reason, outbox, now=now)
    elif job.members:
        # An earlier coordinator began it: its run, which is yet to begin here, saves what workers have.
        outbox.record(HaltAsked(job=job.job, state=JobState.FINISHED, reason=reason, wall_s=now))
    else:
        outbox.record(JobEnded(job=job.job, state=JobState.FINISHED, reason=reason, wall_s=now))


def _halt(run: Run, state: JobState, reason: str, outbox: Outbox, *, now: float) -> None:
    job = run.job
    outbox.record(HaltAsked(job=job.job, state=state, reason=reason, wall_s=now))
    outbox.log(f"is to be {state.value}: {reason}", job=job.job)
    run.tick(now=now)


def resume_asked(
    job: JobHistory, run: Run | None, event: ResumeAsked, quotas: QuotaUses, outbox: Outbox, *, now: float
) -> None:
    """Have a job go on, if that is possible and it does not go on anyway; one that takes new data asks all anew."""
    try:
        check_resumable(job, event.steps, quotas, takes_new_data=event.takes_new_data)
    except UserError:
        return  # It was possible when it was asked.
    goes_on = job.end is None and job.held is None and job.halt is None
    if goes_on and not event.takes_new_data:
        return
    takes_new_data = event.takes_new_data
    outbox.record(JobResumed(job=job.job, steps=event.steps, wall_s=now, takes_new_data=takes_new_data))
    words = ", with the data that its workers have now" if takes_new_data else ""
    outbox.log(f"goes on, at {job.version} of {job.total_steps} steps{words}", job=job.job)
    if takes_new_data and goes_on and run is not None:
        run.pardon(now=now)


def check_resumable(
    job: JobHistory, steps: int | None, quotas: QuotaUses, *, takes_new_data: bool = False
) -> None:
    """Refuses to have a job go on that has nothing to do, or whose budget others count on.

    Args:
        job: as it is.
        steps: its budget from here on; None: as it was.
        quotas: what namespaces have of theirs.
        takes_new_data: it is to go on with the data that its workers have now.

    Raises:
        UserError: with the field `steps` or `new_data`; or it is its namespace's quota that is full.
    """
    is_at_rest = job.is_at_rest
    if is_at_rest:
        quotas.check_queue(job.namespace)
    if takes_new_data:
        _check_new_data(job)
    if steps is None:
        if job.end is not None and job.end.state is JobState.FINISHED:
            if job.spec.sweep is not None:
                raise UserError(
                    "job", job.job, "has finished, and its trials have the budget that they began with"
                )
            hint = f"all {job.total_steps} steps are done: give more, such as {2 * job.total_steps}"
            raise UserError("steps", Words("none"), hint)
        return
    if job.spec.sweep is not None:
        raise UserError(
            "steps", steps, "trials of a sweep have the budget that they began with: leave it away"
        )
    if not is_at_rest:
        raise UserError("steps", steps, f"{job.job} is at work: pause it before you change its budget")
    if steps <= job.version:
        raise UserError("steps", steps, f"{job.version} steps are done already: give more")
    with_steps(job.spec, steps)


def _check_new_data(job: JobHistory) -> None:
    if job.spec.sweep is not None:
        hint = "trials are compared on the data that they began with: submit the sweep anew"
        raise UserError("new_data", job.job, hint)
    if job.chosen:
        hint = (
            "rows of the data before are chosen, by their numbers: submit the job anew, from its checkpoint"
        )
        raise UserError("new_data", job.job, hint)


def delete_asked(event: DeleteAsked, history: History, outbox: Outbox, *, now: float) -> None:
    """Have a checkpoint be no more, if that is possible."""
    job = history.jobs.get(event.job)
    try:
        checkpoint = None if job is None else deletable(job, event.version, history)
    except UserError:
        return  # It was possible when it was asked.
    if job is not None and checkpoint is not None:
        drop_checkpoints(job, (checkpoint.version,), outbox, now=now)
        outbox.log(f"checkpoint={event.version} is deleted", job=job.job)


def drop_checkpoints(job: JobHistory, versions: tuple[Step, ...], outbox: Outbox, *, now: float) -> None:
    """Delete checkpoints that nobody needs: first on the record, then where they are stored."""
    url = job.spec.checkpoint.url
    for version in versions:
        outbox.record(CheckpointDeleted(job=job.job, version=version, wall_s=now))
    keep = tuple(x.version for x in job.checkpoints)
    outbox.do(PruneCheckpoints(job=job.job, url=url, keep=keep, drop=versions))


def deletable(job: JobHistory, version: Step, history: History) -> CheckpointCommitted:
    """The checkpoint of that version, which nobody needs.

    Raises:
        UserError: there is none, or it is needed.
    """
    found = next((x for x in job.checkpoints if x.version == version), None)
    if found is None:
        has = ", ".join(str(x.version) for x in job.checkpoints) or "none"
        raise UserError("version", version, f"there is no such checkpoint, {job.job} has {has}")
    if job.end is None:
        hint = "has not ended, and may need its checkpoints: cancel it first, or submit with a smaller checkpoint.keep"
        raise UserError("job", job.job, hint)
    if version in begun_from(job.job, history.jobs.resident()):
        raise UserError(
            "version", version, "another job begins with it: delete it once that has one of its own"
        )
    return found


def end_unbegun(job: JobHistory, history: History, outbox: Outbox, *, now: float) -> bool:
    """End a job that has made no step, if what it begins with is no more; True if it has ended."""
    reason = lost_beginning(job, history)
    if job.version or not reason:
        return False
    outbox.record(JobEnded(job=job.job, state=JobState.FAILED, reason=reason, wall_s=now))
    outbox.log(f"failed: {reason}", job=job.job)
    return True


def beginning(other: JobHistory, spec: JobSpec, version: Step | None) -> Beginning:
    """The checkpoint of another job that a new one of `spec` begins with.

    Args:
        other: whose it is.
        spec: of the new job.
        version: which checkpoint; None: the newest whose parameters are good.

    Raises:
        UserError: it has no such checkpoint, or is another model.
    """
    versions = [saved.version for saved in other.checkpoints]
    wanted = newest_good(other) if version is None else version
    found = next((saved for saved in other.checkpoints if saved.version == wanted), None)
    if found is None:
        has = f"it has {', '.join(map(str, versions))}" if versions else "it has none yet"
        which = f"{other.job} version {'newest' if version is None else version}"
        raise UserError("from", which, f"there is no such checkpoint, {has}")
    if found.version in other.damaged:
        hint = f"is damaged ({other.damaged[found.version]}): put it back, or give another version"
        raise UserError("from", f"{other.job} version {found.version}", hint)
    if whole_shapes(parameter_shapes(spec.model)) != whole_shapes(parameter_shapes(other.spec.model)):
        raise UserError("from", other.job, "has a model of another shape: give the same model")
    return Beginning(job=other.job, version=found.version)
