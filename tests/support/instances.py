"""Small instances: workers in two towns, a fast link inside each and a slower one between."""

from collections.abc import Sequence

Instance = dict[str, object]


def instance(
    *,
    sizes: Sequence[int] = (2, 2, 2),
    path_len: int = 2,
    memory: int = 2,
    waves: int = 1,
    near_s: float = 0.25,
    far_s: float = 2.0,
    has_reduction: bool = False,
) -> Instance:
    """An instance of `sum(sizes)` equal workers, in turn in Ayr and in Bonn."""
    num_workers = sum(sizes)
    towns = [("Ayr", "Bonn")[worker % 2] for worker in range(num_workers)]
    made: Instance = {
        "name": "small",
        "n_nodes": num_workers,
        "stage_sizes": list(sizes),
        "path_len": path_len,
        "memory": memory,
        "waves": waves,
        "fwd_s": [1.0] * num_workers,
        "bwd_factor": 1.5,
        "loss_factor": 0.25,
        "comm_s": matrix(num_workers, near_s, far_s),
        "locations": towns,
    }
    if has_reduction:
        made |= {
            "grad_bytes_per_stage": 2**20,
            "latency_ms": matrix(num_workers, 1.0, 100.0),
            "bandwidth_gib_s": matrix(num_workers, 1.0, 2**-10),
        }
    return made


def matrix(num_workers: int, near: float, far: float) -> list[list[float]]:
    """`near` within a town, `far` between, zero on the diagonal."""
    return [
        [0.0 if a == b else near if a % 2 == b % 2 else far for b in range(num_workers)]
        for a in range(num_workers)
    ]
