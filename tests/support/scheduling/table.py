"""All generators by name, the simplest first, with the shapes that each can do."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from skein.errors import UserError
from skein.plan.route.schedules import NAMED_ORDERS, Named
from tests.support.scheduling import split, vshape
from tests.support.scheduling.ops import PipelinePlacement, PipelineSchedule, Shape, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """A way to order ops. `num_chunks` is how many it needs on each worker, None for any number above 1."""

    make: Callable[[Shape], PipelineSchedule]
    num_chunks: int | None = 1
    placement: PipelinePlacement = PipelinePlacement.LOOP

    def does(self, num_chunks: int, placement: PipelinePlacement) -> bool:
        """Whether it is for models cut like this. One chunk each lies the same way in both placements."""
        if num_chunks == 1:
            return self.num_chunks == 1
        return self.placement is placement and self.num_chunks in (None, num_chunks)


def _planned(named: Named) -> Generator:
    return Generator(
        make=lambda shape: whole(shape, named.make(shape)), num_chunks=None if named.is_chunked else 1
    )


GENERATORS: Mapping[str, Generator] = {
    **{name: _planned(named) for name, named in NAMED_ORDERS.items()},
    "zb_h1": Generator(make=split.zb_h1),
    "zb_h2": Generator(make=split.zb_h2),
    "interleaved_zb": Generator(make=split.interleaved_zb, num_chunks=None),
    "v_min": Generator(make=vshape.v_min, num_chunks=2, placement=PipelinePlacement.V),
    "v_half": Generator(make=vshape.v_half, num_chunks=2, placement=PipelinePlacement.V),
    "zb_v": Generator(make=vshape.zb_v, num_chunks=2, placement=PipelinePlacement.V),
}


def make_schedule(name: str, shape: Shape) -> PipelineSchedule:
    """The schedule called `name`.

    Raises:
        UserError: there is none of that name, or it cannot do this shape.
    """
    if name not in GENERATORS:
        raise UserError("schedule", name, f"give one of {', '.join(GENERATORS)}")
    generator = GENERATORS[name]
    if not generator.does(shape.num_chunks, shape.placement):
        wanted = generator.num_chunks or "at least 2"
        hint = f"{name} is for {wanted} chunks per worker placed as a {generator.placement}"
        raise UserError("num_chunks", shape.num_chunks, hint)
    return generator.make(shape)
