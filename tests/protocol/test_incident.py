"""What a failure cost: one line whatever happened, and sums that miss nothing."""

from dataclasses import replace

import pytest

from skein.protocol.log.incident import cost, incident_line, num_replayed, ranges, remedied, total, what
from skein.protocol.log.records import IncidentKind, Remedy
from skein.types import MicrobatchId, WorkerId
from tests.support.incidents import incident, replayed


def test_a_line_says_what_failed_what_was_done_and_what_it_cost() -> None:
    line = incident_line(
        incident("demo-1", replayed=(replayed(1, 2, 5), replayed(2, 3)), num_samples_repeated=12)
    )
    assert line == (
        "incident job=demo-1 step=41 generation=3 worker_lost w3 (stream broke, silent 0.30 s): "
        "resumed after 0.62 s (fence 0.41 s), 4 hops rerouted, replayed stage 1: 2, 5 and stage 2: 3; "
        "0 steps lost, 12 samples repeated"
    )


def test_what_did_not_happen_is_not_told() -> None:
    quiet = incident(workers=(), reason="", silent_s=0.0, num_rerouted=0, kind=IncidentKind.STALLED)
    quiet = replace(quiet, remedy=Remedy.UNTOUCHED, num_samples_repeated=0)
    assert what(quiet) == "stalled"
    assert remedied(quiet) == "untouched after 0.62 s (fence 0.41 s)"
    assert cost(quiet) == "0 steps lost, 0 samples repeated"


def test_silence_that_is_the_reason_is_not_told_twice() -> None:
    assert what(incident(reason="silent for 2.5 s", silent_s=2.5)) == "worker_lost w3 (silent for 2.5 s)"


def test_a_single_hop_step_or_sample_is_not_a_plural() -> None:
    one = incident(num_rerouted=1, num_retried=1, num_steps_lost=1, num_samples_repeated=1)
    assert "1 hop rerouted, 1 microbatch begun anew; 1 step lost, 1 sample repeated" in incident_line(one)


def test_a_huge_incident_and_a_reason_of_many_lines_are_one_short_line() -> None:
    whole_site = tuple(WorkerId(f"worker-{number:04d}") for number in range(500))
    stages = tuple(replayed(stage, *range(0, 400, 2)) for stage in range(100))
    line = incident_line(
        incident(workers=whole_site, replayed=stages, reason="first\n\tsecond " + "word " * 1000)
    )
    assert "worker-0007 and 492 more" in line
    assert "stage 7: 0, 2, 4, 6, 8, 10, 12, 14 and 192 more and 92 stages more" in line
    assert "(first second word" in line
    assert "\n" not in line
    assert len(line) < 1200


@pytest.mark.parametrize(
    ("microbatches", "text"),
    [((), ""), ((3,), "3"), ((2, 1, 0), "0-2"), ((0, 2, 3, 9), "0, 2-3, 9"), (tuple(range(64)), "0-63")],
)
def test_runs_of_microbatches_are_named_by_their_ends(microbatches: tuple[int, ...], text: str) -> None:
    assert ranges([MicrobatchId(microbatch) for microbatch in microbatches]) == text


def test_totals_add_up_and_count_only_what_occurred() -> None:
    found = total(
        [
            incident(replayed=(replayed(0, 1), replayed(1, 1, 2)), seconds=0.5),
            incident(kind=IncidentKind.LINK_FAILED, num_retried=3, remedy=Remedy.RETRIED, seconds=2.0),
            incident(remedy=Remedy.ROLLED_BACK, num_steps_lost=7, seconds=1.0, num_samples_repeated=56),
        ]
    )
    assert found.num_incidents == 3
    assert found.num_by_kind == {IncidentKind.WORKER_LOST: 2, IncidentKind.LINK_FAILED: 1}
    assert found.num_by_remedy == {Remedy.RESUMED: 1, Remedy.RETRIED: 1, Remedy.ROLLED_BACK: 1}
    assert (found.num_rerouted, found.num_replayed, found.num_retried) == (12, 3, 3)
    assert (found.num_steps_lost, found.num_samples_repeated) == (7, 72)
    assert (found.seconds, found.median_s, found.p99_s) == (3.5, 1.0, 2.0)


def test_quantiles_are_times_that_so_many_percent_did_not_exceed() -> None:
    found = total([incident(seconds=float(number)) for number in range(200, 0, -1)])
    assert (found.median_s, found.p99_s) == (100.0, 198.0)


def test_no_incident_costs_nothing() -> None:
    found = total([])
    assert found.num_incidents == found.num_steps_lost == found.num_samples_repeated == 0
    assert found.seconds == found.median_s == found.p99_s == 0.0
    assert found.num_by_kind == {}


def test_each_contribution_is_counted() -> None:
    assert num_replayed(incident(replayed=(replayed(0, 4, 5), replayed(3, 4)))) == 3
