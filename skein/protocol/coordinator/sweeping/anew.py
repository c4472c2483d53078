"""Arrays of a sweep that are to be packed anew, as the records have them."""

from collections import Counter
from collections.abc import Collection, Sequence
from math import ceil

from skein.config.job import ArrayJob
from skein.plan.sweeping.packing import Parting, parting
from skein.plan.sweeping.repacking import ArrayStand, to_join, to_part
from skein.protocol.coordinator.sweeping.deciding import SweepCourse
from skein.protocol.log.history import JobHistory
from skein.protocol.messages.array_rounds import PassKind
from skein.types import JobId


class _Keys:
    """Numbers of what the rows of one array have in common: a part of their trials' jobs, and where they come to."""

    def __init__(self) -> None:
        self._known: dict[tuple[Parting, int], int] = {}

    def of(self, course: SweepCourse, trial: int, last_step: int) -> int:
        return self._known.setdefault((parting(course.stands[trial].trial), last_step), len(self._known))


def chosen_anew(
    arrays: Sequence[JobHistory],
    waiting: Collection[JobId],
    course: SweepCourse,
    *,
    num_spare: int,
    most_rows: int,
) -> tuple[tuple[JobId, ...], str]:
    """Arrays that are to end with their rounds so that their rows are packed anew, and why.

    Args:
        arrays: of a sweep that have not come to rest.
        waiting: those of them that no worker has.
        course: of that sweep.
        num_spare: workers that nobody has or waits for; below 0: those that are lacking.
        most_rows: of an array.
    """
    keys = _Keys()
    if most_rows == 1 or not (num_spare or course.due):
        return (), ""
    # Where none is lacking, whoever waits has a worker at once.
    late = frozenset(waiting) if num_spare < 0 else frozenset[JobId]()
    stands = [found for array in arrays if (found := _stand(array, course, keys, waits=array.job in late))]
    if num_spare > 0 and not course.due:
        return to_part(stands, num_idle=num_spare), "workers are without an array"
    if not any(stand.is_small for stand in stands):
        return (), ""
    due = Counter(keys.of(course, x.trial, x.num_steps) for x in course.due)
    joined = to_join(stands, due, num_excess=min(len(late), max(0, -num_spare)), most_rows=most_rows)
    return joined, "few of its rows are left, and others wait"


def _stand(array: JobHistory, course: SweepCourse, keys: _Keys, *, waits: bool) -> ArrayStand | None:
    """Standing of an array; None if its rows are to stay together, or are but a trial alone."""
    spec = array.spec
    if not isinstance(spec, ArrayJob) or array.halt is not None or spec.data.coreset.is_shared:
        return None
    last = spec.array.last_step
    rows = [stand for stand in (course.stands[trial] for trial in array.trials) if not stand.failure]
    if not rows or any(stand.num_steps >= last for stand in rows):
        return None  # Who is through is evaluated with the array.
    made = None if array.last_commit is None else array.last_commit.array
    return ArrayStand(
        job=array.job,
        key=keys.of(course, array.trials[0], last),
        num_begun=len(array.trials),
        num_rows=len(rows),
        num_rounds_left=ceil((last - min(stand.num_steps for stand in rows)) / spec.round_steps),
        gains=made is not None and made.pass_kind is not PassKind.LOOPED,
        waits=waits,
    )
