"""A small life of a job, event by event, is what it was when somebody last read it.

Read the difference; if it is meant, `python -m skein.sim --transcript > tests/golden/life.txt`.
"""

from pathlib import Path

from skein.sim.transcript import small_life

PAGE = Path(__file__).with_name("life.txt")


def test_a_small_life_goes_as_it_is_written() -> None:
    assert small_life().page == PAGE.read_text().splitlines()
