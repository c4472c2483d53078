"""The orders that the field has names for, by name: where a search begins."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from skein.plan.route.schedules import split, vshape, whole
from skein.plan.route.schedules.shape import Orders, PipelinePlacement, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A way to order ops.

    Args:
        make: its generator.
        num_chunks: how many it needs on each worker; None: any number above 1.
        placement: of several chunks.
        is_split: its backwards are input and weight ops.
    """

    make: Callable[[Shape], Orders]
    num_chunks: int | None = 1
    placement: PipelinePlacement = PipelinePlacement.LOOP
    is_split: bool = False

    def does(self, num_chunks: int, placement: PipelinePlacement) -> bool:
        """Whether it is for models cut like this. One chunk each lies the same way in both placements."""
        if num_chunks == 1:
            return self.num_chunks == 1
        return self.placement is placement and self.num_chunks in (None, num_chunks)


NAMED_ORDERS: Mapping[str, Named] = {
    "one_f_one_b": Named(make=whole.one_f_one_b),
    "gpipe": Named(make=whole.gpipe),
    "interleaved": Named(make=whole.interleaved, num_chunks=None),
    "looped_bfs": Named(make=whole.looped_bfs, num_chunks=None),
    "zb_h1": Named(make=split.zb_h1, is_split=True),
    "zb_h2": Named(make=split.zb_h2, is_split=True),
    "interleaved_zb": Named(make=split.interleaved_zb, num_chunks=None, is_split=True),
    "v_min": Named(make=vshape.v_min, num_chunks=2, placement=PipelinePlacement.V, is_split=True),
    "v_half": Named(make=vshape.v_half, num_chunks=2, placement=PipelinePlacement.V, is_split=True),
    "zb_v": Named(make=vshape.zb_v, num_chunks=2, placement=PipelinePlacement.V, is_split=True),
}
