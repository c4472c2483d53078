"""Looks at what peers have sent before an op computes with it: what does not fit is its sender's fault, not the op's.

Rules of this file
- Only bundles are looked at: what this worker made itself is as it made it.
- Names, dtypes, shapes and lengths, and numbers of tokens; other values are the rule's business.
"""

import math
from collections.abc import Iterable, Mapping

from skein.errors import RemoteError
from skein.model.sparse.choices import Choices
from skein.numeric.gradients import shard_bounds
from skein.protocol.messages.tensors import ShardTensor
from skein.protocol.worker.ops import (
    BackwardOp,
    ComputeOp,
    ForwardOp,
    InputOp,
    JoinOp,
    LossInputOp,
    LossOp,
    Op,
    SumOp,
    TensorKey,
)
from skein.types import MicrobatchId, StageIndex, WorkerId
from skein.wire.extra import DType
from worker.bundle import Bundle, WireTensor, to_torch, torch_dtype
from worker.compute.chunk import Chunk
from worker.compute.exchanging import Exchanging
from worker.compute.payload import (
    CHOICES,
    GRADIENTS,
    HIDDEN,
    LABELS,
    REPEATED,
    SCORES,
    SHARD,
    TOKENS,
    VALID,
    WEIGHTS,
    Payload,
    are_choices,
    microbatch_of,
)
from worker.compute.visits.left import Passage

_FLOATS = frozenset({DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})

_ROUTED = frozenset({CHOICES, REPEATED})
_PASSED = frozenset({HIDDEN, LABELS, WEIGHTS, TOKENS, SCORES, VALID}) | _ROUTED

Chunks = Mapping[StageIndex, Chunk]
Graphs = Mapping[tuple[MicrobatchId, StageIndex], Passage]


class OperandError(RemoteError):
    """A peer has sent what no op can use."""

    def __init__(self, sender: WorkerId, text: str) -> None:
        super().__init__(text)
        self.sender = sender


def check_operands(
    op: Op, operands: Mapping[TensorKey, Payload], chunks: Chunks, graphs: Graphs, exchanges: Exchanging
) -> None:
    """Look at all that peers have sent for `op`.

    Raises:
        OperandError: something does not fit; names its sender.
    """
    match op:
        case SumOp(exchange=None):
            _check_shards(op.parts, operands, op, chunks[op.total.member.stage])
        case JoinOp(exchange=None) if op.results:
            mine = next(chunks[m.stage] for m in op.group.members if m.stage in chunks)
            _check_shards(op.results, operands, op, mine)
        case SumOp():
            _check_exchanged(op.parts, operands, op, chunks[op.total.member.stage], exchanges)
        case JoinOp() if op.results:
            mine = next(chunks[m.stage] for m in op.group.members if m.stage in chunks)
            _check_exchanged(op.results, operands, op, mine, exchanges)
        case ForwardOp() | LossOp() | LossInputOp():
            _check_input(op, operands, chunks[op.chunk.stage])
        case BackwardOp() | InputOp():
            _check_gradient(op, operands, graphs, chunks[op.chunk.stage])
        case _:
            pass


def _check_shards(
    keys: Iterable[ShardTensor], operands: Mapping[TensorKey, Payload], op: SumOp | JoinOp, chunk: Chunk
) -> None:
    bounds = shard_bounds(chunk.accumulator(op.group.group).numel(), op.group.num_shards)
    for key in keys:
        bundle = _sent(operands.get(key))
        if bundle is None:
            continue
        start, stop = bounds[key.shard]
        shapes = [tensor.shape for tensor in bundle if tensor.name == SHARD and tensor.dtype in _FLOATS]
        num_others = sum(_is_of_holders(tensor) for tensor in bundle)
        if len(bundle) != 1 + num_others or shapes != [(stop - start,)]:
            wanted = f"give one tensor {SHARD!r} of {stop - start} floats"
            raise OperandError(
                key.member.worker,
                f"{key.kind} of shard {key.shard} of {key.group}: {_told(bundle)}: {wanted}",
            )


def _is_of_holders(tensor: WireTensor) -> bool:
    """Whether it may be choices that holders of a stage tell each other; who notes them looks at their values."""
    return microbatch_of(tensor.name) is not None and tensor.dtype in (DType.UINT8, DType.INT32)


def _check_exchanged(
    keys: Iterable[ShardTensor],
    operands: Mapping[TensorKey, Payload],
    op: SumOp | JoinOp,
    chunk: Chunk,
    exchanges: Exchanging,
) -> None:
    for key in keys:
        bundle = _sent(operands.get(key))
        form = None if bundle is None else exchanges.form(op, key.shard, chunk)
        if bundle is None or form is None:
            continue
        # A name that comes twice shows in the number alone.
        found = {tensor.name: (torch_dtype(tensor.dtype), tensor.shape) for tensor in bundle}
        if len(bundle) != len(form) or found != dict(form):
            wanted = ", ".join(
                f"{name!r} {str(kind).removeprefix('torch.')} {list(shape)}"
                for name, (kind, shape) in form.items()
            )
            raise OperandError(
                key.member.worker,
                f"{key.kind} of shard {key.shard} of {key.group}: {_told(bundle)}: give {wanted or 'nothing'}",
            )


def _check_input(
    op: ForwardOp | LossOp | LossInputOp, operands: Mapping[TensorKey, Payload], chunk: Chunk
) -> None:
    bundle = _arrived(op, operands)
    if bundle is None:
        return
    hidden = [
        tensor for tensor in bundle if tensor.name == HIDDEN and tensor.dtype in _FLOATS and tensor.shape
    ]
    if len(hidden) != 1 or not {tensor.name for tensor in bundle} <= _PASSED:
        raise OperandError(_maker(op), f"an activation: {_told(bundle)}: give {HIDDEN!r}, of floats")
    weights = [tensor for tensor in bundle if tensor.name == WEIGHTS]
    samples = hidden[0].shape[:1]
    if len(weights) > 1 or any(x.shape != samples or x.dtype not in _FLOATS for x in weights):
        told = (
            f"an activation: {_told(bundle)}: give {WEIGHTS!r} of shape {list(samples)}, of floats, or none"
        )
        raise OperandError(_maker(op), told)
    # Of each token, what shards of a vocabulary pass on.
    each = hidden[0].shape[:-1]
    wanted = {TOKENS: (each, frozenset({DType.INT64}))} if chunk.module.takes_tokens else {}
    wanted |= {SCORES: ((*each, 2), _FLOATS)} if chunk.module.takes_scores else {}
    # Of all together, how many are valid: experts weigh by it.
    if op.phase.trains and chunk.module.spec.has_experts:
        wanted[VALID] = (), frozenset({DType.INT64})
    passed = [tensor for tensor in bundle if tensor.name in (TOKENS, SCORES, VALID)]
    fitting = [
        x
        for x in passed
        if x.name in wanted and x.shape == wanted[x.name][0] and x.dtype in wanted[x.name][1]
    ]
    if not len(fitting) == len(passed) == len(wanted):
        shown = ", ".join(f"{name!r} of shape {list(shape)}" for name, (shape, _) in wanted.items())
        raise OperandError(
            _maker(op), f"an activation: {_told(bundle)}: give with it {shown or 'labels alone'}"
        )
    if VALID in wanted:
        _check_valid(op, next(x for x in fitting if x.name == VALID), math.prod(each))
    _check_choices(op, bundle, chunk, math.prod(each), own=REPEATED)


def _check_valid(op: ForwardOp | LossOp | LossInputOp, told: WireTensor, num_tokens: int) -> None:
    num_valid = int(to_torch(told))
    if not 0 <= num_valid <= num_tokens:
        hint = f"{VALID!r} is {num_valid}: give at most {num_tokens}, which is all of it"
        raise OperandError(_maker(op), f"an activation: {hint}")


def _check_choices(op: ComputeOp, bundle: Bundle, chunk: Chunk, num_tokens: int, *, own: str) -> None:
    """Choices of routers: those called `own` are of the stage that is visited, others are handed on as they are."""
    told = [tensor for tensor in bundle if tensor.name in _ROUTED]
    spec = chunk.module.spec
    form = spec.choices_of(num_tokens) if op.phase.trains else None
    most_layers = {
        name: spec.num_blocks_in(chunk.stage) if name == own else len(spec.inner_layers) for name in _ROUTED
    }
    for tensor in told:
        is_own = tensor.name == own
        fits = form is not None and _are_choices(tensor, form, most_layers[tensor.name], is_own=is_own)
        if not fits or sum(x.name == tensor.name for x in told) > 1:
            wanted = (
                "none" if form is None else f"layers of shape {list(form.shape)}, each at most {form.most}"
            )
            raise OperandError(_maker(op), f"choices of experts: {_told(bundle)}: give {wanted}")


def _are_choices(told: WireTensor, form: Choices, num_layers: int, *, is_own: bool) -> bool:
    """Whether these are choices of so many layers, or of some of them where another stage made them."""
    if told.dtype is not (DType.UINT8 if form.is_narrow else DType.INT32):
        return False
    # Others' are looked at too: who is handed them back would take whoever handed them on for their maker.
    num_told = num_layers if is_own else max(1, min(num_layers, *told.shape[:1]))
    return are_choices(to_torch(told), form, num_told)


def _check_gradient(
    op: BackwardOp | InputOp, operands: Mapping[TensorKey, Payload], graphs: Graphs, chunk: Chunk
) -> None:
    bundle = _arrived(op, operands)
    graph = graphs.get((op.microbatch, op.chunk.stage))
    if bundle is None or graph is None:
        return
    differentiable = graph.made.differentiable
    _check_choices(op, bundle, chunk, math.prod(differentiable[0].shape[:-1]), own=CHOICES)
    bundle = tuple(x for x in bundle if x.name not in _ROUTED)
    wanted = [(name, tuple(x.shape)) for name, x in zip(GRADIENTS, differentiable, strict=False)]
    if [(x.name, x.shape) for x in bundle] != wanted or not {x.dtype for x in bundle} <= _FLOATS:
        shown = ", ".join(f"{name!r} of shape {list(shape)}" for name, shape in wanted)
        raise OperandError(_maker(op), f"a gradient: {_told(bundle)}: give {shown}")


def _arrived(op: ComputeOp, operands: Mapping[TensorKey, Payload]) -> Bundle | None:
    """The boundary tensor that the op takes, if a peer has sent it."""
    return None if op.operand is None else _sent(operands.get(op.operand))


def _maker(op: ComputeOp) -> WorkerId:
    takes = op.kind.row.takes
    assert takes is not None, f"{op} takes no boundary tensor"
    (hop,) = op.path.makers(takes, op.hop)
    return op.path.hops[hop].worker


def _sent(payload: Payload | None) -> Bundle | None:
    return payload if isinstance(payload, tuple) else None


def _told(bundle: Bundle) -> str:
    shown = ", ".join(f"{tensor.name[:32]!r} {tensor.dtype} {list(tensor.shape)}" for tensor in bundle[:4])
    return shown or "nothing"
