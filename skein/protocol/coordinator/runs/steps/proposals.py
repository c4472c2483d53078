"""Picks of workers, each of its own rows, in one look at all of them: who is waited for, and what is kept of it.

Rules of this file
- In an array models of rows are asked, and its one worker picks for all at once. Who has not picked for all of them has
  not picked.
- Nothing that a worker tells takes more memory than `MOST_CANDIDATE_BYTES` of all together; who tells most pays.
"""

from collections import Counter
from collections.abc import Mapping
from math import inf

from skein.errors import RemoteError
from skein.numeric.coreset.distributed import Candidates
from skein.numeric.coreset.portions import Portion
from skein.protocol.messages.coresets import (
    MOST_CANDIDATE_BYTES,
    CandidatesPicked,
    candidates_of,
    fault_of_part,
)
from skein.types import Step, WorkerId

LATE_RATIO = 3.0
GRACE_S = 5.0
"""A worker is late that takes so many times as long as the first half of all did, and so many seconds more."""
_Place = tuple[WorkerId, int]
"""Worker, and row of an array whose model it asks; of any other job 0."""
_PART_BYTES, _GROUP_BYTES = 512, 80
"""Memory of a part that has nothing in it, and of a group's number and count."""


class Proposals:
    """Candidates of the workers where rows end, by parameters at one version.

    Args:
        version: of the parameters by which rows are looked at.
        portions: rows by the worker that picks of them.
        rows: of an array whose models are asked; (0,) for any other job.
        now: seconds, from when on workers are at it.
    """

    def __init__(
        self, version: Step, portions: Mapping[WorkerId, Portion], rows: tuple[int, ...], *, now: float
    ) -> None:
        self.version = version
        self.portions = dict(portions)
        self.rows = rows
        self._since_s = now
        self._half_s: float | None = None
        """Time at which half of the workers had picked."""
        self._parts: dict[_Place, dict[int, CandidatesPicked]] = {}
        self._found: dict[_Place, Candidates | str] = {}
        self._num_bytes = Counter[_Place]()

    def hurry(self, *, now: float) -> None:
        """Training stands still for them: whoever is late is so from now on, for nobody hurries beside steps."""
        self._since_s = now
        self._half_s = None if self._half_s is None else now

    def take(self, worker: WorkerId, report: CandidatesPicked, *, now: float) -> None:
        """Take a part of what a worker has picked; what is told of anything else is dropped."""
        place = (worker, report.row)
        if worker not in self.portions or report.version != self.version:
            return
        if report.row not in self.rows or place in self._found:
            return  # What more it tells of is for nothing.
        parts = self._parts.setdefault(place, {})
        parts[report.part] = report
        self._num_bytes[place] += _num_bytes(report)
        if (fault := fault_of_part(report)) is not None:
            self._refuse(place, fault)
        elif self._num_bytes.total() > MOST_CANDIDATE_BYTES:
            # Whoever tells of most by far pays, not whoever is last.
            heaviest = max(sorted(self._num_bytes), key=lambda at: self._num_bytes[at])
            self._refuse(
                heaviest, "too many candidates to keep: give a smaller fraction, or distributed: local"
            )
        if len(parts) == report.num_parts and place not in self._found:
            self._found[place] = _candidates([parts[i] for i in sorted(parts)])
        if self._half_s is None and 2 * len(self.wanting()) <= len(self.portions):
            self._half_s = now

    def _refuse(self, place: _Place, why: str) -> None:
        """Keep nothing of what a worker has told of."""
        self._found[place] = why
        self._parts.pop(place, None)
        self._num_bytes.pop(place, None)

    def late_at(self) -> float:
        """Time at which who has not picked is waited for no more."""
        if self._half_s is None:
            return inf
        return self._half_s + (LATE_RATIO - 1) * (self._half_s - self._since_s) + GRACE_S

    def wanting(self) -> list[WorkerId]:
        """Workers that have not picked for all rows."""
        return [
            worker for worker in self.portions if any((worker, row) not in self._found for row in self.rows)
        ]

    def leave_out(self, why: str) -> None:
        """Go on without what is wanting."""
        for worker in self.wanting():
            for row in self.rows:
                self._found.setdefault((worker, row), why)

    def of_row(self, row: int) -> dict[WorkerId, Candidates | str]:
        """Candidates of each worker by the model of a row, or why it has none."""
        return {worker: found for (worker, by), found in self._found.items() if by == row}


def _num_bytes(part: CandidatesPicked) -> int:
    """Memory that a part takes, numbers of groups as Python has them."""
    arrays = (part.ids, part.sizes, *part.factors)
    return _PART_BYTES + _GROUP_BYTES * len(part.groups) + len(part.error) + sum(map(len, arrays))


def _candidates(parts: list[CandidatesPicked]) -> Candidates | str:
    try:
        return candidates_of(parts)
    except RemoteError as error:
        return str(error)
