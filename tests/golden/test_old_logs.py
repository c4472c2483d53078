"""Run logs of earlier releases are read as they were, and say the same."""

from pathlib import Path

import pytest

from skein.wire.codec import RECORD
from tests.golden.old_logs import LOGS, came_to, read

FILES = sorted(LOGS.glob("*/*.gz"))


@pytest.mark.parametrize("path", FILES, ids=[f"{path.parent.name}-{path.stem}" for path in FILES])
def test_a_log_of_an_earlier_release_comes_to_what_it_came_to(path: Path) -> None:
    payloads = read(path)
    records = [RECORD.from_bytes(payload) for payload in payloads]
    assert came_to(records) == path.with_suffix(".txt").read_text()
    assert [RECORD.to_bytes(record) for record in records] == payloads


def test_there_are_logs_of_earlier_releases() -> None:
    assert len(FILES) >= 6
