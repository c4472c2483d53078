"""What the bench of bytes on the wire measures, and what it makes of that."""

from collections.abc import Mapping

import pytest

from bench.aggregating.wire_bytes import Phase, Sent, phases, rows_of
from skein.config.job import JobSpec

PHASES = {phase.name: phase for phase in phases(is_quick=False)}


def exchanges_of(job: JobSpec) -> int:
    return sum(len(job.aggregation.due(step)) for step in range(job.total_steps))


@pytest.mark.parametrize("phase", PHASES.values(), ids=PHASES.keys())
def test_jobs_of_a_phase_differ_in_nothing_but_steps(phase: Phase) -> None:
    short, long = phase.jobs()
    assert long.total_steps - short.total_steps == phase.num_steps > 0
    same = {"name", "budget", "aggregation"}
    assert short.model_dump(exclude=same) == long.model_dump(exclude=same)


@pytest.mark.parametrize("rule", ["1-bit LAMB", "1-bit Adam"])
def test_a_phase_of_a_one_bit_rule_has_steps_of_one_kind(rule: str) -> None:
    warm, behind = (PHASES[name].jobs() for name in (f"{rule}, warm-up", rule))
    assert exchanges_of(warm[1]) == exchanges_of(warm[0])
    assert exchanges_of(behind[1]) - exchanges_of(behind[0]) == PHASES[rule].num_steps


def test_streamed_fragments_are_each_exchanged_equally_often() -> None:
    short, long = PHASES["DiLoCo int4, H = 50, 5 fragments"].jobs()
    seen = [due.fragment for step in range(50, 150) for due in long.aggregation.due(step)]
    assert [seen.count(fragment) for fragment in range(5)] == [2] * 5
    assert exchanges_of(short) == 5


def measured(bytes_by_name: Mapping[str, float]) -> dict[str, Sent]:
    return {
        name: Sent(phase=PHASES[name], measured=sent, estimated=0.9 * sent, packed=0.98 * sent, control=5000)
        for name, sent in bytes_by_name.items()
    }


@pytest.mark.parametrize(("behind", "holds"), [(33.0, True), (34.0, False)])
def test_a_thirtieth_is_asked_for_after_the_warm_up(behind: float, holds: bool) -> None:
    figures = {"all-reduce fp32": 1000.0, "all-reduce bf16": 500.0}
    figures |= {"1-bit LAMB, warm-up": 500.0, "1-bit LAMB": behind}
    rows = {row.what: row for row in rows_of(measured(figures))}
    [step] = [
        row for what, row in rows.items() if what.startswith("1-bit LAMB, 4 workers") and "a step" in what
    ]
    [run] = [row for what, row in rows.items() if "5993" in what]
    assert step.holds is holds
    # 1000 steps of 500 bytes and 4993 of the others, beside 5993 of 500.
    assert run.value == pytest.approx(1000 * 500 + 4993 * behind)
    assert run.holds is holds
    assert all(row.holds for what, row in rows.items() if "estimate" in what)


def test_an_estimate_that_is_off_is_told() -> None:
    sent = Sent(phase=PHASES["all-reduce fp32"], measured=106.0, estimated=96.0, packed=100.0, control=0.0)
    *_, row = rows_of({"all-reduce fp32": sent, "all-reduce bf16": sent})
    assert not row.holds
    assert row.ratio == pytest.approx(1.06)
