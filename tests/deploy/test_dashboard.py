"""The dashboard is what the code makes, asks for what exists, and fits on the screen."""

import json
import re
from itertools import combinations, pairwise

import pytest

from deploy.compose_test import dashboard_queries
from deploy.grafana.dashboard import FOLDER, render
from deploy.grafana.rows.boards import BOARDS, PLAN_CHANGES
from deploy.grafana.rows.panel import Board, Panel, Query
from tests.deploy.stack import Value, exposed_series, listing, mapping, metrics_in, read_yaml

PANELS = [panel for board in BOARDS for row in board.rows for panel in row.panels]
QUERIES = [query for panel in PANELS for query in panel.queries]
WANTED = {
    "loss": "skein_loss_nats",
    "tokens/s": "skein_throughput_tokens_per_second",
    "step seconds": "skein_step_seconds_sum",
    "workers alive": "skein_workers",
    "bytes by link": "skein_link_bytes_total",
    "aggregation bytes": "skein_aggregation_bytes_total",
    "compression": "skein_compression_ratio",
    "consensus distance": "skein_consensus_distance",
    "error feedback": "skein_error_feedback_norm",
    "probe scores": "skein_probe_score_nats",
    "leader changes": "skein_leader_changes_total",
    "incidents": "skein_incidents_total",
    "time until work went on": "skein_incident_seconds_bucket",
    "steps lost": "skein_incident_steps_lost_total",
    "samples repeated": "skein_samples_repeated_total",
    "contributions replayed": "skein_contributions_replayed_total",
    "hops rerouted": "skein_hops_rerouted_total",
}


each_board = pytest.mark.parametrize("shown", BOARDS, ids=lambda shown: shown.name)


def drawn_panels(shown: Board) -> list[dict[str, Value]]:
    board: dict[str, Value] = json.loads(render(shown))
    return [mapping(panel) for panel in listing(board["panels"])]


def place(panel: dict[str, Value]) -> tuple[int, int, int, int]:
    """Left, top, right and bottom edge on Grafana's grid."""
    grid = mapping(panel["gridPos"])
    x, y, width, height = (int(str(grid[key])) for key in "xywh")
    return x, y, x + width, y + height


def test_the_files_that_grafana_loads_are_what_the_code_makes() -> None:
    found = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
    assert found == {board.name: render(board) for board in BOARDS}, "run: python -m deploy.grafana.dashboard"


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.expr)
def test_every_metric_asked_for_is_on_the_page_that_is_scraped(query: Query) -> None:
    assert set(metrics_in(query.expr)) - exposed_series() == set()
    assert list(metrics_in(query.expr)) or query.expr.startswith("up{")


@pytest.mark.parametrize("what", WANTED)
def test_what_users_look_at_first_is_there(what: str) -> None:
    assert any(WANTED[what] in set(metrics_in(query.expr)) for query in QUERIES)


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.expr)
def test_legends_use_only_labels_that_the_expression_keeps(query: Query) -> None:
    kept = {label for labels in re.findall(r"by \(([^)]*)\)", query.expr) for label in labels.split(", ")}
    used = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
    assert used <= kept or not kept
    assert "sum(" not in query.expr or not used


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_panels_say_what_they_show_and_tell_their_series_apart(panel: Panel) -> None:
    assert panel.about.endswith(".")
    assert len({query.legend for query in panel.queries}) == len(panel.queries)


@each_board
def test_panels_have_numbers_of_their_own_and_lie_side_by_side(shown: Board) -> None:
    panels = drawn_panels(shown)
    assert len({panel["id"] for panel in panels if isinstance(panel["id"], int)}) == len(panels)
    for (left, top, right, bottom), (x, y, end, base) in combinations(map(place, panels), 2):
        assert right <= x or end <= left or bottom <= y or base <= top
    assert all(place(panel)[2] <= 24 for panel in panels)
    assert all(place(before)[1] <= place(after)[1] for before, after in pairwise(panels))


def test_the_container_test_asks_every_question_of_the_dashboard() -> None:
    asked = list(dashboard_queries())
    assert len(asked) == len({query.expr for query in QUERIES} | {PLAN_CHANGES})
    assert [query for query in asked if "$" in query] == []


def test_grafana_finds_source_and_dashboards_where_they_are_mounted() -> None:
    [provider] = listing(read_yaml("deploy/grafana/provisioning/dashboards/skein.yaml")["providers"])
    folder = mapping(mapping(provider)["options"])["path"]
    compose = mapping(read_yaml("docker-compose.yml")["services"])
    grafana = mapping(compose["grafana"])
    assert f"./deploy/grafana/dashboards:{folder}:ro" in listing(grafana["volumes"])
    home = mapping(grafana["environment"])["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{folder}/{BOARDS[0].name}.json"


def test_grafana_rates_fit_the_interval_of_the_scrapes() -> None:
    [source] = listing(read_yaml("deploy/grafana/provisioning/datasources/prometheus.yaml")["datasources"])
    interval = mapping(mapping(source)["jsonData"])["timeInterval"]
    assert interval == mapping(read_yaml("deploy/prometheus/prometheus.yml")["global"])["scrape_interval"]
