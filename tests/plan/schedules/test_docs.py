from pathlib import Path

import pytest

from bench.schedules import NUM_MICROBATCHES, markdown, rows

PAGE = Path(__file__).parents[3] / "docs" / "schedules.md"


@pytest.mark.parametrize("num_microbatches", NUM_MICROBATCHES)
def test_the_page_has_the_table_that_the_comparison_makes(num_microbatches: int) -> None:
    assert markdown(num_microbatches) in PAGE.read_text(encoding="utf-8")


def test_what_is_chosen_is_never_above_the_bound_of_whole_backwards() -> None:
    assert [row.what for row in rows() if not row.holds] == []
