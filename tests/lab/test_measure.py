"""`skein lab measure` against links whose figures are known."""

from pathlib import Path

import pytest

from client.lab.control import Ask, LabStatus, Slow, ask
from client.lab.measure import measure_direction
from client.lab.network import namespaces
from client.lab.start import LabOptions, start_lab, stop_lab
from client.lab.state import LabFolder
from skein.errors import UserError


def status_of(folder: LabFolder) -> LabStatus:
    found = ask(folder.path, Ask()).status
    assert found is not None
    return found


def test_what_is_measured_is_never_better_than_the_link(tmp_path: Path) -> None:
    folder = LabFolder(tmp_path / "lab")
    is_possible = namespaces.why_not() is None
    try:
        lab = start_lab(folder, LabOptions(preset="two-sites", num_workers=2, has_services=False))
        if not is_possible:
            with pytest.raises(UserError, match="only a lab in namespaces"):
                measure_direction(lab.status, "north-1", "south-1", seconds=0.1)
            return
        with pytest.raises(UserError, match="endpoint"):
            measure_direction(lab.status, "north-1", "nobody", seconds=0.1)
        with pytest.raises(UserError, match="give two different endpoints"):
            measure_direction(lab.status, "north-1", "north-1", seconds=0.1)
        ask(folder.path, Slow(a="north", b="south", latency_s=0.002, bytes_per_s=1e6))
        found = measure_direction(status_of(folder), "north-1", "south-1", seconds=0.5)
        assert (found.round_trip_s, found.bytes_per_s) == (0.004, 1e6)
        assert found.measured_round_trip_s >= 0.004
        # Thrice, for a reader that was kept waiting finds more at once; without a limit it would be hundreds of times.
        assert 0 < found.measured_bytes_per_s < 3e6
    finally:
        stop_lab(folder)
