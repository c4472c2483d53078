"""Addresses that coordinators with one state directory write for each other."""

from pathlib import Path

import pytest

from coordinator.lead.addresses import ANNOUNCE_S, KEPT_S, CoordinatorAddress, SharedAddresses
from tests.coordinator.builders import Clock

ONE = CoordinatorAddress(address="one:7411", enrol_address="one:7413")
TWO = CoordinatorAddress(address="two:7411")


def test_each_coordinator_is_known_until_it_stops(tmp_path: Path) -> None:
    first, second = SharedAddresses(tmp_path), SharedAddresses(tmp_path)
    assert first.known() == ()
    first.announce(ONE)
    second.announce(TWO)
    assert (first.known(), second.known()) == ((ONE, TWO), (TWO, ONE))
    second.withdraw()
    assert first.known() == (ONE,)


def test_a_coordinator_that_crashed_is_known_for_a_day(tmp_path: Path) -> None:
    clock = Clock()
    first = SharedAddresses(tmp_path, clock=clock)
    SharedAddresses(tmp_path, clock=clock).announce(TWO)
    first.announce(ONE)
    clock.now += KEPT_S
    assert first.known() == (ONE, TWO)
    clock.now += 1
    assert first.known() == (ONE,)


def test_an_announcement_is_repeated_once_a_minute(tmp_path: Path) -> None:
    clock = Clock()
    shared = SharedAddresses(tmp_path, clock=clock)
    shared.announce(ONE)
    [file] = tmp_path.iterdir()
    file.unlink()
    shared.announce(ONE)
    assert not file.exists()
    clock.now += ANNOUNCE_S
    shared.announce(ONE)
    assert file.exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"seen_s": 0}',
        '{"seen_s": 0, "address": "nonsense", "enrol_address": ""}',
        "ä" * 9,
        "1" * 9999,
    ],
)
def test_a_file_that_cannot_be_read_names_no_coordinator(tmp_path: Path, text: str) -> None:
    shared = SharedAddresses(tmp_path, clock=Clock())
    shared.announce(ONE)
    (tmp_path / "other.json").write_text(text, encoding="utf-8")
    assert shared.known() == (ONE,)
