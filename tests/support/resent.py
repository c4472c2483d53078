"""Boundary tensors that are sent again, as the ops that take them."""

from skein.plan.ops import Direction, OpKind
from skein.plan.order import PlacedOp, ops_of
from skein.protocol.messages.tensors import HopTensor


def op_of(header: HopTensor) -> PlacedOp:
    """The op whose input the tensor is."""
    is_backward = header.direction is Direction.BACKWARD
    [op] = [
        placed
        for placed in ops_of(header.microbatch, header.path)
        if placed.hop == header.hop and (placed.op.kind is OpKind.BACKWARD) is is_backward
    ]
    return op
