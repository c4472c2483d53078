"""The rule by which jobs share workers: which jobs have their gang, and which workers each should have.

Rules of this file
- A job starts with its gang: as many workers as it asks for at least, on which a plan of it exists; not before.
- Higher priorities first: to what their plans use, then lower ones. A job that works keeps its gang, unless one of a
  higher priority cannot have its own otherwise.
- Among equals everybody first has a gang, those that work before those that wait; of those that wait, jobs of
  namespaces that have worked less come first, then older ones. What is left is shared evenly, between namespaces and
  then between their jobs, up to what plans use. Who waits behind a job that does not fit may start before it.
- Not for ever: once a job has waited for `KEEP_S` no job that comes after it starts on workers that it may use, as far
  as those will be enough when equals end. Jobs that work keep their gangs, and use what is kept meanwhile; so it waits
  until enough of them have ended, and for none that comes later.
- No namespace is given more workers than its quota, nor gangs for more jobs; who has more already is called away.
- Workers that no plan uses stay where they are, or stand by for whoever has the fewest.
- Of equal choices the one that moves fewer workers is taken; the same question has the same answer.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from skein.types import DEFAULT_NAMESPACE, JobId, WorkerId

KEEP_S = 600.0
"""Seconds that a job waits, after which workers are kept for it; small jobs beside a large one start until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceLimits:
    """Limits of a namespace: workers that its jobs have together, and jobs that have any."""

    num_workers: float = inf
    num_jobs: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAsk:
    """Wish of a job for workers.

    `num_least` is its gang, `num_useful` what plans of it use, `num_most` what it may have. `may_use` are the workers
    that it may be given at all; `fits` says whether a plan of it exists on some. `used_s` are the worker seconds of its
    namespace, `waited_s` the seconds that it has been without a gang, `number` counts jobs as they were submitted.
    `asked_as` is the job that limits count it as: the sweep of an array; None: itself.
    """

    job: JobId
    number: int
    asked_as: JobId | None = None
    namespace: str = DEFAULT_NAMESPACE
    limits: NamespaceLimits = NamespaceLimits()
    priority: int = 0
    used_s: float = 0.0
    waited_s: float = 0.0
    is_active: bool
    num_least: int
    num_useful: int
    num_most: float = inf
    may_use: frozenset[WorkerId]
    fits: Callable[[frozenset[WorkerId]], bool] = field(compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStand:
    """Standing of a worker: whose it is, for whom it was called away, and the memory that it has.

    `place` is its number among the holders of its stage in that job's plan, infinite if no plan uses it: the
    first of all stages are a whole copy, which a job keeps.
    """

    worker: WorkerId
    owner: JobId | None
    place: float = inf
    bound_for: JobId | None = None
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Answer of the rule: the job that each worker should be with, None for nobody, and the jobs without a gang.

    `limited` are those among these that can have none as long as their namespace is at its limits. `kept_for` are
    workers on which no job starts but the one named, which has waited for long.
    """

    by_worker: Mapping[WorkerId, JobId | None]
    without: frozenset[JobId]
    kept_for: Mapping[WorkerId, JobId]
    limited: frozenset[JobId] = frozenset()

    def of(self, job: JobId) -> frozenset[WorkerId]:
        """Workers that a job should have."""
        return frozenset(worker for worker, owner in self.by_worker.items() if owner == job)


def share(asks: Sequence[JobAsk], workers: Iterable[WorkerStand]) -> Shares:
    """Shares of workers that jobs should have, by the rules of this file."""
    return _Sharing(asks, workers).result()


class _Sharing:
    def __init__(self, asks: Sequence[JobAsk], workers: Iterable[WorkerStand]) -> None:
        self._asks = sorted(asks, key=lambda ask: (-ask.priority, ask.number))
        self._workers = {stand.worker: stand for stand in workers}
        self._num_wanting = Counter(worker for ask in asks for worker in ask.may_use)
        self._given: dict[WorkerId, JobAsk] = {}
        self._counts: Counter[JobId] = Counter()
        self._by_namespace: Counter[str] = Counter()
        self._with_gangs: dict[str, set[JobId]] = {}
        self._has_gang: set[JobId] = set()
        self._kept_for: dict[WorkerId, JobId] = {}
        self._limited: set[JobId] = set()

    def result(self) -> Shares:
        for priority in sorted({ask.priority for ask in self._asks}, reverse=True):
            equals = [ask for ask in self._asks if ask.priority == priority]
            for ask in self._in_order(equals):
                self._give_gang(ask)
            # Who works below keeps its gang from those above that have theirs, before these get more.
            for ask in self._in_order([x for x in self._asks if x.priority < priority and x.is_active]):
                self._give_gang(ask)
            self._spread(self._with_gang(equals), lambda ask: min(ask.num_useful, ask.num_most))
        self._leave_rest()
        by_worker = {worker: self._given.get(worker) for worker in self._workers}
        return Shares(
            by_worker={w: None if ask is None else ask.job for w, ask in by_worker.items()},
            without=frozenset(ask.job for ask in self._asks if ask.job not in self._has_gang),
            kept_for=self._kept_for,
            limited=frozenset(self._limited),
        )

    def _in_order(self, asks: Iterable[JobAsk]) -> list[JobAsk]:
        """Order in which jobs get their gangs: those that have one already, those that lost part of it, new ones.

        Of the latter two those that have waited for long come first, whoever has used more.
        """

        def place(ask: JobAsk) -> tuple[object, ...]:
            has_one = ask.is_active and self._gang(ask, self._own(ask)) is not None
            turn = (0.0, -ask.waited_s) if ask.waited_s >= KEEP_S else (1.0, ask.used_s)
            return -ask.priority, not has_one, not ask.is_active, turn, ask.number

        return sorted(asks, key=place)

    def _own(self, ask: JobAsk) -> list[WorkerId]:
        return [worker for worker in self._free(ask) if self._workers[worker].owner == ask.job]

    def _free(self, ask: JobAsk) -> list[WorkerId]:
        """Workers that a job may have and nobody was given, the ones that cost least to move first."""

        def cost(worker: WorkerId) -> tuple[object, ...]:
            stand = self._workers[worker]
            is_own = stand.owner == ask.job
            return (
                not is_own,
                stand.place if is_own else 0.0,
                # Free workers come now, those that were called may never come.
                stand.owner is not None,
                stand.bound_for != ask.job,
                0.0 if is_own or stand.owner is None else -stand.place,
                self._num_wanting[worker],
                worker,
            )

        return sorted(ask.may_use & self._workers.keys() - self._given.keys(), key=cost)

    def _gang(self, ask: JobAsk, workers: Sequence[WorkerId], room: float = inf) -> Sequence[WorkerId] | None:
        """The first of these on which a plan exists, no fewer than the job asks for; None if all are too few.

        Of as many the ones with most memory are tried where the first do not do.
        """
        roomy = sorted(workers, key=lambda worker: -self._workers[worker].memory_bytes)
        most = int(min(len(workers), ask.num_most, room))
        for size in range(max(1, ask.num_least), most + 1):
            for gang in (workers[:size], roomy[:size]):
                if ask.fits(frozenset(gang)):
                    return gang
        return None

    def _give_gang(self, ask: JobAsk) -> None:
        if ask.job in self._has_gang:
            return
        free, room = self._free(ask), self._room(ask)
        open_to_it = [w for w in free if ask.is_active or w not in self._kept_for]
        others = self._with_gangs.setdefault(ask.namespace, set()) - {ask.asked_as or ask.job}
        is_full = len(others) >= ask.limits.num_jobs or room < ask.num_least
        gang = None if is_full else self._gang(ask, open_to_it, room)
        if gang is not None:
            self._has_gang.add(ask.job)
            self._limited.discard(ask.job)
            self._with_gangs[ask.namespace].add(ask.asked_as or ask.job)
            for worker in gang:
                self._give(ask, worker)
        elif is_full or (room < len(open_to_it) and self._gang(ask, open_to_it) is not None):
            self._limited.add(ask.job)
        elif ask.waited_s >= KEEP_S and self._gang(ask, [*free, *self._with_equals(ask)]) is not None:
            for worker in free:
                self._kept_for.setdefault(worker, ask.job)

    def _with_equals(self, ask: JobAsk) -> list[WorkerId]:
        """Workers that a job could have if its equals had ended."""
        return sorted(w for w in ask.may_use & self._given.keys() if self._given[w].priority == ask.priority)

    def _room(self, ask: JobAsk) -> float:
        """Workers that the namespace of a job may be given still."""
        return ask.limits.num_workers - self._by_namespace[ask.namespace]

    def _give(self, ask: JobAsk, worker: WorkerId) -> None:
        self._given[worker] = ask
        self._counts[ask.job] += 1
        self._by_namespace[ask.namespace] += 1

    def _with_gang(self, asks: Iterable[JobAsk]) -> list[JobAsk]:
        return [ask for ask in asks if ask.job in self._has_gang]

    def _spread(self, asks: Collection[JobAsk], most: Callable[[JobAsk], float]) -> None:
        """Give workers one by one to the job that has the fewest, of the namespace that has the fewest."""
        while True:
            open_to = [
                ask
                for ask in asks
                if self._counts[ask.job] < most(ask) and self._room(ask) >= 1 and self._free(ask)
            ]
            if not open_to:
                return
            ask = min(
                open_to,
                key=lambda x: (
                    self._by_namespace[x.namespace],
                    self._counts[x.job],
                    -len(self._own(x)),
                    x.number,
                ),
            )
            self._give(ask, self._free(ask)[0])

    def _leave_rest(self) -> None:
        """Leave workers that nobody needs with the job that they are with, or have them stand by for another."""
        owners = {worker: stand.owner for worker, stand in self._workers.items()}
        lost = {owners[w] for w, ask in self._given.items() if owners[w] != ask.job}
        # Of a job that lost its gang to others, or to its namespace's limits, nobody is kept: it is saved, and waits.
        parted = (lost | self._limited) - self._has_gang
        keeping = {ask.job: ask for ask in self._asks if ask.job not in parted}
        for worker, owner in sorted(owners.items()):
            ask = None if owner is None or worker in self._given else keeping.get(owner)
            if ask is not None and self._counts[ask.job] < ask.num_most and self._room(ask) >= 1:
                self._give(ask, worker)
        self._spread(self._with_gang(self._asks), lambda ask: ask.num_most)
        # Who has no gang yet may be told by those who are here what it lacks.
        self._spread([ask for ask in keeping.values() if ask.is_active], lambda ask: ask.num_most)
