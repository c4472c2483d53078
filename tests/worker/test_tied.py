"""Tied ends on one worker: what both have is there once, and comes to the bits that two workers come to."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from skein.plan.load import spared_bytes, stage_loads, together_bytes
from skein.protocol.messages.tensors import Phase
from skein.types import Precision, Step, WorkerId
from tests.support.device import DEVICE
from tests.worker.lab import Bench, Lab, tiny_job
from worker.compute.chunk import Chunk

TIED = "model.embed_tokens.weight"


def tensors_of(chunk: Chunk) -> Iterator[Tensor]:
    """Parameters, gradients and state."""
    yield from chunk.params.values()
    yield from (param.grad for param in chunk.params.values() if param.grad is not None)
    yield from (tensor for tensors in chunk.walker.state.values() for tensor in tensors.values())


def bytes_of(bench: Bench) -> int:
    """Bytes of all that a worker has of its chunks, and of the results of a step's reductions."""
    results = [flat for _, flat in bench.compute._results.values()]
    every = [x for chunk in bench.holding.chunks.values() for x in tensors_of(chunk)]
    storages = [x.untyped_storage() for x in (*every, *results)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def reduced(lab: Lab) -> Lab:
    """The lab with a step as far as its reductions."""
    for m, path in enumerate(lab.arrangement.paths):
        lab.microbatch(Step(0), m, path, Phase.TRAIN)
    for group in lab.arrangement.groups:
        lab.reduce(Step(0), group)
    return lab


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one), [
        name for name in one if not torch.equal(one[name], other[name])
    ]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("stages", [2, 4])
def test_a_worker_with_both_ends_takes_as_much_less_as_the_planner_counts(
    text: Path, stages: int, replicas: int
) -> None:
    job = tiny_job(text, stages=stages, replicas=replicas, precision=Precision.FP32)
    apart, together = reduced(Lab(job, num_holders=stages)), reduced(Lab(job, num_holders=1))
    loads = stage_loads(job, apart.arrangement.stages)
    [spared] = spared_bytes(loads).values()
    assert spared == 4 * loads[0].tied_bytes[TIED] > 0
    worker = together.benches[WorkerId("w00")]
    before = sum(bytes_of(bench) for name, bench in apart.benches.items() if name.startswith("w0"))
    # Alone in its group, a worker needs no copy of what the others add up.
    assert before - bytes_of(worker) == spared
    # Slots apart, for no activation is here any more.
    assert bytes_of(worker) <= together_bytes(loads, [0] * stages)


def moved(chunk: Chunk, lab: Lab) -> Chunk:
    """The chunk as it is on a worker that has fetched it."""
    other = Chunk.drawn(lab.job, chunk.stage, version=chunk.version, device=DEVICE)
    other.load_state(chunk.copy_state(), version=chunk.version)
    return other


def hold(lab: Lab, *chunks: Chunk) -> None:
    """Each worker holds its own of these chunks."""
    for bench in lab.benches.values():
        mine = {chunk.stage.index: chunk for chunk in chunks if chunk.stage.index in bench.holding.chunks}
        bench.compute.hold(replace(bench.holding, chunks=mine))


def test_both_ends_on_one_worker_train_as_on_two_and_so_they_do_as_one_leaves_and_comes_back(
    text: Path,
) -> None:
    job = tiny_job(text)
    apart, wandering, together = Lab(job), Lab(job), Lab(job, num_holders=1)
    records = [together.step(0)]
    first, last = together.chunk(0), together.chunk(1)
    assert first.walker.params[TIED] is last.walker.params[TIED]
    hold(wandering, moved(first, wandering), last)
    records.append(wandering.step(1))
    hold(together, moved(wandering.chunk(0), together), last)
    records.append(together.step(2))
    assert records == [apart.step(step) for step in range(3)]
    for stage in range(2):
        assert_equal(together.chunk(stage).copy_state(), apart.chunk(stage).copy_state())
    # What was left behind has no part in what came after.
    assert first.version == Step(1)
