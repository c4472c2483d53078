"""A fleet as plans are made for it: what was measured, to half a percent."""

import math

from hypothesis import given
from hypothesis import strategies as st

from skein.topology.fleet import Fleet, FleetWorker, Link, Profile, StageTime, rounded
from skein.types import SiteId, StageIndex, StageSpec, WorkerId

STAGE = StageSpec(index=StageIndex(0), first=0, stop=1)


def measured(value: float) -> Fleet:
    """A fleet in which everything that is measured is `value`."""
    profile = Profile(device="cpu", device_name="", flops_per_s=value, memory_bytes=1)
    worker = WorkerId("a")
    return Fleet(
        workers=(FleetWorker(worker=worker, site=SiteId("here"), profile=profile),),
        links=(Link(sender=worker, receiver=WorkerId("b"), latency_s=value, bytes_per_s=value),),
        stage_times=(StageTime(worker=worker, stage=STAGE, forward_s=value, backward_s=value),),
    )


def figures(fleet: Fleet) -> list[float]:
    link, times = fleet.links[0], fleet.stage_times[0]
    speed = fleet.workers[0].profile.flops_per_s
    return [speed, link.latency_s, link.bytes_per_s, times.forward_s, times.backward_s]


@given(st.floats(1e-5, 1e15))
def test_nothing_is_off_by_more_than_half_a_percent(value: float) -> None:
    # The nearest power of 1.01 is within its square root, and a little for logarithms.
    assert all(
        abs(math.log(x / value)) <= math.log(1.01) / 2 + 1e-9 for x in figures(rounded(measured(value)))
    )


@given(st.floats(1e-5, 1e15))
def test_rounding_again_changes_nothing(value: float) -> None:
    once = rounded(measured(value))
    assert rounded(once) == once


def test_what_is_almost_equal_becomes_equal() -> None:
    middle = 1.01**300
    assert rounded(measured(middle * 1.002)) == rounded(measured(middle * 0.998))


def test_no_link_is_without_latency_and_nothing_unmeasured_breaks_it() -> None:
    assert rounded(measured(0.0)).links[0].latency_s > 0
    assert rounded(measured(0.0)).workers[0].profile.flops_per_s == 0.0
    assert rounded(measured(math.inf)).links[0].bytes_per_s == math.inf
