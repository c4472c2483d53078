"""Memory and bubbles of workers, as `skein status` lists them."""

from dataclasses import replace

import pytest

from client.cli.show import (
    COLLECTIVE_COLUMNS,
    FORM_COLUMNS,
    USE_COLUMNS,
    collective_rows,
    form_rows,
    job_lines,
    use_rows,
)
from skein.config.job import JobSpec
from skein.config.mesh.tensor import TensorSpec
from skein.plan.clock.holding import CollectiveUse, StageForm, WorkerUse
from skein.types import StageIndex, WorkerId
from tests.coordinator.test_times import status

USE = WorkerUse(
    worker=WorkerId("w0"),
    stages=(StageIndex(0), StageIndex(3)),
    fixed_bytes=2**30,
    slot_bytes=(2**20, 2**21),
    slots=(4, 8),
    planned_peaks=(4, 3),
    planned_bubble=0.25,
)


def test_a_worker_is_listed_as_planned_until_it_tells_what_it_held() -> None:
    found = replace(status(version=12), uses=(USE, USE.told({StageIndex(3): 5}, 0.5)))
    planned, told = use_rows(found)
    assert len(planned) == len(told) == len(USE_COLUMNS)
    start = ("w0", "0,3", "1.0 GiB", "7 (10.0 MiB)")
    assert planned == (*start, "-", "12 (20.0 MiB)", "25%", "-")
    assert told == (*start, "5 (10.0 MiB)", "12 (20.0 MiB)", "25%", "50%")


def test_stages_that_a_mesh_shares_are_listed_with_devices_and_form() -> None:
    forms = [StageForm(stage=StageIndex(stage), form="1d in parts", num_devices=2) for stage in (1, 3)]
    found = replace(status(version=12), uses=(USE, USE.told({}, None, forms=forms)))
    # The worker holds stages 0 and 3: what it tells of another is of a plan before this one.
    assert form_rows(found) == [(USE.worker, "3", "2", "1d in parts")]
    assert len(FORM_COLUMNS) == 4


@pytest.mark.parametrize(
    ("tensor", "num_devices", "is_told"),
    [
        (TensorSpec(), 1, False),
        (TensorSpec(size=1), 1, False),
        (TensorSpec(size=2), 1, True),
        (TensorSpec(size=2), 2, False),
        (TensorSpec(form="2d"), 1, True),
        (TensorSpec(form="2d"), None, True),
        (TensorSpec(sequence_parallel=True), 1, True),
    ],
)
def test_a_job_that_asks_for_several_devices_is_told_that_none_share_a_stage(
    tensor: TensorSpec, num_devices: int | None, *, is_told: bool
) -> None:
    found = status(version=12)
    spec = JobSpec.model_validate_json(found.spec)
    spec = spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"tensor": tensor})})
    forms = [StageForm(stage=StageIndex(3), form="1d", num_devices=num_devices)] if num_devices else []
    told = replace(
        found, spec=spec.model_dump_json(), uses=(USE.told({StageIndex(3): 5}, None, forms=forms),)
    )
    assert any(line.startswith("tensor     no stage is on several") for line in job_lines(told)) is is_told
    # Nobody knows before workers have told.
    assert not any(line.startswith("tensor") for line in job_lines(replace(told, uses=(USE,))))


def test_collectives_show_one_of_each_kind_planned_beside_measured() -> None:
    tp = CollectiveUse(
        kind="tp", num_collectives=4, predicted_s=0.004, measured_s=0.005, num_fits=2, r_squared=0.9871
    )
    found = replace(status(version=12), uses=(USE, replace(USE, collectives=(tp,))))
    (row,) = collective_rows(found)
    assert row == (USE.worker, "tp", "4", "1 ms", "1.25 ms", "+25%", "2", "0.987")
    assert len(row) == len(COLLECTIVE_COLUMNS)
