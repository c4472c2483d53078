"""Layers of experts on one device since somebody asked last: how long they, and experts within them, took."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from worker.mesh.frames import Metered


class Meter:
    """Times of layers of experts, where the host can tell them.

    Args:
        is_timed: whether what is begun is over when the host goes on; on GPUs it is not.
        clock: seconds.
    """

    def __init__(self, *, is_timed: bool = True, clock: Callable[[], float] = time.perf_counter) -> None:
        self._is_timed = is_timed
        self._clock = clock
        self._begin()

    def _begin(self) -> None:
        self._layers_s = 0.0
        self._experts_s = 0.0
        self._num_layers = 0

    @contextmanager
    def layer(self) -> Iterator[None]:
        """A layer of experts, one way."""
        began_s = self._clock()
        yield
        self._layers_s += self._clock() - began_s
        self._num_layers += 1

    @contextmanager
    def experts(self) -> Iterator[None]:
        """Computing of experts within a layer."""
        began_s = self._clock()
        yield
        self._experts_s += self._clock() - began_s

    def take(self, waited_s: float) -> Metered:
        """All since it was taken last; the device has waited for so long for collectives meanwhile."""
        timed = self._is_timed
        taken = Metered(
            num_layers=self._num_layers if timed else 0,
            layers_s=self._layers_s if timed else 0.0,
            experts_s=self._experts_s if timed else 0.0,
            waited_s=waited_s if timed else 0.0,
        )
        self._begin()
        return taken
