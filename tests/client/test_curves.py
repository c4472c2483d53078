"""Curves: what counts of a job's course, drawn and in the files that other programs read."""

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from client.cli import run
from client.curves.files import write_csv, write_history, write_tensorboard
from client.curves.plot import plot
from skein.errors import UserError
from skein.types import JobState, Step
from skein.wire.shown.points import Course, Point, measures
from skein.wire.views import EvaluationFinished, JobEvent, WentBack
from tests.client.conftest import Scripted
from tests.client.scripted import TOKENS_PER_STEP, event, status, step_body, whole_story

Captured = pytest.CaptureFixture[str]
# What tensorboard 2.21 writes with its own RecordWriter: a version, and step 300 at 1,000 s with the values 5.5 and 0.
GOLDEN = bytes.fromhex(
    "1800000000000000a37f4b22090000000000408f401a0d627261696e2e4576656e743a3273ae6b56410000000000000000a9c2ab0900000000"
    "00408f4010ac022a330a1c0a15747261696e2f76616c69646174696f6e5f6c6f7373150000b0400a130a0c747261696e2f746f6b656e731500"
    "00000099bfd59d"
)


def evaluated(sequence: int, version: int, loss: float) -> JobEvent:
    return event(sequence, EvaluationFinished(version=Step(version), loss=loss, num_tokens=50))


def went_back(sequence: int, to: int) -> JobEvent:
    return event(sequence, WentBack(from_version=Step(9), to_version=Step(to), reason="nobody held it"))


def points(losses: list[float]) -> list[Point]:
    return [Point(step=at + 1, wall_s=float(at), tokens=at, loss=loss) for at, loss in enumerate(losses)]


def test_a_course_has_what_each_version_gave() -> None:
    found = Course(whole_story()).points()
    assert [(point.step, point.loss, point.validation_loss, point.tokens) for point in found] == [
        (1, 3.0, None, TOKENS_PER_STEP),
        (2, 2.0, None, 2 * TOKENS_PER_STEP),
        (3, 1.0, 1.25, 3 * TOKENS_PER_STEP),
    ]


def test_steps_that_were_lost_are_replaced_by_those_that_came_after() -> None:
    story = [
        evaluated(1, 0, 5.5),
        *(event(2 + step, step_body(step, loss=9.0 - step)) for step in range(4)),
        evaluated(6, 4, 4.0),
        went_back(7, to=2),
        event(8, step_body(2, loss=0.5)),
    ]
    course = Course(story)
    assert [(point.step, point.loss, point.validation_loss) for point in course.points()] == [
        (0, None, 5.5),
        (1, 9.0, None),
        (2, 8.0, None),
        (3, 0.5, None),
    ]
    assert [step.record.step for step in course.steps] == [0, 1, 2]
    assert [evaluation.version for evaluation in course.evaluations] == [0]


# --- drawn ---


def drawn(losses: list[float], *, width: int = 50, height: int = 5) -> list[str]:
    return plot(points(losses), width=width, height=height)


def test_a_falling_loss_falls_from_corner_to_corner() -> None:
    lines = drawn([float(x) for x in range(200, 0, -1)])
    assert len(lines) == 6
    assert max(map(len, lines)) <= 50
    begins = [len(line) - len(line[9:].lstrip()) for line in lines[:5]]
    assert begins == sorted(begins)
    assert lines[0].split()[0] == "200"
    assert lines[4].split()[0] == "1"
    assert lines[5].split() == ["step", "1", "200"]


def test_two_dots_of_equal_steps_are_where_braille_has_them() -> None:
    # The highest of 8 rows of dots is dot 1 of the first character, the lowest is dot 8 of the last.
    found = plot(points([2.0, 1.0]), width=12, height=2)
    assert found[0][9] == "\u2801"
    assert found[1].rstrip()[-1] == "\u2880"


def test_a_validation_loss_is_marked_over_the_dots() -> None:
    both = [Point(step=at, wall_s=0.0, tokens=0, loss=1.0, validation_loss=1.0 + at % 2) for at in (1, 2)]
    lines = plot(both, width=30, height=3)
    assert "".join(lines[:3]).count("o") == 2


@pytest.mark.parametrize("losses", [[], [math.nan], [math.inf, -math.inf]])
def test_nothing_to_draw_is_said(losses: list[float]) -> None:
    assert drawn(losses) == ["no losses yet"]


@pytest.mark.parametrize("losses", [[2.0], [2.0, 2.0], [1.0, math.nan, 1e30]])
def test_any_numbers_can_be_drawn(losses: list[float]) -> None:
    assert any("\u2800" < sign <= "\u28ff" for line in drawn(losses) for sign in line)


# --- files ---


def test_csv_has_a_row_for_each_point() -> None:
    file = io.StringIO()
    write_csv(Course(whole_story()).points(), file)
    rows = list(csv.DictReader(io.StringIO(file.getvalue())))
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert [row["loss"] for row in rows] == ["3.0", "2.0", "1.0"]
    assert [row["validation_loss"] for row in rows] == ["", "", "1.25"]
    assert {row["decision"] for row in rows} == {"apply"}


def test_the_balance_of_experts_is_a_curve_of_models_that_have_them() -> None:
    dense, sparse = step_body(0), step_body(1)
    sparse = replace(sparse, record=replace(sparse.record, balance_loss=1.5))
    points = Course([event(1, dense), event(2, sparse)]).points()
    assert [measures(point).get("balance_loss") for point in points] == [None, 1.5]


def test_an_event_file_is_byte_by_byte_what_tensorboard_writes(tmp_path: Path) -> None:
    point = Point(step=300, wall_s=1000.0, tokens=0, validation_loss=5.5)
    path = write_tensorboard([point], tmp_path, name="job-1")
    assert path.read_bytes() == GOLDEN
    assert "tfevents" in path.name
    assert write_tensorboard([point], tmp_path, name="job-1") == path
    assert list(tmp_path.iterdir()) == [path], "a second export takes the place of the first"


def test_a_history_replays_into_a_run(tmp_path: Path) -> None:
    story = [*whole_story()[:4], event(4, step_body(2, loss=math.nan))]
    write_history(Course(story).points(), tmp_path, name="job-1", config='{"seed": 3}')
    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [row["_step"] for row in rows] == [1, 2, 3]
    assert [row["train/loss"] for row in rows] == [3.0, 2.0, "NaN"]
    assert json.loads((tmp_path / "config.json").read_text()) == {"seed": 3}
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["name"], summary["train/tokens"]) == ("job-1", 3 * TOKENS_PER_STEP)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"folder: .*file.*: cannot be written: Not a directory"):
        write_tensorboard([], tmp_path / "file" / "folder", name="job-1")


# --- commands ---


@pytest.fixture
def told(coordinator: Scripted, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """The coordinator that commands ask."""
    monkeypatch.setenv("SKEIN_COORDINATOR", coordinator.target)
    return coordinator


@pytest.mark.usefixtures("told")
def test_curves_through_the_command(capsys: Captured, tmp_path: Path) -> None:
    assert run(["curve", "first-job-1"]) == 0
    assert "dots: loss, o: validation loss" in capsys.readouterr().out
    assert run(["curve", "first-job-1", "--csv", "-"]) == 0
    assert capsys.readouterr().out.startswith("step,wall_s,tokens,loss,")
    folders = ["--tensorboard", str(tmp_path / "tb"), "--wandb", str(tmp_path / "wandb")]
    assert run(["curve", "first-job-1", "--csv", str(tmp_path / "curve.csv"), *folders]) == 0
    assert capsys.readouterr().out == ""
    assert len((tmp_path / "curve.csv").read_text().splitlines()) == 4
    assert [path.name for path in (tmp_path / "tb").iterdir()] == [
        "events.out.tfevents.0000000000.first-job-1"
    ]
    config = json.loads((tmp_path / "wandb" / "config.json").read_text())
    assert config["name"] == "first-job"
    assert run(["curve", "first-job-1", "--csv", str(tmp_path / "no" / "where.csv")]) == 2
    assert "--csv: " in capsys.readouterr().err


def test_watching_a_status_ends_with_the_job(
    told: Scripted, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = told.script
    script.jobs["first-job-1"] = status(step=2)
    looks: list[float] = []

    def pause(seconds: float) -> None:
        looks.append(seconds)
        script.jobs["first-job-1"] = status(state=JobState.FINISHED, step=3)

    monkeypatch.setattr("client.cli.job.curve.wait_for_look", pause)
    assert run(["status", "first-job-1", "--watch"]) == 0
    shown = capsys.readouterr().out
    assert len(looks) == 1
    assert shown.count("dots: loss") == 2
    assert "running" in shown
    assert "finished" in shown
    # The second look asked only for what had happened since the first.
    assert script.watched_since == [0, 6]
    assert run(["status", "first-job-1", "--watch", "--json"]) == 2
