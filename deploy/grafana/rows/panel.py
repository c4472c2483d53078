"""What a panel, a row and a board are, and the expressions that many panels are made of."""

from dataclasses import dataclass

from grafana_foundation_sdk.models import units


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A PromQL expression, and how its series are called, in Grafana's `{{label}}` form."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart, or one figure with its recent course."""

    title: str
    about: str
    queries: tuple[Query, ...]
    unit: str = units.Short
    is_figure: bool = False
    is_stacked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Panels under one heading, as many to a line as `columns` says."""

    title: str
    columns: int
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A dashboard: rows for those who have one question. `name` is that of its file."""

    name: str
    title: str
    about: str
    rows: tuple[Row, ...]


def query(expr: str, legend: str = "") -> Query:
    """A query, in fewer words."""
    return Query(expr=expr, legend=legend)


def rate(counter: str, by: str) -> str:
    """Per second, between two scrapes."""
    return f"sum by ({by}) (rate({counter}[$__rate_interval]))"


def mean(histogram: str, by: str) -> str:
    """Mean of what was observed between two scrapes."""
    return f"{rate(f'{histogram}_sum', by)} / {rate(f'{histogram}_count', by)}"


def each(total: str, number: str, by: str) -> str:
    """How much one counter adds up for each that another counts, between two scrapes; nothing where there are none."""
    return f"{rate(total, by)} / ({rate(number, by)} > 0)"


def quantile(share: float, histogram: str, by: str) -> str:
    """What so large a share of what was observed between two scrapes is below; `by` has `le` in it."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', by)})"


def quantile_so_far(share: float, histogram: str) -> str:
    """Over everything counted, for what is too rare to have a rate; not a number before anything was."""
    return f"histogram_quantile({share}, sum by (le) ({histogram}_bucket))"
