"""Many walkers in one checkpoint: each goes on from its own state, and one that it lacks is a newcomer."""

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skein.config.aggregation import AggregationSpec, DiLoCo, Gossip, Lsgd
from skein.config.job import JobSpec
from skein.config.optimizer import AdamWSpec, OptimizerSpec, SgdSpec
from skein.config.rule import Walkers
from skein.errors import RemoteError
from skein.numeric.aggregate.diloco import GLOBAL, RESIDUAL
from skein.numeric.aggregate.gossip import MOMENTUM
from skein.numeric.aggregate.shared_moment import OWN_SQUARES, SHARED_SQUARES
from skein.numeric.walker import StateClass
from skein.plan.plan import Group, Schedule
from skein.protocol.log.records import StageFiles
from skein.protocol.messages.directives import (
    Assign,
    Beginning,
    CheckpointFile,
    ChunkAssignment,
    SourceKind,
    StateSource,
)
from skein.protocol.messages.reports import Trouble
from skein.protocol.worker.worker_io import BuildFailed, Built
from skein.storage.outside import Outside
from skein.types import (
    ChunkRef,
    Epoch,
    Generation,
    Precision,
    StageIndex,
    StageSpec,
    Step,
    WorkerId,
    parse_group,
)
from skein.wire.extra import ManifestReply
from tests.support.device import DEVICE
from tests.worker.holders import JOB, Keeper, keeping
from tests.worker.lab import GENERATION, tiny_job
from worker.chunks.build import Builder
from worker.chunks.checkpoint import UrlArchive, read_state, write_stage
from worker.compute.chunk import Chunk
from worker.compute.state import STEP, saved_names

STAGE = StageSpec(index=StageIndex(0), first=0, stop=6)
VERSION = Step(6)
RULES: dict[str, tuple[AggregationSpec, OptimizerSpec]] = {
    "diloco": (DiLoCo(rule="diloco", local_steps=3, wire="int4"), AdamWSpec()),
    "gossip": (
        Gossip(rule="gossip", method="dmsgd", graph="ring"),
        SgdSpec(name="sgd", learning_rate=0.01, momentum=0.8),
    ),
    "adam gossip": (Gossip(rule="gossip", graph="ring"), AdamWSpec()),
    "lsgd": (Lsgd(rule="lsgd", local_every_steps=2, global_every_steps=4), AdamWSpec()),
}


def job_of(name: str, text: Path) -> JobSpec:
    rule, optimizer = RULES[name]
    return tiny_job(text, stages=1, replicas=2, is_tied=False, precision=Precision.FP32).model_copy(
        update={"aggregation": rule, "optimizer": optimizer}
    )


def drawn(job: JobSpec, number: int) -> Chunk:
    """A walker as if after updates of its own: no two tensors of any two are equal."""
    chunk = Chunk.drawn(job, STAGE, version=VERSION, device=DEVICE)
    luck = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for tensors in (chunk.walker.params, *chunk.walker.state.values()):
            for tensor in tensors.values():
                tensor.copy_(torch.rand(tensor.shape, generator=luck))
    chunk.walker.num_updates = 6 + number
    return chunk


def save(url: Path, *chunks: Chunk, walkers: Walkers = Walkers.MANY) -> StageFiles:
    archive = UrlArchive(str(url), JOB, VERSION)
    files: list[CheckpointFile] = []
    for number, chunk in enumerate(chunks):
        params, state = chunk.copy_for_checkpoint(walkers)
        files += write_stage(STAGE.index, GENERATION, archive, params=params, state=state, walker=number)
    return StageFiles(stage=STAGE.index, files=tuple(files))


class Kept:
    """The coordinator's word on where a checkpoint lies."""

    def __init__(self, job: JobSpec, url: Path, stage: StageFiles) -> None:
        self._reply = ManifestReply(
            job=JOB,
            version=VERSION,
            spec=job.canonical_json(),
            url=str(url),
            stages=(stage,),
            wall_s=0.0,
        )

    async def manifest(self, *_: object) -> ManifestReply:
        return self._reply

    async def get(self, *_: object) -> None:
        raise NotImplementedError

    put = get


async def restored(job: JobSpec, kept: Kept, walker: int, *, num_walkers: int) -> Chunk:
    """What a worker holds that is given a walker's chunk from the checkpoint."""
    async with keeping(f"w{walker}") as keeper:
        return await _built(keeper, job, kept, walker, num_walkers)


async def begun_from(job: JobSpec, kept: Kept) -> Chunk:
    """What a worker holds at the start of a job that begins from another's checkpoint."""
    async with keeping("w0") as keeper:
        ended = await _ended(keeper, job, kept, 0, 2, begins=Beginning(job=JOB, version=VERSION))
        return _held(keeper, ended)


async def _built(keeper: Keeper, job: JobSpec, kept: Kept, walker: int, num_walkers: int) -> Chunk:
    return _held(keeper, await _ended(keeper, job, kept, walker, num_walkers))


def _held(keeper: Keeper, ended: Built | BuildFailed) -> Chunk:
    assert isinstance(ended, Built), ended
    assert keeper.compute.holding is not None
    return keeper.compute.holding.chunks[STAGE.index]


async def _ended(
    keeper: Keeper,
    job: JobSpec,
    kept: Kept,
    walker: int,
    num_walkers: int,
    *,
    begins: Beginning | None = None,
    outside: Outside | None = None,
) -> Built | BuildFailed:
    builder = Builder(
        keeper.member.worker,
        executor=keeper.executor,
        donors=keeper.peers,
        copies=keeper.copies,
        files=kept,
        device=DEVICE,
        memory_bytes=1 << 40,
        outside=outside,
    )
    source = StateSource(kind=SourceKind.CHECKPOINT, version=VERSION)
    if begins is not None:
        source = StateSource(kind=SourceKind.INITIAL, version=Step(0))
    members = tuple(ChunkRef(stage=STAGE.index, worker=WorkerId(f"w{i}")) for i in range(num_walkers))
    assign = Assign(
        epoch=Epoch(1),
        generation=Generation(2),
        job=JOB,
        job_spec=job.canonical_json(),
        version=source.version,
        num_paths=1,
        chunks=(ChunkAssignment(stage=STAGE, slots=1, source=source, evaluation_paths=(), walker=walker),),
        schedule=Schedule(worker=keeper.member.worker, ops=()),
        origins=(),
        num_evaluation_paths=num_walkers,
        evaluation_origins=(),
        groups=(Group(group=parse_group("s0"), members=members, num_shards=num_walkers),),
        resumption=None,
        begins=begins,
    )
    return await builder.build(assign, (keeper.member,))


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name].cpu(), expected[name].cpu())] == []


def own_slots(chunk: Chunk) -> list[str]:
    """All that is the walker's, between two steps."""
    kinds = {name: slot.kind for name, slot in chunk.rule.slots.items() if slot.is_saved}
    return [name for name, kind in kinds.items() if kind is not StateClass.SHARD]


@pytest.mark.parametrize("name", RULES)
async def test_each_walker_goes_on_from_its_own_state_to_the_bit(
    text: Path, tmp_path: Path, name: str
) -> None:
    job = job_of(name, text)
    walkers = [drawn(job, number) for number in range(3)]
    kept = Kept(job, tmp_path / "ck", save(tmp_path / "ck", *walkers))
    for number, walker in enumerate(walkers):
        chunk = await restored(job, kept, number, num_walkers=3)
        assert (chunk.version, chunk.walker.num_updates) == (VERSION, 6 + number)
        assert_same(chunk.walker.params, walker.walker.params)
        assert own_slots(chunk)
        for slot in own_slots(chunk):
            assert walker.walker.state[slot]
            assert_same(chunk.walker.state[slot], walker.walker.state[slot])


@pytest.mark.parametrize("name", RULES)
async def test_a_job_that_begins_from_another_has_its_parameters_and_nothing_else(
    text: Path, tmp_path: Path, name: str
) -> None:
    job = job_of(name, text)
    other = drawn(job, 1)
    kept = Kept(job, tmp_path / "ck", save(tmp_path / "ck", other))
    chunk = await begun_from(job, kept)
    assert (chunk.version, chunk.walker.num_updates) == (0, 0)
    assert_same(chunk.walker.params, other.walker.params)
    assert_same(dict(chunk.module.named_parameters()), other.walker.params)
    anew = chunk.rule.init(other.walker.params)
    assert chunk.walker.state.keys() == anew.keys()
    for slot, tensors in anew.items():
        assert_same(chunk.walker.state[slot], tensors)


async def test_another_jobs_checkpoint_that_is_never_read_is_the_workers_own_trouble(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of("gossip", text)
    kept = Kept(job, tmp_path / "ck", save(tmp_path / "ck", drawn(job, 1)))
    never = threading.Event()
    monkeypatch.setattr(UrlArchive, "get", lambda *_: never.wait())
    async with keeping("w0") as keeper:
        begins = Beginning(job=JOB, version=VERSION)
        ended = await _ended(keeper, job, kept, 0, 2, begins=begins, outside=Outside(silent_s=0.05))
    never.set()
    assert isinstance(ended, BuildFailed)
    assert isinstance(ended.report, Trouble)
    assert ended.report.is_unfit
    assert f"from: '{JOB}@{VERSION}': cannot be read on this worker" in ended.report.reason
    assert "gave no sign of life" in ended.report.reason


async def test_another_jobs_checkpoint_that_the_coordinator_does_not_tell_of_is_no_fault_of_the_workers(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def tells_nothing(*_: object) -> ManifestReply:
        raise RemoteError("no such checkpoint")

    job = job_of("gossip", text)
    kept = Kept(job, tmp_path / "ck", save(tmp_path / "ck", drawn(job, 1)))
    monkeypatch.setattr(Kept, "manifest", tells_nothing)
    async with keeping("w0") as keeper:
        ended = await _ended(keeper, job, kept, 0, 2, begins=Beginning(job=JOB, version=VERSION))
    assert isinstance(ended, BuildFailed)
    assert isinstance(ended.report, Trouble)
    assert ended.report.is_unfit
    assert "no such checkpoint" in ended.report.reason


async def test_a_walker_that_the_checkpoint_lacks_copies_another_and_begins_without_momentum(
    text: Path, tmp_path: Path
) -> None:
    job = job_of("gossip", text)
    walkers = [drawn(job, number) for number in range(2)]
    kept = Kept(job, tmp_path / "ck", save(tmp_path / "ck", *walkers))
    chunk = await restored(job, kept, 3, num_walkers=4)
    assert_same(chunk.walker.params, walkers[1].walker.params)
    assert not any(tensor.any() for tensor in chunk.walker.state[MOMENTUM].values())


async def test_a_new_walker_of_diloco_begins_where_all_agreed(text: Path, tmp_path: Path) -> None:
    job = job_of("diloco", text)
    walkers = [drawn(job, number) for number in range(2)]
    kept = Kept(job, tmp_path / "ck", save(tmp_path / "ck", *walkers))
    chunk = await restored(job, kept, 2, num_walkers=3)
    assert_same(chunk.walker.params, walkers[0].walker.state[GLOBAL])
    assert_same(chunk.walker.state[GLOBAL], walkers[0].walker.state[GLOBAL])
    assert not any(tensor.any() for tensor in chunk.walker.state[RESIDUAL].values())


@pytest.mark.parametrize("num_walkers", [1, 2, 3, 4])
async def test_means_over_members_begin_anew_if_there_are_more_or_fewer(
    text: Path, tmp_path: Path, num_walkers: int
) -> None:
    job = job_of("adam gossip", text)
    saved = [drawn(job, number) for number in range(3)]
    kept = Kept(job, tmp_path / "ck", save(tmp_path / "ck", *saved))
    chunk = await restored(job, kept, 0, num_walkers=num_walkers)
    before = saved[0].walker.state
    assert_same(chunk.walker.params, saved[0].walker.params)
    assert_same(chunk.walker.state[OWN_SQUARES], before[OWN_SQUARES])
    is_same = num_walkers == 3
    assert_same(chunk.walker.state[SHARED_SQUARES], before[SHARED_SQUARES if is_same else OWN_SQUARES])


@pytest.mark.parametrize("name", RULES)
async def test_a_checkpoint_of_one_walker_without_its_own_state_still_loads(
    text: Path, tmp_path: Path, name: str
) -> None:
    job = job_of(name, text)
    only = drawn(job, 0)
    kept = Kept(job, tmp_path / "ck", save(tmp_path / "ck", only, walkers=Walkers.ONE))
    chunks = [await restored(job, kept, number, num_walkers=2) for number in range(2)]
    assert_same(chunks[0].walker.params, only.walker.params)
    copied = only.walker.state[GLOBAL] if name == "diloco" else only.walker.params
    assert_same(chunks[1].walker.params, copied)
    assert {chunk.walker.num_updates for chunk in chunks} == {6}


def test_files_of_walkers_are_apart_and_the_main_ones_are_named_as_ever(text: Path, tmp_path: Path) -> None:
    job = job_of("lsgd", text)
    walkers = [drawn(job, number) for number in range(2)]
    held = save(tmp_path, *walkers)
    names = {file.name: file.tensors for file in held.files}
    assert list(names) == [
        "stage-000.g1.model.safetensors",
        "stage-000.g1.optimizer.safetensors",
        "stage-000.g1.w1.model.safetensors",
        "stage-000.g1.w1.optimizer.safetensors",
    ]
    assert set(names["stage-000.g1.model.safetensors"]) == walkers[0].params.keys()
    assert f"walker1/{STEP}" in names["stage-000.g1.w1.optimizer.safetensors"]
    archive = UrlArchive(str(tmp_path), JOB, VERSION)
    wanted = saved_names(job, [STAGE], Walkers.MANY)
    for number, walker in enumerate(walkers):
        state = read_state([held], wanted, archive, walker=number)
        assert_same({name: state[name] for name in walker.params}, walker.walker.params)
