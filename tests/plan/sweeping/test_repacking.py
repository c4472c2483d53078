"""Arrays that are packed anew: parted for workers without one, joined where some wait, and nothing for its own sake."""

from dataclasses import replace

import pytest

from skein.plan.sweeping.repacking import LEAST_ROUNDS, ArrayStand, to_join, to_part
from skein.types import JobId


def stand(name: str, num_rows: int, num_begun: int = 8, *, key: int = 0, waits: bool = False) -> ArrayStand:
    return ArrayStand(
        job=JobId(name),
        key=key,
        num_begun=num_begun,
        num_rows=num_rows,
        num_rounds_left=20,
        gains=True,
        waits=waits,
    )


@pytest.mark.parametrize(
    ("rows", "num_idle", "parted"),
    [
        ([8], 1, ["a0"]),
        ([8, 8], 2, ["a0", "a1"]),
        ([8, 2], 1, ["a0"]),
        ([8, 5], 1, ["a0"]),
        ([1, 1], 3, []),
        ([8], 0, []),
    ],
)
def test_workers_without_an_array_get_their_share_of_the_rows(
    rows: list[int], num_idle: int, parted: list[str]
) -> None:
    arrays = [stand(f"a{number}", num_rows) for number, num_rows in enumerate(rows)]
    assert list(to_part(arrays, num_idle=num_idle)) == parted


def test_what_is_nearly_over_is_left_alone() -> None:
    late = replace(stand("a", 2), num_rounds_left=LEAST_ROUNDS - 1)
    assert to_part([late], num_idle=1) == ()
    assert to_join([late, stand("b", 4, waits=True)], {0: 4}, num_excess=1, most_rows=16) == ()


def test_a_small_array_is_joined_with_what_waits_for_a_worker() -> None:
    small, waiting = stand("a", 3), stand("b", 8, waits=True)
    assert to_join([small, waiting], {}, num_excess=1, most_rows=16) == ("a", "b")
    assert to_join([small, waiting], {}, num_excess=1, most_rows=10) == ()
    assert to_join([small, replace(waiting, key=1)], {}, num_excess=1, most_rows=16) == ()
    assert to_join([stand("a", 5), waiting], {}, num_excess=1, most_rows=16) == ()
    assert to_join([replace(small, gains=False), waiting], {}, num_excess=1, most_rows=16) == ()


def test_no_worker_is_left_without_an_array() -> None:
    arrays = [stand("a", 2), stand("b", 3), stand("c", 4)]
    assert to_join(arrays, {}, num_excess=0, most_rows=16) == ()
    assert to_join([*arrays, stand("d", 9, 9, key=1, waits=True)], {}, num_excess=1, most_rows=16) == (
        "a",
        "b",
    )


def test_a_small_array_takes_in_trials_that_have_not_begun() -> None:
    assert to_join([stand("a", 3)], {0: 5}, num_excess=0, most_rows=16) == ("a",)
    assert to_join([stand("a", 3)], {1: 5}, num_excess=0, most_rows=16) == ()
    assert to_join([stand("a", 3)], {0: 5}, num_excess=0, most_rows=3) == ()
