"""Who is to blame for failures: three in a row, and a worker gets no more work.

A worker that cannot read checkpoints is not to blame: it is set aside until a step is committed, for then others have
what it needs, or until the run cannot do without it. One that lacks what the job names is set aside until the latter.
"""

from collections.abc import Mapping

from skein.types import WorkerId

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
        self._num_by_worker: dict[WorkerId, int] = {}
        self._num_lasting: dict[WorkerId, int] = {}
        self._excluded: dict[WorkerId, str] = {}
        self._accused: set[WorkerId] = set()
        self._set_aside: set[WorkerId] = set()
        self._unfit: set[WorkerId] = set()
        """Of those, who lacks what the job names."""

    @property
    def excluded(self) -> Mapping[WorkerId, str]:
        """Workers that get no more work, with the last thing that failed."""
        return self._excluded

    @property
    def may_pardon(self) -> bool:
        """Whether somebody was excluded on the word of peers alone, or set aside."""
        return bool((self._accused | self._set_aside) & self._excluded.keys())

    @property
    def lacking(self) -> str | None:
        """What those who are set aside cannot use, which may be mended; None: nobody is."""
        if self._unfit:
            return "what the job names"
        return "the place of the checkpoints" if self._set_aside else None

    def strike(self, worker: WorkerId, reason: str, *, is_hearsay: bool, lasts: bool = False) -> bool:
        """Count a failure, which the worker itself reported unless `is_hearsay`; True if that excludes it."""
        num_lasting = self._num_lasting[worker] = self._num_lasting.get(worker, 0) + lasts
        count = self._num_by_worker[worker] = self._num_by_worker.get(worker, 0) + 1
        if count == 1 and is_hearsay:
            self._accused.add(worker)
        elif not is_hearsay:
            self._accused.discard(worker)
        if max(count, num_lasting) < MAX_STRIKES or worker in self._excluded:
            return False
        self._excluded[worker] = reason
        return True

    def set_aside(self, worker: WorkerId, reason: str, *, lasts: bool = False) -> None:
        """Give a worker no more work for now, for what may be no fault of its own; `lasts`: steps do not change it."""
        self._excluded[worker] = reason
        self._set_aside.add(worker)
        if lasts:
            self._unfit.add(worker)

    def exclude(self, worker: WorkerId, reason: str) -> None:
        """Give a worker no more work until the run cannot do without it."""
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

    def forget(self, worker: WorkerId) -> None:
        """A worker joined anew."""
        self._num_lasting.pop(worker, None)
        self._num_by_worker.pop(worker, None)
        self._excluded.pop(worker, None)
        self._accused.discard(worker)
        self._set_aside.discard(worker)
        self._unfit.discard(worker)

    def pardon(self) -> tuple[WorkerId, ...]:
        """Give another chance to whoever was set aside, or excluded on the word of peers alone; says who they are."""
        pardoned = tuple(sorted((self._accused | self._set_aside) & self._excluded.keys()))
        for worker in pardoned:
            self.forget(worker)
        return pardoned
