"""Rows that are chosen along the run: what heads have of them, and whole jobs over the network on what was recorded."""

from pathlib import Path as FilePath

import numpy as np
import pytest
import torch

from skein.config.data.coreset import CoresetSpec
from skein.config.data.sources import ArraysSource
from skein.config.data.spec import DataSpec
from skein.config.job import JobSpec
from skein.config.optimizer import AdamWSpec
from skein.errors import LocalError, UserError
from skein.model.families.digits_cnn import DigitsCnnModel
from skein.model.families.mlp import MlpModel
from skein.model.table import ModelSpec
from skein.numeric.coreset.choice import Choice, choose_coreset, cover_error
from skein.numeric.coreset.portions import Picking, Portion, choose_of_portions
from skein.numeric.coreset.room import feature_bytes
from skein.protocol.log.records import CoresetChosen, GenerationOpened
from skein.protocol.messages.coresets import ToldChoice
from skein.protocol.messages.tensors import Phase
from skein.types import JobState, Layout, MicrobatchId, Precision, Step, WorkerId
from tests.support.device import DEVICE
from tests.worker.cluster import Disk, cluster
from tests.worker.lab import Lab, digits_job, tiny_job, write_text
from worker.selection import traits
from worker.selection.traits import HeadRows, picked

NUM_ROWS, NUM_STEPS = 160, 20
CLASSES = np.repeat([0, 1, 2], [110, 40, 10])
MLP = MlpModel(family="mlp", widths=(8, 8), num_features=4, num_classes=3)


def source_in(folder: FilePath) -> ArraysSource:
    generator = np.random.default_rng(2)
    np.savez(folder / "rows.npz", x=generator.normal(size=(NUM_ROWS, 4)) + CLASSES[:, None], y=CLASSES)
    return ArraysSource(format="arrays", path=str(folder / "rows.npz"))


def job_of(
    folder: FilePath, *, stages: int = 1, replicas: int = 1, layout: Layout = Layout.LINE, **settings: object
) -> JobSpec:
    spec = CoresetSpec.model_validate(
        {"method": "craig", "fraction": 0.4, "refresh_epochs": 1, "max_overhead": 100, **settings}
    )
    drawn = tiny_job(write_text(folder), stages=stages, replicas=replicas, is_tied=False, layout=layout)
    return drawn.model_copy(
        update={
            "model": MLP,
            "data": DataSpec(sources=(source_in(folder),), coreset=spec, validation_ratio=0.1),
            "precision": Precision.FP64,
            # The lab's record keeps to one learning rate.
            "optimizer": AdamWSpec(learning_rate=1e-2, schedule="constant", warmup_steps=0),
            "budget": drawn.budget.model_copy(update={"steps": NUM_STEPS}),
        }
    )


def taken(lab: Lab, num_rows: int, version: int = 0) -> list[HeadRows | UserError]:
    """What each head has once all training rows have been forwarded, by evaluation's paths, or why it has not."""
    size = lab.job.batch.microbatch_samples
    for m in range(-(-num_rows // size)):
        lab.microbatch(Step(version), m, lab.arrangement.paths[m % len(lab.arrangement.paths)], Phase.SELECT)
    found = [bench.compute.traits.take() for bench in lab.benches.values()]
    return [rows[0] for rows in found if rows]


def looked_at(lab: Lab, num_rows: int, version: int = 0) -> list[HeadRows]:
    """What each head has, which has room for it."""
    found = taken(lab, num_rows, version)
    return [rows for rows in found if isinstance(rows, HeadRows)]


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("model", [MLP, DigitsCnnModel(family="digits_cnn", channels=2, num_blocks=1)])
def test_distances_are_those_of_gradients_at_the_last_layer(
    tmp_path: FilePath, labs: list[Lab], model: ModelSpec, layout: Layout
) -> None:
    job = job_of(tmp_path, stages=2, layout=layout)
    if model is not MLP:
        data = digits_job().data.model_copy(update={"coreset": job.data.coreset, "validation_ratio": 0.97})
        job = job.model_copy(update={"model": model, "data": data})
    lab = Lab(job)
    labs.append(lab)
    batches = next(b.holding.batches for b in lab.benches.values() if b.holding.batches is not None)
    num_rows = min(21, batches.dataset.num_train_samples)
    (rows,) = looked_at(lab, num_rows)
    whole = Lab(
        job.model_copy(update={"parallel": tiny_job(tmp_path).parallel.model_copy(update={"stages": 1})})
    )
    labs.append(whole)
    module = whole.chunk(0).module
    batch = batches.dataset.row_batch(range(len(rows.ids)))
    gradients = []
    inputs, labels = (torch.from_numpy(x).to(DEVICE) for x in (batch.inputs, batch.labels))
    for x, y in zip(inputs, labels, strict=True):
        module.zero_grad()
        loss, _ = module.loss(x[None], y[None])
        torch.autograd.backward(loss)
        named = dict(module.named_parameters())
        last = [named["classifier.weight"].grad, named["classifier.bias"].grad]
        gradients.append(torch.cat([g.flatten() for g in last if g is not None]))
    expected = torch.cdist(torch.stack(gradients), torch.stack(gradients))
    assert np.array_equal(rows.labels, batch.labels)
    found = rows.features.lattice().distances(np.arange(len(rows.ids)))
    # Squares cancel: a² + b² - 2ab of rounded coordinates.
    assert found == pytest.approx(expected.cpu().numpy(), abs=1e-6)


async def test_a_job_draws_what_was_recorded_however_many_workers_and_whoever_dies(
    tmp_path: FilePath,
) -> None:
    job = job_of(tmp_path, replicas=2, warmup_epochs=0)
    disk = Disk()
    async with cluster(disk) as here, here.workers("w0"):
        async with here.workers("w1"):
            here.submit(job)
            await here.first(CoresetChosen, 2)
        assert await here.finished() == JobState.FINISHED
        assert len(here.all(GenerationOpened)) > 1
        chosen, steps = here.all(CoresetChosen), here.steps
    num_rows = chosen[0].num_rows
    assert [x.version for x in chosen] == [0, 8, 16]
    assert num_rows == NUM_ROWS - 16
    assert all(x.told.num_picks == 58 and x.num_faults == 0 for x in chosen)
    assert len({x.digest for x in chosen}) == 3
    lab = Lab(job)
    try:
        losses = []
        for step in range(NUM_STEPS):
            for told in [x.told for x in chosen if x.version == step]:
                for bench in lab.benches.values():
                    bench.holding.draw_by(told)
            losses.append(lab.step(step).loss)
    finally:
        lab.close()
    assert [record.loss for record in steps] == pytest.approx(losses, rel=1e-10)


@pytest.mark.parametrize("layout", list(Layout))
def test_a_selection_that_outlasts_steps_is_of_the_parameters_that_were(
    tmp_path: FilePath, labs: list[Lab], layout: Layout
) -> None:
    job = job_of(tmp_path, stages=2, replicas=2, layout=layout)
    still, going = Lab(job), Lab(job)
    labs += [still, going]
    expected = looked_at(still, 32)
    for bench in going.benches.values():
        bench.compute.keep_parameters(Step(0))
    size = job.batch.microbatch_samples
    for m in range(32 // size):
        going.microbatch(Step(0), m, going.arrangement.paths[m % len(going.arrangement.paths)], Phase.SELECT)
        if m in (1, 2):
            going.step(m - 1)
    found = [rows[0] for b in going.benches.values() if (rows := b.compute.traits.take())]
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, HeadRows)
        assert np.array_equal(one.ids, other.ids)
        assert np.array_equal(one.logits_NC, other.logits_NC)
    still.step(0)
    still.step(1)
    for here, there in zip(still.benches.values(), going.benches.values(), strict=True):
        for stage, chunk in here.holding.chunks.items():
            for name, param in there.holding.chunks[stage].params.items():
                assert torch.equal(param, chunk.params[name])


def test_without_a_copy_no_older_parameters_are_computed_with(tmp_path: FilePath, labs: list[Lab]) -> None:
    lab = Lab(job_of(tmp_path))
    labs.append(lab)
    lab.step(0)
    with pytest.raises(LocalError, match="is at version 1, not at 0"):
        looked_at(lab, 2)


def chosen_by_one(rows: HeadRows, job: JobSpec, num_rows: int) -> Choice:
    """The choice where one worker has all rows."""
    size, name = job.batch.microbatch_samples, WorkerId("w0")
    asked = Picking.at(job.data.coreset, rows.step, num_rows=num_rows, block_rows=size)
    portion = Portion(num_rows=num_rows, block_rows=size, num_ways=1, ways=(0,))
    return choose_of_portions({name: portion}, {name: picked(rows, job, num_rows=num_rows)}, asked).choice


async def test_a_choice_of_one_worker_is_near_the_greedy_one_over_all_rows(tmp_path: FilePath) -> None:
    job = job_of(tmp_path, refresh_epochs=None, group_by="source")
    async with cluster(Disk()) as here, here.workers("w0"):
        here.submit(job)
        assert await here.finished() == JobState.FINISHED
        (chosen,) = here.all(CoresetChosen)
    lab = Lab(job)
    try:
        (rows,) = looked_at(lab, chosen.num_rows)
    finally:
        lab.close()
    found = chosen_by_one(rows, job, chosen.num_rows)
    assert chosen.told.read().ids.tolist() == found.ids.tolist()
    assert chosen.told.read().sizes.tolist() == found.sizes.tolist()
    assert chosen.farness == pytest.approx(found.error)
    groups = np.zeros(chosen.num_rows, np.int64)
    central = choose_coreset(rows.features, groups, len(found.ids))
    assert cover_error(rows.features, groups, found.ids) <= 1.03 * central.error
    assert chosen.chance_farness is not None
    assert found.error < chosen.chance_farness


async def test_a_choice_beside_steps_is_by_parameters_of_the_version_that_is_recorded(
    tmp_path: FilePath,
) -> None:
    job = job_of(tmp_path, stages=2, refresh_epochs=2, group_by="source")
    async with cluster(Disk()) as here, here.workers("w0", "w1"):
        here.submit(job)
        assert await here.finished() == JobState.FINISHED
        first, second = here.all(CoresetChosen)
        steps = here.steps
    assert first.num_steps_beside == 0 < second.num_steps_beside
    version = Step(second.version - second.num_steps_beside)
    lab = Lab(job)
    try:
        for bench in lab.benches.values():
            bench.holding.draw_by(first.told)
        losses = [lab.step(step).loss for step in range(version)]
        for bench in lab.benches.values():
            bench.compute.keep_parameters(version)
        (rows,) = looked_at(lab, second.num_rows, version)
    finally:
        lab.close()
    assert [record.loss for record in steps[:version]] == pytest.approx(losses, rel=1e-10)
    found = chosen_by_one(rows, job, second.num_rows)
    assert second.told.read().ids.tolist() == found.ids.tolist()


def test_more_features_than_fit_are_refused_with_what_to_do(
    tmp_path: FilePath, labs: list[Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traits, "MOST_FEATURE_BYTES", 100)
    lab = Lab(job_of(tmp_path))
    labs.append(lab)
    (refused,) = taken(lab, 16)
    assert isinstance(refused, UserError)
    assert refused.hint.startswith("features of the rows of one worker take more than")
    monkeypatch.setattr(traits, "MOST_FEATURE_BYTES", 1 << 20)
    (rows,) = looked_at(lab, 16)  # another look is none the worse
    assert len(rows.ids) == 16


async def test_where_a_worker_has_no_room_chance_draws_of_its_rows_and_nobody_is_struck(
    tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traits, "MOST_FEATURE_BYTES", 100)
    async with cluster(Disk()) as here, here.workers("w0"):
        here.submit(job_of(tmp_path, refresh_epochs=None))
        assert await here.finished() == JobState.FINISHED
        (chosen,) = here.all(CoresetChosen)
        assert len(here.all(GenerationOpened)) == 1
    assert (chosen.num_faults, chosen.num_by_chance) == (1, chosen.num_rows)


@pytest.mark.parametrize("feature", ["last_layer", "logits"])
def test_bytes_of_features_are_known_before_they_are_there(
    tmp_path: FilePath, labs: list[Lab], feature: str
) -> None:
    lab = Lab(job_of(tmp_path, feature=feature))
    labs.append(lab)
    (rows,) = looked_at(lab, 16)
    num_bytes = rows.logits_NC.nbytes + (0 if rows.hidden_NH is None else rows.hidden_NH.nbytes)
    assert feature_bytes(lab.job.model, lab.job.data.coreset, 16) == num_bytes


def test_what_was_read_ahead_by_an_older_choice_is_not_used(tmp_path: FilePath, labs: list[Lab]) -> None:
    lab = Lab(job_of(tmp_path))
    labs.append(lab)
    (bench,) = lab.benches.values()
    batches = bench.holding.batches
    assert batches is not None
    last = MicrobatchId(lab.job.batch.num_microbatches - 1)
    before = batches.batch(Phase.TRAIN, Step(0), last)  # reads ahead the first of the next step
    assert before.weights is not None
    assert before.weights.tolist() == [1.0] * len(before.weights)
    ids, sizes = np.arange(8, dtype="<i4"), np.array([1, 1, 1, 1, 1, 1, 1, 9], "<f4")
    told = ToldChoice(version=Step(1), ids=ids.tobytes(), sizes=sizes.tobytes())
    bench.holding.draw_by(told)
    weights: list[float] = []
    for m in range(lab.job.batch.num_microbatches):
        drawn = batches.batch(Phase.TRAIN, Step(1), MicrobatchId(m))
        assert drawn.weights is not None
        weights += drawn.weights.tolist()
    assert sorted(weights) == [0.5] * 7 + [4.5]
