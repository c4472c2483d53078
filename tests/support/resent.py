"""Boundary tensors that are sent again, as the ops that take them."""

from skein.plan.order import PlacedOp, ops_of
from skein.protocol.messages.tensors import HopTensor


def op_of(header: HopTensor) -> PlacedOp:
    """The op whose input the tensor is."""
    [op] = [
        placed
        for placed in ops_of(header.microbatch, header.path)
        if placed.hop == header.hop and placed.op.kind.row.takes is header.direction
    ]
    return op
