"""Dashboards as code: `python -m deploy.grafana.dashboard` writes dashboards/*.json, which Grafana provisions.

What they show is the table of `rows/`; here is how that is drawn.
"""

import json
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from grafana_foundation_sdk.builders import common, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)

from deploy.grafana.rows.boards import BOARDS, PLAN_CHANGES
from deploy.grafana.rows.panel import Board, Panel, Row

FOLDER = Path(__file__).parent / "dashboards"
_TAG = "skein"
_SOURCE = model.DataSourceRef(type_val="prometheus", uid="${source}")
_WIDTH = 24
"""Columns of Grafana's grid."""
_STAT_HEIGHT, _CHART_HEIGHT = 4, 8


def dashboard(shown: Board) -> model.Dashboard:
    """A dashboard of one coordinator and its jobs, with links to the others."""
    board = (
        build.Dashboard(shown.title)
        .uid(f"skein-{shown.name}")
        .description(shown.about)
        .tags([_TAG])
        .link(
            build.DashboardLink("Skein")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags([_TAG])
            .include_vars(True)
            .keep_time(True)
        )
        .readonly()
        .time("now-30m", "now")
        .refresh("5s")
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .with_variable(build.DatasourceVariable("source").label("Source").type("prometheus"))
        .annotation(
            build.AnnotationQuery()
            .name("New plan")
            .datasource(_SOURCE)
            .enable(True)
            .icon_color("orange")
            .expr(PLAN_CHANGES)
        )
    )
    line, numbers = 0, count(1)
    for row in shown.rows:
        heading = build.Row(row.title).grid_pos(model.GridPos(x=0, y=line, w=_WIDTH, h=1))
        board = board.with_row(heading.id(next(numbers)))
        line += 1
        for place, panel in _places(row, line):
            drawn = _figure(panel, place) if panel.is_figure else _chart(panel, place)
            board = board.with_panel(drawn.id(next(numbers)))
            line = place.y + place.h
    return board.build()


def _places(row: Row, line: int) -> Iterator[tuple[model.GridPos, Panel]]:
    width = _WIDTH // row.columns
    for number, panel in enumerate(row.panels):
        height = _STAT_HEIGHT if panel.is_figure else _CHART_HEIGHT
        y = line + number // row.columns * height
        yield model.GridPos(x=number % row.columns * width, y=y, w=width, h=height), panel


def _targets(panel: Panel) -> Iterator[Dataquery]:
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        yield Dataquery().expr(query.expr).legend_format(query.legend).ref_id(letter).range()


def _figure(panel: Panel, place: model.GridPos) -> stat.Panel:
    figure = stat.Panel().title(panel.title).description(panel.about).unit(panel.unit)
    figure = figure.datasource(_SOURCE).grid_pos(place).graph_mode(BigValueGraphMode.AREA)
    figure = figure.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    for target in _targets(panel):
        figure = figure.with_target(target)
    return figure


def _chart(panel: Panel, place: model.GridPos) -> timeseries.Panel:
    chart = timeseries.Panel().title(panel.title).description(panel.about).unit(panel.unit)
    chart = chart.datasource(_SOURCE).grid_pos(place).show_points(VisibilityMode.NEVER)
    chart = chart.fill_opacity(40 if panel.is_stacked else 0)
    chart = chart.tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).show_legend(True)
    chart = chart.legend(legend.placement(LegendPlacement.BOTTOM))
    if panel.is_stacked:
        chart = chart.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    for target in _targets(panel):
        chart = chart.with_target(target)
    return chart


def render(shown: Board) -> str:
    """A dashboard as its JSON file holds it."""
    return json.dumps(dashboard(shown), cls=JSONEncoder, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def main() -> int:
    """Write the files."""
    for shown in BOARDS:
        _ = (FOLDER / f"{shown.name}.json").write_text(render(shown), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
