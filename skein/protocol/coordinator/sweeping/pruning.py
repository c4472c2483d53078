"""Checkpoints of a sweep's arrays that nothing goes on from any more."""

from collections.abc import Iterator

from skein.config.job import ArrayJob
from skein.protocol.coordinator.runs.checkpoints.keeping import begun_from
from skein.protocol.log.history import History, JobHistory
from skein.types import JobState, Step


def spare_checkpoints(sweep: JobHistory, history: History) -> Iterator[tuple[JobHistory, tuple[Step, ...]]]:
    """Arrays that have finished, each with the versions of its checkpoints that are to spare, if there are any.

    All but the newest are; that one too, once every row has gone on in another array and is saved there. So whatever
    trial a rung has ended can still be exported.
    """
    arrays = [history.jobs[job] for job in sweep.arrays]
    last = {trial: array.job for array in arrays if array.whole_checkpoints for trial in array.trials}
    for array in arrays:
        if not isinstance(array.spec, ArrayJob) or history.state_of(array.job) is not JobState.FINISHED:
            continue
        has_last = any(last.get(trial) == array.job for trial in array.trials)
        needed = {array.version} if has_last else begun_from(array.job, arrays)
        spare = tuple(x.version for x in array.checkpoints if x.version not in needed)
        if spare:
            yield array, spare
