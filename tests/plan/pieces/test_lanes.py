"""Pieces of a layer of experts: when it ends, how many are best, on published times and by another simulation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.pieces import NOISE, lines_of
from bench.published import EXCHANGES, layers
from skein.plan.pieces.lanes import MOST_PIECES, LayerWork, Work, best_pieces, end_s, idle_s
from tests.plan.pieces.closed_forms import closed_end_s, closed_idle_s

_seconds = st.floats(0, 1e-2)
_works = st.builds(Work, each_s=_seconds, all_s=_seconds)
_layers = st.builds(LayerWork, exchange=_works, experts=_works, after_s=_seconds)
_numbers = st.integers(1, MOST_PIECES)


def walked_s(given: LayerWork, num: int, sums_s: float = 0.0) -> float:
    """The same end, by asking each lane over and over for what it can begin next."""
    between = [("there", i) for i in range(num)] + [("sums", 0)] + [("back", i) for i in range(num)]
    lanes = {"between": between, "compute": [("experts", i) for i in range(num)] + [("after", 0)]}
    free = dict.fromkeys(lanes, 0.0)
    done: dict[tuple[str, int], float] = {}
    long_s = {
        "there": given.exchange.piece_s(num),
        "back": given.exchange.piece_s(num),
        "experts": given.experts.piece_s(num),
        "sums": sums_s,
        "after": given.after_s,
    }
    before = {"experts": "there", "back": "experts"}

    def ready_s(kind: str, i: int) -> float | None:
        return done.get((before[kind], i)) if kind in before else 0.0

    while any(lanes.values()):
        moved = False
        for name, queue in lanes.items():
            while queue and (at_s := ready_s(*queue[0])) is not None:
                kind, i = queue.pop(0)
                free[name] = done[kind, i] = max(free[name], at_s) + long_s[kind]
                moved = True
        assert moved
    return max(free.values())


@given(given=_layers, num=_numbers)
def test_a_layer_ends_as_its_lanes_do_asked_one_by_one(given: LayerWork, num: int) -> None:
    assert end_s(given, num) == pytest.approx(walked_s(given, num), rel=1e-12, abs=1e-15)


@given(given=_layers, num=_numbers, share=st.floats(0, 1))
def test_sums_that_fit_into_the_idle_lane_delay_no_layer(given: LayerWork, num: int, share: float) -> None:
    idle = idle_s(given, num)
    assert walked_s(given, num, share * idle) == pytest.approx(end_s(given, num), rel=1e-12, abs=1e-15)
    longer = walked_s(given, num, idle + 1e-3)
    assert longer == pytest.approx(end_s(given, num) + 1e-3, rel=1e-9), "and what does not fit delays it"


@given(exchange=_works, experts=_works, num=_numbers, sums_s=_seconds)
def test_closed_forms_agree(exchange: Work, experts: Work, num: int, sums_s: float) -> None:
    layer = LayerWork(exchange=exchange, experts=experts)
    assert closed_end_s(layer, num) == pytest.approx(end_s(layer, num), rel=1e-12, abs=1e-15)
    assert closed_end_s(layer, num, sums_s) == pytest.approx(
        walked_s(layer, num, sums_s), rel=1e-12, abs=1e-15
    )
    assert closed_idle_s(layer, num) == pytest.approx(idle_s(layer, num), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", EXCHANGES)
def test_numbers_chosen_by_published_times_are_within_two_percent_of_the_best_walked(name: str) -> None:
    for layer in layers():
        lines = lines_of(layer, EXCHANGES[name])
        chosen = lines_of(layer, EXCHANGES[name], NOISE).pieces(layer.num_rows)
        for num, is_forward in ((chosen.forward, True), (chosen.backward, False)):
            work = lines.layer(layer.num_rows, is_forward=is_forward)
            best_s = min(walked_s(work, other) for other in range(1, 2 * MOST_PIECES + 1))
            assert walked_s(work, num) <= 1.02 * best_s, layer


def test_far_devices_want_few_pieces_and_near_ones_several() -> None:
    most = {
        name: max(lines_of(x, line).pieces(x.num_rows).forward for x in layers())
        for name, line in EXCHANGES.items()
    }
    assert most["Australia to London"] <= 2
    assert most["FSMoE's file"] > 2
    assert most["FSMoE's testbed A"] > 2


def test_forward_and_backward_often_want_different_numbers() -> None:
    exchange = EXCHANGES["FSMoE's file"]
    found = [lines_of(layer, exchange).pieces(layer.num_rows) for layer in layers()]
    assert sum(x.forward != x.backward for x in found) > len(found) / 10


def test_of_equal_numbers_of_pieces_the_smallest_is_taken() -> None:
    assert best_pieces(LayerWork(exchange=Work(), experts=Work(), after_s=1.0)) == 1
