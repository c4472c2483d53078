"""The parts of `bench.aggregation`, its record and its pictures."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from bench.aggregating import diloco
from bench.aggregating.measured import Measured
from bench.aggregation import PARTS, draw, record, recorded
from bench.plot import Chart, Line
from bench.report import Row
from skein.config.aggregation import DiLoCo

ROW = Row(what="x", value=1.0, unit="s", against="y", ratio=0.5, goal="none", holds=True, spread=0.0)


@pytest.mark.parametrize("part", PARTS)
def test_every_part_can_be_measured(part: str) -> None:
    module = importlib.import_module(f"bench.aggregating.{part}")
    assert hasattr(module, "measure") or hasattr(module, "rows")


def test_a_record_keeps_the_parts_that_were_not_measured_anew(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    record({"one": (ROW, ROW), "other": (ROW,)}, path)
    record({"one": (replace(ROW, value=2.0),)}, path)
    assert recorded(path) == {"one": (replace(ROW, value=2.0),), "other": (ROW,)}


def test_charts_are_written_under_their_names(tmp_path: Path) -> None:
    line = Line(label="a", look=0, points=((0.0, 1.0), (1.0, 2.0)))
    chart = Chart(title="T", description="D", x_label="x", y_label="y", lines=(line,))
    draw(Measured(rows=(ROW,), charts={"one": chart}), tmp_path)
    assert (tmp_path / "aggregation-one.svg").read_text().startswith("<svg")


def trained(loss: float, num_bytes: int) -> diloco.Trained:
    return diloco.Trained(curve=((50, 3.0), (100, loss)), num_bytes=num_bytes)


@pytest.mark.parametrize(
    ("loss", "num_bytes", "holds"),
    [(2.01, 4, (True, True)), (2.03, 5, (False, True)), (1.9, 6, (True, False))],
)
def test_the_streamed_method_is_held_to_both_goals(
    loss: float, num_bytes: int, holds: tuple[bool, bool]
) -> None:
    runs = {
        diloco.ALL_REDUCE: [trained(1.5, 1000)],
        diloco.REFERENCE: [trained(2.0, 20)],
        diloco.STREAMED: [trained(loss, num_bytes)],
    }
    rows = [row for row in diloco.rows_of(runs) if row.what.startswith(diloco.STREAMED)]
    assert tuple(row.holds for row in rows) == holds


def test_bytes_are_those_of_the_wire() -> None:
    """Each element goes to its owner and comes back to three others, in 32 bits or in 4.125."""
    specs = (
        None,
        DiLoCo(rule="diloco", wire="fp32", local_steps=1),
        DiLoCo(rule="diloco", wire="int4", local_steps=1),
    )
    methods = [diloco.Method(label="one step", spec=spec) for spec in specs]
    all_reduced, fp32, int4 = (diloco.train(method, seed=0, num_steps=1).num_bytes for method in methods)
    # Three of a walker's four parts leave it, each with a norm of 8 bytes.
    assert fp32 == all_reduced + 4 * 3 * 8
    # The last block of a shard has fewer elements than the others.
    assert fp32 / int4 == pytest.approx(32 / 4.125, rel=0.01)
