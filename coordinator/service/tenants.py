"""Jobs that are there for a caller: those of its namespace. Others' are refused as those are that nobody knows."""

from collections.abc import Iterator
from dataclasses import replace

from coordinator.service.calls import NotFoundError
from skein.protocol.log.history import History, JobHistory
from skein.protocol.log.shelved import JobCard
from skein.types import DEFAULT_NAMESPACE, JobId
from skein.wire.context import Context
from skein.wire.identity.names import Caller, caller_of
from skein.wire.views import WorkerStatus


def namespace_of(context: Context) -> str:
    """Namespace of what a caller makes."""
    caller = caller_of(context)
    return DEFAULT_NAMESPACE if caller is None else caller.namespace


def jobs_of(history: History, caller: Caller | None) -> Iterator[JobHistory | JobCard]:
    """Jobs that are there for a caller, oldest first."""
    return (job for job in history.listed() if caller is not None and caller.sees(job.namespace))


def job_of(history: History, context: Context, name: str) -> JobHistory:
    """The job of that name.

    Raises:
        NotFoundError: there is none for this caller.
    """
    caller, found = caller_of(context), history.jobs.get(JobId(name))
    if found is None or caller is None or not caller.sees(found.namespace):
        raise NotFoundError("job", name, "no such job; see skein jobs")
    return found


def worker_for(status: WorkerStatus, history: History, caller: Caller | None) -> WorkerStatus:
    """A worker as a caller may see it: all share the workers, and none learns what another's do."""
    if status.job is None or (caller is not None and caller.sees(history.jobs[status.job].namespace)):
        return status
    return replace(status, job=None, stages=())
