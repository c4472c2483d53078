"""Pages of a list of jobs: bounded, without specifications, and quick however many jobs there were.

Rules of this file
- A page goes by the order in which jobs were submitted, from its end backwards, so that it begins with the newest.
- An ended job on the shelf is not read: its row lies there as it was encoded when the job was put there.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from coordinator.records.journal import Journal
from coordinator.service.calls import NotFoundError
from coordinator.telling.status import brief_status
from skein.protocol.coordinator.view import CoordinatorView
from skein.protocol.log.history import JobHistory
from skein.protocol.log.shelved import JobCard
from skein.types import JobId
from skein.wire import codec
from skein.wire.v1 import jobs_pb2

MAX_JOBS = 500
"""Jobs of a page."""
MAX_BYTES = 1 << 20
"""Bytes of a page's jobs; a message may have 4 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedPage:
    """A page that a client asks for; `limit` 0: as many jobs as a page may have. `before` "": the newest."""

    limit: int
    before: str
    has_ended: bool = False
    is_going: bool = False


def job_page(
    view: CoordinatorView, journal: Journal, seen: Iterable[JobHistory | JobCard], asked: AskedPage
) -> jobs_pb2.ListJobsReply:
    """The page of the jobs that a caller may see, `seen` oldest first.

    Raises:
        NotFoundError: there is no job by the name of `asked.before`.
    """
    known = [job.job for job in seen]
    wanted = _before(known, asked.before)
    if asked.has_ended != asked.is_going:
        wanted = [job for job in wanted if view.state_of(job).is_final == asked.has_ended]
    limit = min(asked.limit or MAX_JOBS, MAX_JOBS)
    page: list[jobs_pb2.JobStatus] = []
    num_bytes = 0
    for row in _rows(view, journal, wanted[: -limit - 1 : -1]):
        num_bytes += row.ByteSize()
        if page and num_bytes > MAX_BYTES:
            break
        page.append(row)
    has_more = len(wanted) > len(page)
    before = page[-1].job if has_more and page else ""
    return jobs_pb2.ListJobsReply(jobs=page[::-1], before=before, num_jobs=len(known))


def shelved_lines(view: CoordinatorView, journal: Journal, jobs: Sequence[JobId]) -> Mapping[JobId, bytes]:
    """Encoded rows of the jobs that are on the shelf."""
    return journal.lines([job for job in jobs if isinstance(view.history.jobs.peek(job), JobCard)])


def _before(known: list[JobId], before: str) -> list[JobId]:
    if not before:
        return known
    if JobId(before) not in known:
        raise NotFoundError("before", before, "no such job; ask for the newest page")
    return known[: known.index(JobId(before))]


def _rows(view: CoordinatorView, journal: Journal, jobs: list[JobId]) -> Iterator[jobs_pb2.JobStatus]:
    """Rows of jobs, in the given order."""
    lines = shelved_lines(view, journal, jobs)
    for job in jobs:
        if job in lines:
            yield jobs_pb2.JobStatus.FromString(lines[job])
        else:
            yield codec.JOB_STATUS.encode(brief_status(view, journal, job))
