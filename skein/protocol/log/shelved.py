"""Jobs of a history: jobs that may change are in memory; ended jobs are cards, and read from a shelf on demand.

Rules of this file
- A shelf holds an ended job as it was when the job was shelved, and no record changes it there. So a job that is to be
  changed is taken into memory first, by `change`, and stays there until it is shelved again.
- `peek` at a job is free where a card answers; `jobs[job]` reads the shelf, and keeps the last jobs that it read.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skein.types import Incarnation, JobId, JobState

if TYPE_CHECKING:
    from skein.protocol.log.history import JobHistory

NUM_RECENT = 64
"""Ended jobs in memory that were read last: clients ask several times about one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCard:
    """Facts of an ended job that are asked for without reading it: lists, quotas and generations need them.

    `holders` are processes that may hold chunks of it.
    """

    job: JobId
    key: str
    namespace: str
    number: int
    sweep: JobId | None
    state: JobState
    stored_bytes: int
    holders: tuple[Incarnation, ...]


Fetch = Callable[[JobId], "JobHistory"]
"""Reads an ended job from the shelf."""


def _no_shelf(job: JobId) -> "JobHistory":
    raise KeyError(job)


class JobTable(Mapping[JobId, "JobHistory"]):
    """All jobs in the order in which they were submitted."""

    def __init__(self) -> None:
        self.fetch: Fetch = _no_shelf
        """Reader of the shelf; it must be set before cards are added."""
        self.num_shelved: Counter[JobState] = Counter()
        """Clients' jobs that are cards, by state."""
        self.stored_shelved: Counter[str] = Counter()
        """Bytes of the checkpoints of jobs that are cards, by namespace."""
        self._all: dict[JobId, JobHistory | JobCard] = {}
        self._resident: dict[JobId, JobHistory] = {}
        self._changed: dict[JobId, int] = {}
        """Entry that changed each resident job last."""
        self._recent: OrderedDict[JobId, JobHistory] = OrderedDict()
        self._held_by: dict[Incarnation, tuple[JobId, ...]] = {}
        """Cards by the processes that may hold chunks of their jobs."""

    def __getitem__(self, job: JobId) -> "JobHistory":
        found = self._all[job]
        if not isinstance(found, JobCard):
            return found
        if job not in self._recent:
            self._recent[job] = self.fetch(job)
            if len(self._recent) > NUM_RECENT:
                self._recent.popitem(last=False)
        self._recent.move_to_end(job)
        return self._recent[job]

    def __contains__(self, job: object) -> bool:
        return job in self._all

    def __iter__(self) -> Iterator[JobId]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __repr__(self) -> str:
        return repr(self._all)

    def peek(self, job: JobId) -> "JobHistory | JobCard":
        """The job where it is in memory, else its card."""
        return self._all[job]

    def all(self) -> "Iterator[JobHistory | JobCard]":
        """Every job or its card, oldest first."""
        return iter(self._all.values())

    def resident(self) -> "Collection[JobHistory]":
        """Jobs in memory: each that has not ended is among them."""
        return self._resident.values()

    def changed_since(self, entry: int) -> list[tuple[int, "JobHistory"]]:
        """Jobs that an entry after this one has changed, and the number of the last that did."""
        return [(at, self._resident[job]) for job, at in self._changed.items() if at > entry]

    def held_by(self, incarnations: Collection[Incarnation]) -> list[JobId]:
        """Shelved jobs of which these processes may hold chunks, oldest first."""
        jobs = {job for incarnation in incarnations for job in self._held_by.get(incarnation, ())}
        return sorted(jobs, key=lambda job: self._all[job].number)

    # --- changes ---

    def add(self, job: "JobHistory", entry: int) -> None:
        """A job is submitted by this entry of the log, or read from a snapshot that covers it."""
        self._all[job.job] = self._resident[job.job] = job
        self._changed[job.job] = entry

    def add_card(self, card: JobCard) -> None:
        """An ended job is on the shelf, when a snapshot is taken up."""
        self._all[card.job] = card
        self._count(card, 1)

    def change(self, job: JobId, entry: int) -> "JobHistory":
        """The job, to be changed by this entry of the log; in memory from now on."""
        found = self._all[job]
        if isinstance(found, JobCard):
            self._count(found, -1)
            found = self._all[job] = self._resident[job] = self[job]
            del self._recent[job]
        self._changed[job] = entry
        return found

    def let_go(self, card: JobCard, entry: int) -> bool:
        """Let go of a job that the shelf has as it was at `entry`; False if it has changed since."""
        if self._changed[card.job] > entry:
            return False
        del self._resident[card.job], self._changed[card.job]
        self._all[card.job] = card
        self._count(card, 1)
        return True

    def _count(self, card: JobCard, sign: int) -> None:
        self.stored_shelved[card.namespace] += sign * card.stored_bytes
        if card.sweep is None:
            self.num_shelved[card.state] += sign
        for incarnation in card.holders:
            others = tuple(job for job in self._held_by.get(incarnation, ()) if job != card.job)
            self._held_by[incarnation] = (*others, card.job) if sign > 0 else others
            if not self._held_by[incarnation]:
                del self._held_by[incarnation]
