"""Tied ends on one worker: what both have is there once, and comes to the bits that two workers come to."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from skein.types import Step
from tests.worker.lab import CPU, Lab, tiny_job
from worker.compute.chunk import Chunk

TIED = "model.embed_tokens.weight"


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one), [
        name for name in one if not torch.equal(one[name], other[name])
    ]


def moved(chunk: Chunk, lab: Lab) -> Chunk:
    """The chunk as it is on a worker that has fetched it."""
    other = Chunk.drawn(lab.job, chunk.stage, version=chunk.version, device=CPU)
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
