"""What the comparison of planned with measured steps concludes from its jobs."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from bench.plan import UNIT_S, Outcome, Shape, flops_per_s, methods_of, rows_of
from bench.report import Row
from skein.plan.cut import cut
from skein.plan.load import stage_loads

SEARCH = Outcome(method="search", predicted_s=2.0, step_s=2.1, busy=0.5, own=0.4, plan="")
FULL = replace(SEARCH, method="full", predicted_s=4.0, step_s=4.2)
BALANCED = replace(SEARCH, method="balanced", predicted_s=2.0, step_s=3.0)


def rows(*outcomes: Outcome) -> dict[str, Row]:
    return {row.what: row for row in rows_of(outcomes)}


def test_one_lucky_job_of_three_makes_no_prediction_right() -> None:
    late = replace(SEARCH, step_s=2.4)
    found = rows(SEARCH, late, late)["search: measured step"]
    assert (found.value, found.holds) == (2.4, False)
    assert found.ratio == pytest.approx(1.2)
    assert rows(SEARCH, SEARCH, late)["search: measured step"].holds


def test_a_step_much_shorter_than_predicted_is_wrong_too() -> None:
    assert not rows(replace(SEARCH, step_s=1.7))["search: measured step"].holds


def test_estimates_are_shown_and_not_judged() -> None:
    found = rows(BALANCED)["balanced: measured step"]
    assert (found.ratio, found.holds) == (1.5, True)


def test_searched_steps_are_held_against_the_full_pipeline_s_and_the_round_robin_s() -> None:
    found = rows(SEARCH, FULL, BALANCED)
    assert found["search: measured step, beside full"].ratio == pytest.approx(0.5)
    assert found["search: measured step, beside balanced"].ratio == pytest.approx(0.7)
    assert not rows(SEARCH, replace(FULL, step_s=3.4))["search: measured step, beside full"].holds


def test_a_busy_machine_spoils_the_comparison() -> None:
    what = "share of this machine's time in use, all programs together"
    assert rows(SEARCH)[what].holds
    assert not rows(replace(SEARCH, busy=0.7))[what].holds


def test_a_unit_of_work_takes_its_scaled_time_at_the_emulated_speed(tmp_path: Path) -> None:
    job = Shape(num_workers=20, scale=0.05, budget_s=1.0).job("job", tmp_path, method="full", steps=1)
    layers = job.layers
    middle = stage_loads(job, cut(layers, job.parallel.stages, job.parallel.layout))[1]
    assert middle.flops / flops_per_s(job, 0.05) == pytest.approx(UNIT_S / 20)
    assert middle.forward_flops / flops_per_s(job, 0.05) >= 0.05


def test_methods_are_named_between_commas() -> None:
    assert methods_of("full,search") == ("full", "search")
    with pytest.raises(argparse.ArgumentTypeError, match="search, balanced, full"):
        methods_of("fastest")
