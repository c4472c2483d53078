"""Problems drawn at random: unequal workers and links, both layouts."""

from collections.abc import Sequence

import numpy as np

from skein.plan.route.problem import Problem, Reduction
from skein.rng import stream
from skein.types import Layout


def drawn_problem(
    *,
    sizes: Sequence[int] = (3, 2, 2),
    path_len: int = 2,
    layout: Layout = Layout.LOOP,
    num_slots: int = 2,
    num_waves: int = 2,
    num_workers: int | None = None,
    max_swaps: int = 2,
    max_jump: int = 4,
    seed: int = 0,
) -> Problem:
    """A problem whose workers differ by up to half, on links of 1 to 8 MB/s, each way its own, that carry 1 MB."""
    rng = stream(seed, "drawn", *sizes)
    num_workers = sum(sizes) if num_workers is None else num_workers
    per_stage = (num_workers, len(sizes))
    forward_s = rng.uniform(1.0, 1.5, per_stage)
    latency_s = rng.uniform(0.01, 0.3, (num_workers, num_workers))
    bytes_per_s = rng.uniform(1e6, 8e6, (num_workers, num_workers))
    np.fill_diagonal(latency_s, 0.0)
    np.fill_diagonal(bytes_per_s, np.inf)
    return Problem(
        name="drawn",
        layout=layout,
        stage_sizes=tuple(sizes),
        path_len=path_len,
        num_by_origin=(num_waves * num_slots,) * sizes[0],
        max_swaps=max_swaps,
        max_jump=max_jump,
        forward_s=forward_s,
        backward_s=1.5 * forward_s,
        loss_s=rng.uniform(0.2, 0.4, num_workers),
        transfer_s=latency_s + 1e6 / bytes_per_s,
        wire_s=np.zeros_like(latency_s),
        slots=np.full(per_stage, num_slots),
        reduction=Reduction(num_bytes=np.full(len(sizes), 5e6), latency_s=latency_s, bytes_per_s=bytes_per_s),
    )
