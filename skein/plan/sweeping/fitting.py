"""Memory that the rows of an array take on their worker."""

from skein.config.job import ArrayJob
from skein.plan.load import stage_loads
from skein.types import StageIndex, StageSpec

_MOST_OFF = 8
"""Times that what a worker has measured may be above or below what is reckoned: one that lies ends no sweep."""


def array_bytes(array: ArrayJob, measured: tuple[int, int] | None = None) -> int:
    """Bytes that an array takes on its worker while it makes a step.

    Args:
        array: its rows.
        measured: bytes whatever their number, and of each; None: it is reckoned, from the layers.
    """
    stage = StageSpec(index=StageIndex(0), first=0, stop=len(array.layers))
    (load,) = stage_loads(array, [stage])
    reckoned = load.memory_bytes(1)
    if measured is None:
        return reckoned
    fixed_bytes, row_bytes = measured
    found = fixed_bytes + row_bytes * len(array.rows)
    return min(max(found, reckoned // _MOST_OFF), reckoned * _MOST_OFF)
