"""Each alert asks for what exists, is tested both ways, and tells people what to do."""

import re

import pytest

from tests.contract.source import ROOT
from tests.deploy.stack import (
    Value,
    alerts,
    exposed_families,
    exposed_series,
    listing,
    mapping,
    metrics_in,
    read_yaml,
)

ALERTS = {str(rule["alert"]): rule for rule in alerts()}
OPERATIONS = (ROOT / "docs/operations.md").read_text(encoding="utf-8")


def expected_alerts(name: str) -> list[list[Value]]:
    """What promtool is told to find of an alert, case by case."""
    groups = listing(read_yaml("deploy/prometheus/alerts_test.yml")["tests"])
    cases = [mapping(case) for group in groups for case in listing(mapping(group)["alert_rule_test"])]
    return [listing(case["exp_alerts"]) for case in cases if case["alertname"] == name]


@pytest.mark.parametrize("name", ALERTS)
def test_alerts_ask_for_metrics_that_are_scraped(name: str) -> None:
    expression = str(ALERTS[name]["expr"])
    assert set(metrics_in(expression)) - exposed_series() == set()


@pytest.mark.parametrize("name", ALERTS)
def test_alerts_are_tested_where_they_fire_and_where_they_do_not(name: str) -> None:
    assert {bool(fired) for fired in expected_alerts(name)} == {True, False}


@pytest.mark.parametrize("name", ALERTS)
def test_alerts_link_to_what_to_do(name: str) -> None:
    runbook = str(mapping(ALERTS[name]["annotations"])["runbook"])
    assert runbook == f"docs/operations.md#{name.lower()}"
    assert f"\n### {name}\n" in OPERATIONS


def test_every_runbook_belongs_to_an_alert() -> None:
    assert set(re.findall(r"^### (Skein\w+)$", OPERATIONS, re.MULTILINE)) == set(ALERTS)


def test_the_manual_lists_every_metric_and_no_other() -> None:
    table = [line for line in OPERATIONS.splitlines() if line.startswith("| `skein_")]
    listed = [name for line in table for name in metrics_in(line.split("|")[1])]
    assert sorted(listed) == sorted(exposed_families())
