"""Figures of lost devices."""

from dataclasses import replace

from bench.devices import BACK_GOAL_S, REL_LOSS, LostDevice, rows_of

GOOD = LostDevice(
    ended_s=0.1,
    noticed_s=0.3,
    back_s=2.0,
    working_s=6.0,
    step_s=0.5,
    num_lost=0,
    num_dropped=0,
    num_left=0,
    losses=(2.0, 1.0),
)

WANTED = (2.0, 1.0, 0.5)


def missed(*found: LostDevice, way: str = "kill") -> list[str]:
    return [row.what.partition(": ")[2] for row in rows_of(way, found, WANTED) if not row.holds]


def test_the_worst_of_all_losses_is_held_against_each_goal() -> None:
    assert missed(GOOD, GOOD) == []
    assert missed(GOOD, replace(GOOD, noticed_s=0.6)) == ["the coordinator has noticed"]
    assert missed(GOOD, replace(GOOD, back_s=BACK_GOAL_S + 1)) == ["the worker is back with one device"]
    assert missed(GOOD, replace(GOOD, num_lost=1)) == ["steps lost"]
    assert missed(GOOD, replace(GOOD, num_dropped=1)) == ["microbatches lost"]
    assert missed(GOOD, replace(GOOD, num_left=1)) == ["processes left"]
    assert missed(GOOD, replace(GOOD, losses=(2.0, 1 + 2 * REL_LOSS))) == [
        "farthest loss from one plain torch process"
    ]


def test_a_frozen_device_may_take_three_seconds() -> None:
    late = replace(GOOD, ended_s=2.7, noticed_s=2.9)
    assert missed(late, way="freeze") == []
    assert len(missed(late)) == 2
