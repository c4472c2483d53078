"""Checkpoints that a mesh writes: one device reads them, and four, and all go on alike."""

from pathlib import Path

import pytest
import torch

from skein.config.job import JobSpec
from skein.config.mesh.tensor import TensorSpec
from skein.model.families.llama import LlamaModel, LlamaShape
from tests.worker.lab import Lab, tiny_job
from tests.worker.test_checkpoint import restore, save
from worker.mesh.mesh import Mesh
from worker.mesh.traffic import Collective


def sized_job(text: Path, size: int, *, in_sequence: bool = False) -> JobSpec:
    """The lab's job in two stages with heads for four devices, of which `size` share each block."""
    shape = LlamaShape(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    job = tiny_job(text)
    tensor = TensorSpec(size=size, sequence_parallel=in_sequence)
    parallel = job.parallel.model_copy(update={"tensor": tensor})
    return job.model_copy(update={"model": LlamaModel(shape=shape), "parallel": parallel})


def state_of(lab: Lab) -> dict[tuple[int, str], torch.Tensor]:
    """Parameters and the optimizer's state of all stages."""
    return {
        (stage.index, name): tensor
        for stage in lab.arrangement.stages
        for name, tensor in lab.chunk(stage.index).copy_state().items()
    }


def test_what_a_mesh_of_two_has_saved_is_loaded_by_one_device_and_by_four_and_all_go_on_alike(
    four: Mesh, text: Path, tmp_path: Path, labs: list[Lab]
) -> None:
    writer = Lab(sized_job(text, 2), meshes={"w00": four})
    alone = Lab(sized_job(text, 1))
    fours = Lab(sized_job(text, 4, in_sequence=True), meshes={"w00": four, "w01": four})
    labs += [writer, alone, fours]
    for step in (0, 1):
        writer.step(step)
    files, wanted = save(writer, tmp_path / "ck", 2), state_of(writer)
    for reader in (alone, fours):
        restore(reader, tmp_path / "ck", 2, files)
        found = state_of(reader)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
    before = four.traffic.counts[Collective.GATHER]
    for step in (2, 3, 4):
        expected, *others = [lab.step(step) for lab in (writer, alone, fours)]
        for other in others:
            # Float64 sums in another order, over three steps.
            assert other.loss == pytest.approx(expected.loss, rel=1e-11)
            assert other.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-10)
    assert four.traffic.counts[Collective.GATHER] > before, "sequences are in parts over four"
