"""Draws chunks of any job: stages of a model, or arrays."""

import logging

import torch

from skein.config.job import ArrayJob, JobSpec
from skein.types import StageSpec, Step
from worker.compute.chunk import Chunk
from worker.mesh.mesh import Mesh
from worker.sweep.choosing import PassChoices
from worker.sweep.chunk import ArrayChunk

_log = logging.getLogger(__name__)


def drawn_chunk(
    job: JobSpec,
    stage: StageSpec,
    *,
    version: Step,
    device: torch.device,
    mesh: Mesh | None = None,
    slots: int = 1,
    choices: PassChoices | None = None,
) -> Chunk:
    """The stage as the job's seed draws it, or its rows' seeds; with a mesh, its functions are computed there.

    Rows are computed on `device` alone: models of which several fit a device gain nothing by being cut.
    """
    if isinstance(job, ArrayJob):
        if mesh is not None:
            _log.warning(
                "rows of an array are computed on %s alone: %d devices rest", device, len(mesh.devices)
            )
        return ArrayChunk.drawn_rows(job, stage, version=version, device=device, choices=choices)
    return Chunk.drawn(job, stage, version=version, device=device, mesh=mesh, slots=slots)
