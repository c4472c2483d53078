"""A lost stage made of its neighbours: the formula, equal bits on every holder, and what is not to be had."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from skein.config.job import JobSpec
from skein.errors import LocalError
from skein.plan.plan import Schedule
from skein.protocol.messages.directives import Assign, ChunkAssignment, Neighbour, SourceKind, StateSource
from skein.protocol.messages.reports import Suspected, Trouble
from skein.protocol.worker.worker_io import BuildFailed, Built
from skein.types import Epoch, Generation, Precision, StageIndex, StageSpec, Step
from tests.support.device import DEVICE
from tests.worker.holders import JOB, Keeper, holding, keeping
from tests.worker.lab import Lab, tiny_job
from tests.worker.test_copies import NoFiles
from worker.chunks.build import Builder
from worker.compute.averages import Side, averaged_state, names_wanted
from worker.compute.chunk import Chunk
from worker.compute.state import STEP

FIRST, LOST, NEXT, LAST = (
    StageSpec(index=StageIndex(index), first=first, stop=stop)
    for index, (first, stop) in enumerate(((0, 2), (2, 3), (3, 4), (4, 6)))
)
"""One of four blocks in each, as the lab cuts them."""
WEIGHTS = 0.3, 1.7


def state_of(job: JobSpec, stage: StageSpec, *, seed: int) -> Mapping[str, Tensor]:
    drawn = Chunk.drawn(job.model_copy(update={"seed": seed}), stage, version=Step(3), device=DEVICE)
    return drawn.copy_state()


def sides(job: JobSpec) -> tuple[Side, Side]:
    return (
        Side(stage=FIRST, weight=WEIGHTS[0], tensors=state_of(job, FIRST, seed=1)),
        Side(stage=NEXT, weight=WEIGHTS[1], tensors=state_of(job, NEXT, seed=2)),
    )


def formula(before: Tensor, after: Tensor) -> Tensor:
    """W = (w1 W1 + w2 W2) / (w1 + w2), in numpy and extended precision."""
    one, two = (x.numpy().astype(np.longdouble) for x in (before, after))
    w1, w2 = (np.longdouble(weight) for weight in WEIGHTS)
    return torch.from_numpy(((w1 * one + w2 * two) / (w1 + w2)).astype(np.float64))


def test_the_average_is_the_formula_and_the_optimizer_begins_anew(text: Path) -> None:
    job = tiny_job(text, stages=4)
    before, after = sides(job)
    state = averaged_state(job, LOST, (before, after))
    fresh = Chunk.drawn(job, LOST, version=Step(3), device=DEVICE)
    assert state.keys() == fresh.copy_state().keys()
    for name in fresh.params:
        ends = name.replace("layers.1", "layers.0"), name.replace("layers.1", "layers.2")
        assert len({name, *ends}) == 3
        expected = formula(before.tensors[ends[0]], after.tensors[ends[1]])
        # Two products, a sum and two shares, each rounded once.
        torch.testing.assert_close(state[name], expected, rtol=8 * torch.finfo(torch.float64).eps, atol=1e-17)
        assert not state[f"exp_avg.{name}"].any()
        assert not state[f"exp_avg_sq.{name}"].any()
    assert state[STEP] == 0
    fresh.load_state(state, version=Step(3))
    assert fresh.walker.num_updates == 0


def test_smaller_types_are_rounded_once(text: Path) -> None:
    job = tiny_job(text, stages=4, precision=Precision.FP32)
    before, after = sides(job)
    state = averaged_state(job, LOST, (before, after))
    [name] = [name for name in state if name.endswith("layers.1.mlp.up_proj.weight") and "exp" not in name]
    one, two = before.tensors[name.replace("s.1", "s.0")], after.tensors[name.replace("s.1", "s.2")]
    assert state[name].dtype is torch.float32
    # Half a unit in the last place of float32, and what float64 adds where that is a tie.
    half = torch.finfo(torch.float32).eps / 2 + 8 * torch.finfo(torch.float64).eps
    torch.testing.assert_close(state[name].to(torch.float64), formula(one, two), rtol=half, atol=0.0)


@pytest.mark.parametrize("stage", [FIRST, LAST])
def test_ends_of_the_model_are_not_made_of_others(text: Path, stage: StageSpec) -> None:
    job = tiny_job(text, stages=4)
    with pytest.raises(LocalError, match="like"):
        names_wanted(job, stage, LOST)


def test_a_side_that_lacks_a_tensor_or_is_longer_is_refused(text: Path) -> None:
    job = tiny_job(text, stages=4)
    before, after = sides(job)
    with pytest.raises(LocalError):
        averaged_state(job, LOST, (before, replace(after, tensors={})))
    with pytest.raises(LocalError):
        averaged_state(job, LOST, (before, replace(after, stage=replace(NEXT, stop=5))))


# --- over gRPC ---


async def build(keeper: Keeper, job: JobSpec, source: StateSource, *givers: Keeper) -> Built | BuildFailed:
    """Build the lost stage on `keeper`."""
    builder = Builder(
        keeper.member.worker,
        executor=keeper.executor,
        donors=keeper.peers,
        copies=keeper.copies,
        files=NoFiles(),  # type: ignore[arg-type]
        device=DEVICE,
        memory_bytes=1 << 40,
    )
    assign = Assign(
        epoch=Epoch(1),
        generation=Generation(2),
        job=JOB,
        job_spec=job.canonical_json(),
        version=source.version,
        num_paths=1,
        chunks=(ChunkAssignment(stage=LOST, slots=1, source=source, evaluation_paths=()),),
        schedule=Schedule(worker=keeper.member.worker, ops=()),
        origins=(),
        num_evaluation_paths=0,
        evaluation_origins=(),
        groups=(),
        resumption=None,
    )
    return await builder.build(assign, tuple(giver.member for giver in givers))


def source_of(*givers: Keeper, version: int = 1) -> StateSource:
    return StateSource(
        kind=SourceKind.NEIGHBOURS,
        version=Step(version),
        neighbours=tuple(
            Neighbour(stage=stage, peer=giver.member.worker, weight=weight)
            for stage, giver, weight in zip((FIRST, NEXT), givers, WEIGHTS, strict=True)
        ),
    )


def built_state(keeper: Keeper) -> Mapping[str, Tensor]:
    holding = keeper.compute.holding
    assert holding is not None
    return holding.chunks[LOST.index].copy_state()


@pytest.fixture
def lab(text: Path, labs: list[Lab]) -> Lab:
    """Four stages after one step."""
    made = Lab(tiny_job(text, stages=4))
    labs.append(made)
    made.step(0)
    return made


async def test_whoever_makes_the_stage_gets_the_same_bits_also_a_neighbour_itself(lab: Lab) -> None:
    expected = averaged_state(
        lab.job,
        LOST,
        tuple(
            Side(stage=stage, weight=weight, tensors=lab.chunk(stage.index).copy_state())
            for stage, weight in zip((FIRST, NEXT), WEIGHTS, strict=True)
        ),
    )
    async with holding(lab, 0) as [before], holding(lab, 2) as [after], keeping("w9") as newcomer:
        for keeper in (newcomer, after):
            assert isinstance(await build(keeper, lab.job, source_of(before, after), before, after), Built)
            state = built_state(keeper)
            assert state.keys() == expected.keys()
            assert [name for name, tensor in expected.items() if not torch.equal(tensor, state[name])] == []


async def test_a_neighbour_that_has_gone_on_is_named(lab: Lab) -> None:
    async with holding(lab, 0) as [before], holding(lab, 2) as [after], keeping("w9") as newcomer:
        ended = await build(newcomer, lab.job, source_of(before, after, version=7), before, after)
        assert isinstance(ended, BuildFailed)
        assert isinstance(ended.report, Suspected)
        assert ended.report.peer == before.member.worker
        ended = await build(newcomer, lab.job, source_of(before, after), after)
        assert isinstance(ended, BuildFailed)
        assert isinstance(ended.report, Trouble)
        assert "is not a peer" in ended.report.reason
