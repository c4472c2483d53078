"""Data that workers report before a job's first step, while no record says which are the job's."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from skein.protocol.messages.reports import ChunksReady
from skein.types import WorkerId

Reading = tuple[str, int, int]
"""Fingerprint, training samples and validation samples of a worker's data."""


def reading_of(report: ChunksReady) -> Reading:
    """Data that a worker reports."""
    return report.data_fingerprint, report.num_train_samples, report.num_validation_samples


class FirstReadings:
    """The newest reading of each worker, kept over generations: so a third worker decides between two."""

    def __init__(self) -> None:
        self._by_worker: dict[WorkerId, Reading] = {}
        self._has_asked = False
        """Whether workers that had not read were asked once already."""

    def odd(
        self,
        origins: Sequence[WorkerId],
        ready: Mapping[WorkerId, ChunksReady],
        *,
        here: Collection[WorkerId],
        candidates: Collection[WorkerId],
        recorded: str = "",
    ) -> tuple[tuple[WorkerId, ...], bool]:
        """Origins whose data are not those of most workers.

        Args:
            origins: workers at which paths begin, sorted.
            ready: their reports.
            here: workers of the run; readings of others do not count any more.
            candidates: workers that may be given work.
            recorded: fingerprint that the run log has, of steps that are given up: it decides where as many differ.

        Returns:
            The odd origins, and whether that is undecided for good. Where as many workers have other data, all origins
            are odd for once, so that workers read which have not: with these, most have the same.
        """
        self._by_worker = {worker: found for worker, found in self._by_worker.items() if worker in here}
        self._by_worker |= {origin: reading_of(ready[origin]) for origin in origins}
        top = self._leading()
        if len(top) > 1:
            top = [found for found in top if found[0] == recorded] or top
        if len(top) == 1:
            return tuple(origin for origin in origins if reading_of(ready[origin]) != top[0]), False
        is_undecided = self._has_asked or self._by_worker.keys() >= set(candidates)
        self._has_asked = True
        return tuple(origins), is_undecided

    def of_most(self) -> tuple[WorkerId, ...]:
        """Workers with the data of most, sorted; none while that is undecided."""
        top = self._leading()
        return tuple(sorted(w for w, found in self._by_worker.items() if [found] == top))

    def one_for_each(self) -> tuple[WorkerId, ...]:
        """Workers with data that differ, one for each kind, sorted."""
        first = {found: worker for worker, found in sorted(self._by_worker.items(), reverse=True)}
        return tuple(sorted(first.values()))

    def _leading(self) -> list[Reading]:
        counts = Counter(self._by_worker.values())
        most = max(counts.values(), default=0)
        return sorted(found for found, count in counts.items() if count == most)
