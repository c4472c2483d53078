"""Lines that runs tell survive an interruption, and a record holds what they said."""

import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.convergence import main, rows_of, step_seconds
from bench.curves import Journal, Kind, LeaveOut, Record, RunRecord, Told, load, run_record, save
from bench.pictures import draw, hours_chart
from bench.plot import Chart, Line, line_chart, log_ticks, ticks
from skein.errors import UserError

SVG = "{http://www.w3.org/2000/svg}"


def told_step(step: int, loss: float) -> Told:
    return Told(kind=Kind.STEP, num_updates=step, loss=loss)


def test_what_an_interrupted_writer_left_unfinished_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "run.jsonl"
    first = Journal(path)
    first.tell(told_step(0, 5.0))
    first.close()
    with path.open("ab") as file:
        file.write(b'{"kind":"step","num_up')
    again = Journal(path)
    again.tell(told_step(1, 4.0))
    assert again.read() == (told_step(0, 5.0), told_step(1, 4.0))
    again.close()


def test_a_figure_told_again_counts_once_and_the_later_one_holds(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run.jsonl")
    for told in (told_step(0, 5.0), told_step(1, 4.0), told_step(1, 3.0)):
        journal.tell(told)
    assert journal.read() == (told_step(0, 5.0), told_step(1, 3.0))
    journal.close()


def test_a_record_thins_training_and_keeps_every_choice_of_stages() -> None:
    lines = [told_step(step, float(step)) for step in range(400)]
    lines += [Told(kind=Kind.VALIDATION, num_updates=n, loss=2.0 - n / 400) for n in (0, 400)]
    lines += [
        Told(kind=Kind.LEFT_OUT, num_updates=400, loss=3.0, stages=(0, 2)),
        Told(kind=Kind.LEFT_OUT, num_updates=400, loss=2.5, stages=(0, 1)),
        Told(kind=Kind.LEFT_OUT, num_updates=400, loss=9.0, stages=(0,)),
    ]
    record = run_record(lines, num_left_out=1, seed=7, num_stages=3, num_steps=400)
    # 400 steps in 200 points: the mean of each two, at their end.
    assert record.training[:2] == ((2, 0.5), (4, 2.5))
    assert len(record.training) == 200
    assert record.validation == ((0, 2.0), (400, 1.0))
    assert record.leave_outs == (
        LeaveOut(num_left_out=1, losses=(2.5, 3.0)),
        LeaveOut(num_left_out=2, losses=(9.0,)),
    )


def small_record(*, step_s: dict[int, float]) -> Record:
    def run(left_out: int, seed: int, end: float) -> RunRecord:
        return RunRecord(
            num_left_out=left_out,
            seed=seed,
            training=((10, 2.5), (20, end)),
            validation=((0, 5.5), (10, 2.5), (20, end)),
            leave_outs=tuple(LeaveOut(num_left_out=n, losses=(end + 0.1, end + 0.3)) for n in (3, 4, 6)),
        )

    runs = (run(0, 0, 1.5), run(0, 1, 1.7), run(4, 0, 1.8))
    return Record(num_stages=12, num_steps=20, step_s=step_s, runs=runs, half=(run(0, 0, 1.9),))


def test_a_saved_record_is_read_back_as_it_was(tmp_path: Path) -> None:
    record = small_record(step_s={0: 136.6, 4: 63.3})
    save(record, tmp_path / "plots" / "record.json")
    assert load(tmp_path / "plots" / "record.json") == record


def test_pictures_are_drawn_with_titles_and_hours_only_where_they_are_known(tmp_path: Path) -> None:
    unknown, known = (draw(small_record(step_s=s), tmp_path) for s in ({0: 100.0}, {0: 100.0, 4: 50.0}))
    assert {path.name for path in known} - {path.name for path in unknown} == {"convergence-hours.svg"}
    for path in known:
        root = ElementTree.fromstring(path.read_text())
        assert root.find(f"{SVG}title") is not None
        assert root.find(f"{SVG}desc") is not None
        assert path.stat().st_size <= 60_000


def test_hours_are_steps_times_what_one_takes() -> None:
    full, skipping, half = hours_chart(small_record(step_s={0: 360.0, 4: 180.0})).lines
    assert [x for x, _ in full.points] == [0.0, 1.0, 2.0]
    assert [x for x, _ in skipping.points] == [0.0, 0.5, 1.0]
    assert [x for x, _ in half.points] == [0.0, 1.0, 2.0], "with nothing left out, steps cost what they cost"


def test_rows_say_where_each_ratio_ends_beside_the_one_with_nothing_left_out() -> None:
    ends = rows_of(small_record(step_s={}))[:3]
    assert [row.value for row in ends] == pytest.approx([1.6, 1.8, 1.9])
    assert [row.ratio for row in ends] == pytest.approx([1.0, 1.8 / 1.6, 1.9 / 1.6])
    assert all(row.holds for row in ends)


def test_a_model_that_has_learnt_nothing_misses_the_goal() -> None:
    record = small_record(step_s={})
    runs = (*record.runs[:2], replace(record.runs[2], validation=((0, 5.5), (20, 5.6))))
    assert [row.holds for row in rows_of(replace(record, runs=runs))[:3]] == [True, False, True]


def test_what_a_model_bears_is_perplexity_beside_its_own_with_all_stages() -> None:
    rows = rows_of(small_record(step_s={}))[3:]
    trained_with_a_third = next(row for row in rows if row.what.startswith("trained with 33 %"))
    assert trained_with_a_third.value == pytest.approx((math.exp(1.9) + math.exp(2.1)) / 2)
    assert trained_with_a_third.ratio == pytest.approx(trained_with_a_third.value / math.exp(1.8))


def test_a_saved_record_is_drawn_again_with_other_hours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    save(small_record(step_s={}), old)
    options = ["--again", str(old), "--record", str(new), "--plots", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["convergence", *options, "--step-s", "0=100,0.33=50"])
    assert main() == 0
    assert load(new) == small_record(step_s={0: 100.0, 4: 50.0})
    assert (tmp_path / "convergence-hours.svg").exists()
    assert json.loads(capsys.readouterr().out)["name"] == "convergence"


def test_wrong_options_are_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["convergence", "--step-s", "0.4=1"])
    assert main() == 2
    assert "give one of the ratios" in capsys.readouterr().err


def test_a_line_goes_through_the_places_of_its_points() -> None:
    line = Line(label="<a>", look=0, points=((0, 1), (10, 3)), low=(0.5, 2.5), high=(1.5, 3.5))
    chart = Chart(
        title="t", description="d", x_label="x", y_label="y", lines=(line,), y_from=1, y_to=3, has_marks=True
    )
    root = ElementTree.fromstring(line_chart(chart))
    marks = [(circle.get("cx"), circle.get("cy")) for circle in root.iter(f"{SVG}circle")]
    # The inner sheet is 466 x 304 with its corner at (64, 44); y grows downwards.
    assert marks == [("64.0", "348.0"), ("530.0", "44.0")]
    assert "<a>" in [text.text for text in root.iter(f"{SVG}text")]


def test_a_logarithmic_axis_puts_equal_ratios_equally_far_apart() -> None:
    line = Line(label="a", look=1, points=((0, 1), (1, 10), (2, 100)))
    chart = Chart(
        title="t", description="d", x_label="x", y_label="y", lines=(line,), is_log=True, has_marks=True
    )
    heights = [
        float(circle.get("cy", "nan"))
        for circle in ElementTree.fromstring(line_chart(chart)).iter(f"{SVG}circle")
    ]
    assert heights == [348.0, 196.0, 44.0]


def test_a_chart_without_points_is_refused() -> None:
    with pytest.raises(ValueError, match="no points"):
        line_chart(Chart(title="t", description="d", x_label="x", y_label="y", lines=()))


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1.2, 2.6), (0.0, 75.9), (0.0, 2000.0), (3.0, 3.001)])
def test_ticks_are_a_few_and_within_the_axis(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 3 <= len(found) <= 8
    assert low - 1e-9 <= found[0]
    assert found[-1] <= high + 1e-9


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [(3, 300, (5, 10, 20, 50, 100, 200)), (3.3, 12, (4, 5, 6, 8, 10)), (0.9, 2.5, (1, 2))],
)
def test_logarithmic_ticks_are_round_and_within_the_axis(
    low: float, high: float, wanted: tuple[float, ...]
) -> None:
    assert log_ticks(low, high) == wanted


def test_step_seconds_are_read_by_ratio() -> None:
    assert step_seconds("0=136.6,0.25=80,0.33=63.3,0.5=50") == {0: 136.6, 3: 80.0, 4: 63.3, 6: 50.0}


@pytest.mark.parametrize("text", ["0.4=10", "0.33", "a=1", "0=b"])
def test_step_seconds_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--step-s"):
        step_seconds(text)
