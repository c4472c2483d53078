"""Links that look broken are named, and healthy ones are not."""

import numpy as np
import pytest

from skein.topology.doubts import DOUBTED_FROM, questioned_links


def two_towns(num_workers: int = 8) -> np.ndarray:
    """1 s between Ayr (even) and Bonn (odd), 10 ms inside."""
    town = np.arange(num_workers) % 2
    return np.where(town[:, None] == town[None, :], 0.01, 1.0)


PLACES = ("Ayr", "Bonn") * 4


def test_places_far_apart_are_no_reason_for_doubt() -> None:
    assert questioned_links(two_towns(), PLACES) == ()


def test_one_link_of_many_between_two_places_is_questioned_in_its_direction_only() -> None:
    seconds = two_towns()
    seconds[2, 5] = 31.0
    [doubt] = questioned_links(seconds, PLACES)
    assert (doubt.sender, doubt.receiver, doubt.seconds, doubt.usual_s) == (2, 5, 31.0, 1.0)
    assert doubt.like == "links between Ayr and Bonn"


def test_a_link_inside_a_place_is_compared_with_those_inside() -> None:
    seconds = two_towns()
    seconds[0, 2] = 1.0
    assert [(x.sender, x.receiver, x.like) for x in questioned_links(seconds, PLACES)] == [
        (0, 2, "links inside Ayr")
    ]


def test_a_pair_of_places_that_is_all_wrong_is_compared_with_other_pairs() -> None:
    places = tuple("ABCD")
    seconds = np.ones((4, 4))
    seconds[0, 3] = seconds[3, 0] = 100.0
    found = questioned_links(seconds, places)
    assert [(x.sender, x.receiver, x.like) for x in found] == [
        (0, 3, "links between places"),
        (3, 0, "links between places"),
    ]


@pytest.mark.parametrize(("factor", "num_doubts"), [(DOUBTED_FROM, 0), (DOUBTED_FROM * 1.01, 1)])
def test_doubt_begins_above_the_stated_factor(factor: float, num_doubts: int) -> None:
    seconds = np.ones((5, 5))
    seconds[1, 2] = factor
    assert len(questioned_links(seconds)) == num_doubts


def test_too_few_links_say_nothing() -> None:
    assert questioned_links(np.array([[0.0, 1.0], [1000.0, 0.0]])) == ()
    assert questioned_links(np.zeros((1, 1))) == ()


def test_links_that_take_no_time_question_nothing() -> None:
    seconds = np.zeros((4, 4))
    seconds[0, 1] = 1.0
    assert questioned_links(seconds) == ()


def test_the_worst_link_comes_first() -> None:
    seconds = np.ones((5, 5))
    seconds[1, 2], seconds[3, 4] = 40.0, 90.0
    assert [x.factor for x in questioned_links(seconds)] == [90.0, 40.0]
