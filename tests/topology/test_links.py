import numpy as np
import pytest

from skein.topology.links import link_cost_s
from tests.plan.builders import fleet, link


def test_unmeasured_links_have_defaults_and_staying_costs_nothing() -> None:
    links = link_cost_s(fleet([1.0, 1.0]))
    assert links.seconds(10**6) == pytest.approx(np.array([[0, 2e-3], [2e-3, 0]]))
    assert links.round_trip_s(10**6) == pytest.approx(np.array([[0, 4e-3], [4e-3, 0]]))


def test_measured_links_are_directed() -> None:
    links = link_cost_s(fleet([1.0, 1.0], links=[link("w0", "w1", 0.1, 1e6), link("w1", "w0", 0.2, 2e6)]))
    assert links.seconds(10**6)[0, 1] == pytest.approx(1.1)
    assert links.seconds(10**6)[1, 0] == pytest.approx(0.7)


def test_an_unmeasured_link_counts_as_the_median_of_its_kind() -> None:
    measured = [link("w0", "w1", 0.001), link("w0", "w2", 0.1), link("w1", "w2", 0.2), link("w1", "w3", 0.9)]
    links = link_cost_s(fleet([1.0] * 4, sites=["a", "a", "b", "b"], links=measured))
    assert links.latency_s[2, 3] == 0.001
    assert links.latency_s[3, 0] == 0.2


def test_with_none_of_its_kind_measured_an_unmeasured_link_counts_as_the_median_of_all() -> None:
    links = link_cost_s(fleet([1.0] * 3, sites=["a", "a", "b"], links=[link("w0", "w1", 0.003)]))
    assert links.latency_s[0, 2] == 0.003


def test_links_of_workers_that_left_do_not_count() -> None:
    links = link_cost_s(fleet([1.0, 1.0], links=[link("w0", "w9", 5.0), link("w9", "w1", 5.0)]))
    assert links.latency_s.max() == 1e-3
