"""What deploy/ says about services, dashboards and alerts, read as plain values."""

import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import yaml

from coordinator.telling.metrics import CoordinatorMetrics
from tests.contract.source import ROOT

Value: TypeAlias = "str | int | float | bool | list[Value] | dict[str, Value] | None"

COMPOSE_FILE = ROOT / "docker-compose.yml"
_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}


def read_yaml(path: str) -> dict[str, Value]:
    value: dict[str, Value] = yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))
    return value


def mapping(value: Value) -> dict[str, Value]:
    assert isinstance(value, dict), value
    return value


def listing(value: Value) -> list[Value]:
    assert isinstance(value, list), value
    return value


def services() -> dict[str, dict[str, Value]]:
    """Services of docker-compose.yml by name, anchors resolved."""
    return {
        name: mapping(service)
        for name, service in mapping(read_yaml("docker-compose.yml")["services"]).items()
    }


def alerts() -> list[dict[str, Value]]:
    groups = listing(read_yaml("deploy/prometheus/alerts.yml")["groups"])
    return [mapping(rule) for group in groups for rule in listing(mapping(group)["rules"])]


def exposed_families() -> Mapping[str, str]:
    """Metrics of the coordinator's page, by name, with their kinds; those without a sample included."""
    page = CoordinatorMetrics().render().decode()
    return dict(re.findall(r"^# TYPE (\w+) (\w+)$", page, re.MULTILINE))


def exposed_series() -> set[str]:
    """Names under which that page's numbers can be asked for."""
    return {
        name + suffix for name, kind in exposed_families().items() for suffix in _SUFFIXES.get(kind, ("",))
    }


def metrics_in(text: str) -> Iterator[str]:
    """Skein's metrics that a text names."""
    yield from re.findall(r"\bskein_\w+", text)
