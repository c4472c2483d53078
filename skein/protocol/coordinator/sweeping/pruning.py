"""Checkpoints of a sweep's arrays that nothing goes on from any more."""

from collections.abc import Iterator

from skein.config.job import ArrayJob
from skein.protocol.coordinator.runs.checkpoints.keeping import begun_from
from skein.protocol.log.history import History, JobHistory
from skein.types import JobState, Step


def spare_checkpoints(sweep: JobHistory, history: History) -> Iterator[tuple[JobHistory, tuple[Step, ...]]]:
    """Arrays that have finished, each with the versions of its checkpoints that are to spare, if there are any.

    All but the newest are; that one too, once every row has gone on in another array and is saved there. So whatever
    trial a rung has ended can still be exported. What jobs begin with is needed until they have a checkpoint of their
    own, and the newest that is whole beside a newer one that is damaged.
    """
    arrays = [history.jobs[job] for job in sweep.arrays]
    last = {trial: array.job for array in arrays if array.whole_checkpoints for trial in array.trials}
    for array in arrays:
        if not isinstance(array.spec, ArrayJob) or history.state_of(array.job) is not JobState.FINISHED:
            continue
        has_last = any(last.get(trial) == array.job for trial in array.trials)
        newest = array.newest_checkpoint
        needed = {array.version, array.version if newest is None else newest.version} if has_last else set()
        spare = {x.version for x in array.checkpoints} - needed
        if spare:
            # Clients' jobs may begin with a row, too.
            spare -= begun_from(array.job, history.jobs.resident())
        if spare:
            yield array, tuple(sorted(spare))
