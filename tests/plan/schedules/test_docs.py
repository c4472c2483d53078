from pathlib import Path

from bench.schedules import rows, tables

PAGE = Path(__file__).parents[3] / "docs" / "schedules.md"


def test_the_page_has_the_tables_that_the_comparison_makes() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [table for table in tables() if table not in page] == []


def test_what_is_chosen_is_never_above_the_bound_of_whole_backwards() -> None:
    assert [row.what for row in rows() if not row.holds] == []
