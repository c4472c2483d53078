"""Snapshots of chunks, what was applied since, and copies that it brings up to date: equal to the last bit."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from skein.config.job import JobSpec
from skein.errors import LocalError
from skein.numeric.aggregate.rules import rule_of
from skein.protocol.messages.directives import Decision, StepRecord
from skein.protocol.worker.keeping.snapshots import changes
from skein.protocol.worker.ops import SnapshotOp
from skein.types import Generation, GroupId, JobId, Layout, Precision, StageIndex, Step, WorkerId, parse_group
from tests.worker.lab import Lab, tiny_job
from worker.bundle import to_torch
from worker.compute import snapshots
from worker.compute.snapshots import Snapshots, bring_forward
from worker.compute.state import STEP

JOB = JobId("j1")
"""As the lab calls its job."""


def snapshot(lab: Lab, version: int, *, generation: int = 1, keeps_results: bool = True) -> None:
    """Every worker takes one of each chunk, as at `version`."""
    for ref in lab.arrangement.chunks:
        op = SnapshotOp(
            generation=Generation(generation),
            version=Step(version),
            stage=ref.stage,
            keeps_results=keeps_results,
        )
        lab.run(ref.worker, op)


def kept(lab: Lab, stage: int = 0, replica: int = 0) -> Snapshots:
    ref = [ref for ref in lab.arrangement.chunks if ref.stage == stage][replica]
    return lab.benches[ref.worker].compute.snapshots


def state_at(lab: Lab, version: int, stage: int = 0) -> dict[str, Tensor]:
    """A copy of a snapshot that may be changed."""
    found = kept(lab, stage).state_of(JOB, StageIndex(stage), Step(version))
    assert found is not None
    return {name: to_torch(tensor).clone() for name, tensor in found.items()}


def results_of(lab: Lab, step: int, stage: int = 0) -> dict[GroupId, Tensor]:
    found = kept(lab, stage).result_of(JOB, StageIndex(stage), Step(step))
    return {} if found is None else {parse_group(name): to_torch(tensor) for name, tensor in found.items()}


def advance(lab: Lab, state: dict[str, Tensor], record: StepRecord, stage: int = 0) -> None:
    bring_forward(
        state,
        record,
        results_of(lab, record.step, stage),
        stage=StageIndex(stage),
        model=lab.job.model,
        rule=rule_of(lab.job.aggregation, lab.job.optimizer),
    )


def assert_equal(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    assert [name for name, tensor in state.items() if not torch.equal(tensor, expected[name])] == []


def jobs(text: Path) -> dict[str, JobSpec]:
    return {
        "alone": tiny_job(text, stages=1, is_tied=True),
        "tied": tiny_job(text, stages=2, replicas=2, is_tied=True),
        "untied": tiny_job(text, stages=2, replicas=2, is_tied=False),
        "fp32": tiny_job(text, stages=2, precision=Precision.FP32),
        "loop": tiny_job(text, stages=2, layout=Layout.LOOP, is_tied=True),
    }


@pytest.mark.parametrize("name", ["alone", "tied", "untied", "fp32", "loop"])
def test_results_bring_a_snapshot_to_the_very_bits_of_the_chunk(
    text: Path, labs: list[Lab], name: str
) -> None:
    lab = Lab(jobs(text)[name])
    labs.append(lab)
    lab.step(0)
    snapshot(lab, 1)
    decisions = (Decision.APPLY, Decision.SKIP, Decision.APPLY)
    records = [lab.step(step, decision=decision) for step, decision in enumerate(decisions, start=1)]
    for stage in {ref.stage for ref in lab.arrangement.chunks}:
        state = state_at(lab, 1, stage)
        begun = {key: tensor.clone() for key, tensor in state.items()}
        for record in records:
            advance(lab, state, record, stage)
        assert_equal(state, lab.chunk(stage).copy_state())
        assert int(state[STEP]) == int(begun[STEP]) + 2


def test_a_stage_that_nobody_visits_stays_as_it_is(text: Path, labs: list[Lab]) -> None:
    lab = Lab(tiny_job(text, stages=3, is_tied=False), ways=[[0, 2]])
    labs.append(lab)
    snapshot(lab, 0)
    record = lab.step(0)
    assert [changes(record, StageIndex(stage)) for stage in (0, 1, 2)] == [True, False, True]
    assert results_of(lab, 0, stage=1) == {}
    state = state_at(lab, 0, stage=1)
    advance(lab, state, record, stage=1)
    assert_equal(state, lab.chunk(1).copy_state())


def test_a_result_that_does_not_fit_changes_nothing(text: Path, labs: list[Lab]) -> None:
    lab = Lab(tiny_job(text))
    labs.append(lab)
    snapshot(lab, 0)
    record = lab.step(0)
    state = state_at(lab, 0)
    spoilt = {group: flat[1:] for group, flat in results_of(lab, 0).items()}
    with pytest.raises(LocalError, match="elements"):
        bring_forward(
            state,
            record,
            spoilt,
            stage=StageIndex(0),
            model=lab.job.model,
            rule=rule_of(lab.job.aggregation, lab.job.optimizer),
        )
    assert_equal(state, state_at(lab, 0))


def test_a_large_chunk_is_copied_in_pieces_and_completed_before_an_update(
    text: Path, labs: list[Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "PIECE_BYTES", 1)  # one tensor at a time
    lab = Lab(tiny_job(text))
    labs.append(lab)
    before = lab.chunk(0).copy_state()
    snapshot(lab, 0)
    assert kept(lab).state_of(JOB, StageIndex(0), Step(0)) is None
    assert kept(lab).held() == ()
    assert kept(lab).copy_some()
    lab.step(0)
    assert not kept(lab).copy_some()
    assert_equal(state_at(lab, 0), before)


def test_two_snapshots_of_a_stage_are_kept_and_results_from_the_older_on(text: Path, labs: list[Lab]) -> None:
    lab = Lab(tiny_job(text))
    labs.append(lab)
    for step in range(3):
        snapshot(lab, step)
        lab.step(step)
    assert [copy.version for copy in kept(lab).held()] == [1, 2]
    assert [bool(results_of(lab, step)) for step in range(3)] == [False, True, True]


def test_snapshots_for_going_back_do_not_end_what_somebody_follows(text: Path, labs: list[Lab]) -> None:
    lab = Lab(tiny_job(text))
    labs.append(lab)
    snapshot(lab, 0)
    for step in range(4):
        lab.step(step)
        snapshot(lab, step + 1, keeps_results=False)
    assert [copy.version for copy in kept(lab).held()] == [0, 3, 4]
    assert all(results_of(lab, step) for step in range(4))
    kept(lab).adopt(Generation(3))
    assert [copy.version for copy in kept(lab).held()] == [3, 4]


def test_a_snapshot_that_is_here_begins_to_keep_results_when_asked_to(text: Path, labs: list[Lab]) -> None:
    lab = Lab(tiny_job(text))
    labs.append(lab)
    snapshot(lab, 0, keeps_results=False)
    snapshot(lab, 0)
    lab.step(0)
    assert results_of(lab, 0)


def test_without_being_asked_no_results_are_kept(text: Path, labs: list[Lab]) -> None:
    lab = Lab(tiny_job(text))
    labs.append(lab)
    snapshot(lab, 0, keeps_results=False)
    lab.step(0)
    assert results_of(lab, 0) == {}


def test_results_end_with_the_second_generation_but_snapshots_stay(text: Path, labs: list[Lab]) -> None:
    lab = Lab(tiny_job(text))
    labs.append(lab)
    snapshot(lab, 0, generation=4)
    lab.step(0)
    kept(lab).adopt(Generation(5))
    assert results_of(lab, 0)
    kept(lab).adopt(Generation(6))
    lab.step(1)
    assert (results_of(lab, 0), results_of(lab, 1)) == ({}, {})
    assert kept(lab).state_of(JOB, StageIndex(0), Step(0)) is not None


def test_going_back_drops_what_came_after(text: Path, labs: list[Lab]) -> None:
    lab = Lab(tiny_job(text))
    labs.append(lab)
    snapshot(lab, 0)
    lab.step(0)
    lab.step(1)
    snapshot(lab, 2)
    kept(lab).drop_above(Step(1))
    assert [copy.version for copy in kept(lab).held()] == [0]
    assert [bool(results_of(lab, step)) for step in (0, 1)] == [True, False]


def test_what_does_not_fit_is_not_here(text: Path, labs: list[Lab]) -> None:
    lab = Lab(tiny_job(text))
    labs.append(lab)
    state_bytes = sum(tensor.nbytes for tensor in lab.chunk(0).state().values())
    kept(lab).memory_bytes = state_bytes - 1
    snapshot(lab, 0)
    assert kept(lab).held() == ()
    kept(lab).memory_bytes = state_bytes
    snapshot(lab, 0)
    assert [copy.version for copy in kept(lab).held()] == [0]
    lab.step(0)  # its result finds no room
    assert results_of(lab, 0) == {}
    snapshot(lab, 1)  # the older one makes room
    assert [copy.version for copy in kept(lab).held()] == [1]
    assert kept(lab).num_bytes == state_bytes


def test_another_jobs_snapshots_are_not_given(text: Path, labs: list[Lab]) -> None:
    lab = Lab(tiny_job(text))
    labs.append(lab)
    snapshot(lab, 0)
    assert kept(lab).state_of(JobId("other"), StageIndex(0), Step(0)) is None
    kept(lab).clear()
    assert kept(lab).state_of(JOB, StageIndex(0), Step(0)) is None


def test_a_chunk_gives_the_tensors_that_are_asked_for(text: Path, labs: list[Lab]) -> None:
    lab = Lab(tiny_job(text))
    labs.append(lab)
    [worker] = [ref.worker for ref in lab.arrangement.chunks if ref.stage == 0]
    some = lab.benches[WorkerId(worker)].compute.copy_state(JOB, StageIndex(0), Step(0), [STEP])
    assert some is not None
    assert some.keys() == {STEP}
