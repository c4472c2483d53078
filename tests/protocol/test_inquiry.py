"""Inquiries: who is convicted, by what a step comes to with and without them."""

from collections.abc import Mapping

import pytest

from skein.plan.plan import Plan
from skein.protocol.coordinator.runs.checking.inquiry import (
    Again,
    Cleared,
    Convicted,
    Inquiry,
    StepOutcome,
    Undecided,
    Verdict,
)
from skein.types import Precision, WorkerId
from tests.support.plans import chunk, path, plan_of

TRUE, FALSE, OTHER = 1.0, -1.0, 3.0
HOLDERS = ("a", "b", "c")


def plan_without(*aside: str) -> Plan:
    """A stage whose microbatches go to its holders in turn; who stands aside is replaced by the next who does not."""
    here = [worker for worker in HOLDERS if worker not in aside]
    taken = [worker if worker in here else here[i % len(here)] for i, worker in enumerate(HOLDERS)]
    return plan_of([chunk(0, worker) for worker in here], [path(chunk(0, worker)) for worker in taken])


def course(
    suspects: str, came: Mapping[str, tuple[float, ...]], *, precision: Precision = Precision.FP64
) -> tuple[list[str], Verdict]:
    """Who stood aside each time, and the end; `came` has the values of each plan, by who stands aside, in turn."""
    inquiry = Inquiry(map(WorkerId, suspects), seed=1, precision=precision)
    values = {aside: list(told) for aside, told in came.items()}
    asides: list[str] = [""]
    while True:
        aside = asides[-1]
        value = values[aside].pop(0)
        verdict = inquiry.came(StepOutcome(sketch=(value, 2.0), loss=abs(value), plan=plan_without(*aside)))
        if not isinstance(verdict, Again):
            return asides, verdict
        asides.append("".join(sorted(verdict.aside)))


def test_who_changes_nothing_is_cleared() -> None:
    asides, verdict = course("ab", {"": (TRUE,), "a": (TRUE,), "b": (TRUE,)})
    assert asides == ["", "a", "b"]
    assert verdict == Cleared()


def test_a_suspect_is_convicted_if_others_agree_without_it() -> None:
    asides, verdict = course("b", {"": (FALSE, FALSE), "b": (TRUE,), "bc": (TRUE,)})
    assert asides == ["", "b", "bc", ""]
    assert isinstance(verdict, Convicted)
    assert verdict.worker == "b"


def test_a_stand_in_that_lies_is_convicted_in_place_of_the_suspect() -> None:
    asides, verdict = course("b", {"": (FALSE,), "b": (OTHER, OTHER), "bc": (TRUE, TRUE)})
    assert asides == ["", "b", "bc", "bc", "b"]
    assert isinstance(verdict, Convicted)
    assert verdict.worker == "c"


def test_a_stand_in_is_convicted_too_where_the_first_result_was_right() -> None:
    _, verdict = course("b", {"": (TRUE,), "b": (FALSE, FALSE), "bc": (TRUE, TRUE)})
    assert isinstance(verdict, Convicted)
    assert verdict.worker == "c"


@pytest.mark.parametrize(
    "came",
    [
        {"": (FALSE, TRUE), "b": (TRUE,), "bc": (TRUE,)},
        {"": (TRUE,), "b": (FALSE, TRUE), "bc": (TRUE, TRUE)},
    ],
)
def test_nobody_is_convicted_of_what_came_out_otherwise_only_once(
    came: Mapping[str, tuple[float, ...]],
) -> None:
    _, verdict = course("b", came)
    assert isinstance(verdict, Undecided)


def test_nobody_is_in_doubt_before_anything_came_out_otherwise() -> None:
    inquiry = Inquiry([WorkerId("b")], seed=1, precision=Precision.FP64)
    inquiry.came(StepOutcome(sketch=(TRUE,), loss=1.0, plan=plan_without()))
    assert inquiry.failed().workers == ()


def test_nobody_is_convicted_by_those_that_do_not_agree_with_themselves() -> None:
    _, verdict = course("b", {"": (TRUE,), "b": (FALSE,), "bc": (TRUE, OTHER)})
    assert isinstance(verdict, Undecided)
    assert verdict.workers == ("a",)


def test_where_nobody_else_can_compute_it_both_are_in_doubt() -> None:
    inquiry = Inquiry([WorkerId("b")], seed=1, precision=Precision.FP64)
    for aside, value in (("", TRUE), ("b", FALSE)):
        inquiry.came(StepOutcome(sketch=(value,), loss=1.0, plan=plan_without(*aside)))
    assert inquiry.failed().workers == ("b", "c")


def test_what_is_not_finite_is_found_among_several_suspects() -> None:
    nan = float("nan")
    asides, verdict = course("ab", {"": (nan, nan), "a": (nan,), "b": (TRUE,), "bc": (TRUE,)})
    assert asides == ["", "a", "b", "bc", ""]
    assert isinstance(verdict, Convicted)
    assert verdict.worker == "b"


def test_a_head_that_lies_about_its_loss_alone_is_convicted() -> None:
    inquiry = Inquiry([WorkerId("b")], seed=1, precision=Precision.FP64)
    verdicts = [
        inquiry.came(StepOutcome(sketch=(TRUE,), loss=loss, plan=plan_without(*aside)))
        for aside, loss in (("", 0.5), ("b", 1.0), ("bc", 1.0), ("", 0.5))
    ]
    assert isinstance(verdicts[-1], Convicted)
    assert verdicts[-1].worker == "b"


@pytest.mark.parametrize(
    ("precision", "honest", "wrong"),
    [(Precision.FP64, 1e-10, 1e-6), (Precision.FP32, 1e-5, 1e-2), (Precision.BF16, 1e-2, 0.2)],
)
def test_honest_results_may_differ_by_rounding(precision: Precision, honest: float, wrong: float) -> None:
    near = {"": (TRUE,), "b": (TRUE + honest,), "bc": (TRUE,)}
    assert course("b", near, precision=precision)[1] == Cleared()
    far = {"": (TRUE + 3 * wrong,) * 2, "b": (TRUE,), "bc": (TRUE,)}
    assert isinstance(course("b", far, precision=precision)[1], Convicted)
