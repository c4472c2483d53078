"""Blame for failures: after three in a row a worker gets no more work.

A worker that cannot read checkpoints is not to blame: it is set aside until a step is committed, for then others have
what it needs, or until the run cannot do without it. One that lacks what the job names is set aside until the latter.
"""

from collections.abc import Iterable, Mapping

from skein.types import Incarnation, WorkerId

MAX_STRIKES = 3
"""Failures blamed on one worker, with no step committed between them, after which it gets no more work.

As many that last are too many as well, whatever was committed between them.
"""


class Strikes:
    """Counts failures by worker. What only peers said of a worker may be the fault of a link, and can be pardoned.

    A strike lasts where a worker has reported what cannot be, or otherwise than most: steps that are committed all the
    same say nothing for it.
    """

    def __init__(self) -> None:
        self._incarnations: dict[WorkerId, Incarnation] = {}
        self._num_by_worker: dict[WorkerId, int] = {}
        self._num_lasting: dict[WorkerId, int] = {}
        self._excluded: dict[WorkerId, str] = {}
        self._accused: set[WorkerId] = set()
        self._disputed: set[WorkerId] = set()
        """Workers that are excluded as less credible than another, and may have been right."""
        self._set_aside: set[WorkerId] = set()
        self._unfit: set[WorkerId] = set()
        """Workers among those set aside that lack what the job names."""

    @property
    def excluded(self) -> Mapping[WorkerId, str]:
        """Workers that get no more work, with the last thing that failed."""
        return self._excluded

    @property
    def may_pardon(self) -> bool:
        """Whether `pardon` would give somebody another chance."""
        return bool(self._pardonable())

    @property
    def lacking(self) -> str | None:
        """Thing that workers set aside cannot use, which may be mended; None: nobody is set aside."""
        if self._unfit:
            return "what the job names"
        return "the place of the checkpoints" if self._set_aside else None

    def strike(self, worker: WorkerId, reason: str, *, is_hearsay: bool, lasts: bool = False) -> bool:
        """Count a failure, which the worker itself reported unless `is_hearsay`; True if that excludes it."""
        num_lasting = self._num_lasting[worker] = self._num_lasting.get(worker, 0) + lasts
        count = self._num_by_worker[worker] = self._num_by_worker.get(worker, 0) + 1
        if not is_hearsay:
            self._accused.discard(worker)
        elif count == 1 and not self._is_out(worker):
            self._accused.add(worker)
        if max(count, num_lasting) < MAX_STRIKES or self._is_out(worker):
            return False
        self._set_aside.discard(worker)
        self._unfit.discard(worker)
        self._excluded[worker] = reason
        return True

    def _is_out(self, worker: WorkerId) -> bool:
        """Whether a worker is excluded for what it did, not for what it lacks: nothing that it says undoes that."""
        return worker in self._excluded and worker not in self._set_aside

    def set_aside(self, worker: WorkerId, reason: str, *, lasts: bool = False) -> None:
        """Give a worker no more work for now, for what may be no fault of its own; `lasts`: steps do not change it."""
        if self._is_out(worker):
            return
        self._excluded[worker] = reason
        self._set_aside.add(worker)
        if lasts:
            self._unfit.add(worker)

    def exclude(self, worker: WorkerId, reason: str) -> None:
        """Give a worker no more work until the run cannot do without it."""
        if not self._is_out(worker):
            self._excluded[worker] = reason
            self._accused.add(worker)

    def committed(self) -> tuple[WorkerId, ...]:
        """A step was committed: old failures no longer count, exclusions stay; says who is set aside no longer."""
        self._num_by_worker.clear()
        back = tuple(sorted(self._set_aside - self._unfit))
        for worker in back:
            del self._excluded[worker]
        self._set_aside &= self._unfit
        return back

    def convict(self, worker: WorkerId, reason: str, *, may_be_wrong: bool) -> None:
        """Give a worker no more work that others dispute with; `may_be_wrong`: unless the run cannot do without it."""
        self._set_aside.discard(worker)
        self._unfit.discard(worker)
        self._accused.discard(worker)
        self._excluded[worker] = reason
        if may_be_wrong:
            self._disputed.add(worker)

    def acquit(self, workers: Iterable[WorkerId]) -> tuple[WorkerId, ...]:
        """Let those back among these who were only less credible than another; says who they are."""
        back = tuple(worker for worker in workers if worker in self._disputed)
        for worker in back:
            self._let_back(worker)
        return back

    def joined(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """A worker came. A new process begins anew; of one that was only away, what it has done itself stays.

        True if it is a new process.
        """
        is_new = self._incarnations.get(worker) != incarnation
        if is_new:
            self._let_back(worker)
            self._num_lasting.pop(worker, None)
        elif worker in self._accused | self._set_aside:
            self._let_back(worker)
        self._incarnations[worker] = incarnation
        return is_new

    def _pardonable(self) -> set[WorkerId]:
        return (self._accused | self._disputed | self._set_aside) & self._excluded.keys()

    def _let_back(self, worker: WorkerId) -> None:
        """Forget all of a worker but the strikes that last."""
        self._num_by_worker.pop(worker, None)
        self._excluded.pop(worker, None)
        self._accused.discard(worker)
        self._disputed.discard(worker)
        self._set_aside.discard(worker)
        self._unfit.discard(worker)

    def pardon(self) -> tuple[WorkerId, ...]:
        """Give another chance to whoever was set aside, or excluded on the word of others alone; says who they are."""
        pardoned = tuple(sorted(self._pardonable()))
        for worker in pardoned:
            self._let_back(worker)
        return pardoned
