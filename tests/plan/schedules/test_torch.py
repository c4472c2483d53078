"""Orders against those that torch.distributed.pipelining 2.13 makes."""

from itertools import product

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from skein.plan.route.schedules.named import NAMED_ORDERS
from skein.plan.route.schedules.shape import Shape
from tests.support.extent import part
from tests.support.scheduling.ops import Op, PipelineOpKind
from tests.support.scheduling.table import make_schedule

NAME_THERE = {
    "gpipe": "GPipe",
    "one_f_one_b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zb": "InterleavedZeroBubble",
    "zb_v": "ZBVZeroBubble",
}
KIND_THERE = {
    "FORWARD": PipelineOpKind.FORWARD,
    "FULL_BACKWARD": PipelineOpKind.BACKWARD,
    "BACKWARD_INPUT": PipelineOpKind.BACKWARD_INPUT,
    "BACKWARD_WEIGHT": PipelineOpKind.BACKWARD_WEIGHT,
}


def orders_there(name: str, p: int, m: int, v: int) -> list[list[Op]]:
    """Computing ops only; where waiting is marked differs from class to class."""
    orders = [
        [
            Op(KIND_THERE[action.computation_type.name], action.stage_index, action.microbatch_index)
            for action in actions
            if action is not None
            and action.microbatch_index is not None
            and action.computation_type.name in KIND_THERE
        ]
        for actions in get_schedule_ops(NAME_THERE[name], p, m, v)
    ]
    if name == "one_f_one_b":
        # Its last row counts forwards from 1 to m, which torch's own validation refuses; the runtime is right.
        orders[-1] = [
            op._replace(microbatch=op.microbatch - 1) if op.kind is PipelineOpKind.FORWARD else op
            for op in orders[-1]
        ]
    return orders


@pytest.mark.parametrize(("name", "p"), part(list(product(NAME_THERE, (4, 3, 2, 1))), every=3))
def test_order_is_the_one_of_torch(name: str, p: int) -> None:
    generator = NAMED_ORDERS[name]
    for v in (2, 3) if generator.num_chunks is None else (generator.num_chunks,):
        for m in part((p, 2 * p, 5 * p), every=3, start=p + v):
            shape = Shape(num_workers=p, num_microbatches=m, num_chunks=v, placement=generator.placement)
            here = [list(ops) for ops in make_schedule(name, shape).ops_by_worker]
            assert here == orders_there(name, p, m, v), shape


@pytest.mark.parametrize(("p", "m"), [(4, 6), (4, 10), (3, 8), (8, 5)])
@pytest.mark.parametrize("name", ["interleaved", "interleaved_zb"])
def test_order_is_the_one_of_torch_in_groups_of_another_size(name: str, p: int, m: int) -> None:
    shape = Shape(num_workers=p, num_microbatches=m, num_chunks=2)
    assert [list(ops) for ops in make_schedule(name, shape).ops_by_worker] == orders_there(name, p, m, 2)
