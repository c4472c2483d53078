"""Devices of a mesh: how long they are waited for, and who is to blame when several end."""

import pytest

from skein.protocol.worker.mesh.losing import FAILED, NO_MEMORY, SUM_BROKEN, loss_of
from skein.protocol.worker.mesh.patience import LEAST_PATIENCE_S, NUM_KEPT, WARMING_S, DevicePatience

DEVICES = ("cuda:0", "cuda:1", "cuda:2")


def test_what_was_asked_before_is_waited_for_twice_the_longest_of_late_and_some_seconds_at_least() -> None:
    patience = DevicePatience()
    assert patience.bound_s("forward") == WARMING_S
    patience.took("forward", 0.1)
    assert patience.bound_s("forward") == LEAST_PATIENCE_S
    patience.took("forward", 4.0)
    patience.took("forward", 0.1)
    assert patience.bound_s("forward") == 8.0
    assert patience.bound_s("backward") == WARMING_S
    for _ in range(NUM_KEPT):
        patience.took("forward", 0.1)
    assert patience.bound_s("forward") == LEAST_PATIENCE_S


def test_an_answer_that_is_owed_for_as_long_as_any_op_is_waited_for_is_why_a_worker_is_turned_away() -> None:
    patience = DevicePatience()
    patience.took("forward", 4.0)
    assert not patience.is_hung(LEAST_PATIENCE_S - 0.1)
    assert patience.is_hung(LEAST_PATIENCE_S)


def test_what_is_of_no_kind_says_nothing_of_the_next() -> None:
    patience = DevicePatience()
    patience.took(None, 0.1)
    assert patience.bound_s(None) == WARMING_S


def test_what_goes_along_the_first_time_may_take_longer() -> None:
    patience = DevicePatience()
    assert patience.bound_s("load", num_bytes=10**11) == WARMING_S + 1000
    patience.took("load", 200.0)
    assert patience.bound_s("load", num_bytes=10**11) == 400.0


@pytest.mark.parametrize(
    ("codes", "blamed", "at", "why"),
    [
        ({2: -9}, None, 2, "was killed by signal 9"),
        ({0: SUM_BROKEN, 2: NO_MEMORY, 1: SUM_BROKEN}, None, 2, "is out of memory"),
        ({1: FAILED}, None, 1, "failed"),
        ({1: 7}, None, 1, "ended with 7"),
        ({0: SUM_BROKEN, 1: SUM_BROKEN, 2: SUM_BROKEN}, None, 0, "lost the other devices"),
        ({0: -9, 1: -9, 2: -9}, (1, "hung"), 1, "hung"),
    ],
)
def test_who_lost_the_others_is_not_who_is_lost(
    codes: dict[int, int], blamed: tuple[int, str] | None, at: int, why: str
) -> None:
    loss = loss_of(DEVICES, codes, blamed=blamed)
    assert loss.reason == f"the process of device {at} (cuda:{at}) {why}"
    assert loss.left == tuple(device for device in DEVICES if device != f"cuda:{at}")
