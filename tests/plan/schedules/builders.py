"""Pipelines in a line, and how Hypothesis draws them."""

import numpy as np
from hypothesis import strategies as st

from skein.plan.route.schedules.named import NAMED_ORDERS
from skein.plan.route.schedules.shape import Shape
from tests.support.scheduling.ops import Op, PipelineOpKind, PipelineSchedule
from tests.support.scheduling.pricing import Cut, Links, Sharing, StageCost, even_cut
from tests.support.scheduling.simulate import Simulation, simulate
from tests.support.scheduling.table import make_schedule

UNIT_BYTES = 60
"""Activations of one worker's share: divisible by any number of chunks that a test uses."""


def share(forward_s: float = 1.0, input_s: float = 1.0, weight_s: float = 1.0) -> StageCost:
    """A worker's whole share of the model."""
    return StageCost(
        forward_s=forward_s,
        input_s=input_s,
        weight_s=weight_s,
        activation_bytes=UNIT_BYTES,
        kept_bytes=UNIT_BYTES,
    )


def links(num_workers: int, latency_s: float = 0.0, sharing: Sharing = Sharing.NONE) -> Links:
    """Equal latency between any two workers, and no limit on bytes."""
    matrix = np.full((num_workers, num_workers), latency_s)
    np.fill_diagonal(matrix, 0.0)
    return Links(latency_s=matrix, bytes_per_s=np.full_like(matrix, np.inf), sharing=sharing)


def cut_for(name: str, num_workers: int, num_chunks: int, each: StageCost | None = None) -> Cut:
    """Equal workers' shares, cut as schedule `name` wants them."""
    return even_cut([each or share()] * num_workers, num_chunks, NAMED_ORDERS[name].placement)


def uniform(
    name: str,
    num_workers: int,
    num_microbatches: int,
    num_chunks: int = 1,
    *,
    latency_s: float = 0.0,
    each: StageCost | None = None,
) -> Simulation:
    """The named schedule on equal workers and links."""
    cut = cut_for(name, num_workers, num_chunks, each)
    return simulate(
        make_schedule(name, cut.shape(num_microbatches)), cut.stages, links(num_workers, latency_s)
    )


def forward(stage: int, microbatch: int) -> Op:
    return Op(PipelineOpKind.FORWARD, stage, microbatch)


def backward(stage: int, microbatch: int) -> Op:
    return Op(PipelineOpKind.BACKWARD, stage, microbatch)


GROUPED = {"interleaved", "interleaved_zb"}
"""Schedules that need equal groups of microbatches."""


def shapes(name: str) -> list[Shape]:
    """What a generator's laws are tried on."""
    generator = NAMED_ORDERS[name]
    return [
        Shape(num_workers=p, num_microbatches=m, num_chunks=v, placement=generator.placement)
        for p in (1, 2, 4, 5)
        for v in ((2, 3) if generator.num_chunks is None else (generator.num_chunks,))
        for m in sorted({1, p, 2 * p + 1, 4 * p})
        if name not in GROUPED or m % max(1, m // p) == 0
    ]


SMALL = [
    (name, shape)
    for name in NAMED_ORDERS
    for shape in shapes(name)
    if shape.num_stages * shape.num_microbatches <= 48
]


@st.composite
def priced(draw: st.DrawFn, sharing: Sharing) -> tuple[PipelineSchedule, tuple[StageCost, ...], Links]:
    """Any generator's order for a small pipeline; unequal times of whole seconds, in which sums are exact."""
    name, shape = draw(st.sampled_from(SMALL))
    seconds, num_bytes = st.integers(1, 5).map(float), st.integers(0, 4)
    stage = st.builds(
        StageCost,
        forward_s=seconds,
        input_s=seconds,
        weight_s=seconds,
        output_bytes=num_bytes,
        gradient_bytes=num_bytes,
    )
    stages = draw(st.lists(stage, min_size=shape.num_stages, max_size=shape.num_stages))
    size = shape.num_workers
    latency = draw(st.lists(st.integers(0, 6), min_size=size * size, max_size=size * size))
    between = Links(
        latency_s=np.array(latency, dtype=np.float64).reshape(size, size),
        bytes_per_s=np.ones((size, size)),
        sharing=sharing,
    )
    return make_schedule(name, shape), tuple(stages), between
