"""Two-dimensional form: q times q devices, each with a block of every activation and of every matrix.

The device in row i and column j has samples of part i and features of part j. Products are SUMMA's: a block of one
operand is spread along a row of devices, one of the other down a column, and what they make is summed up where it
belongs, or reduced to there. So a device has one block of each operand beside its own at any time, and nothing whole.
Attention is by samples and heads, and crosses nothing.

Of a linear function that makes N features of K, the device (i, j) has rows of part j and columns of part i, so that
features stay where they are; of a matrix over the vocabulary, which is looked up and scored with alike, rows of part i
and columns of part j.

B samples, T tokens, K and N features, of the device's blocks.

Source: van de Geijn and Watts, SUMMA, 1997; Xu et al., An Efficient 2D Method for Training Super-Large Deep Learning
Models (Optimus), 2021, Algorithms 1 to 3.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from worker.mesh.forms.cuts import portion_of
from worker.mesh.share import Share, SumGroup
from worker.model.ops import as_made
from worker.model.pending import Tray
from worker.model.vocabulary import block_scores, merged, rows_added, rows_found

Multiply = Callable[[Tensor, Tensor], Tensor]


class LineGroup(SumGroup, Protocol):
    """Devices of one row or column, which spread blocks and reduce them; `worker.mesh.groups.DeviceGroup` is one."""

    def spread(self, tensor: Tensor, origin: int) -> None: ...

    def reduce(self, tensor: Tensor, target: int) -> None: ...


class Grid:
    """Place of a device in a grid: `row` are the devices of its row, by column, `column` those of its column, by row.

    Args:
        dtype: in which blocks are summed, so that what is narrow is rounded once.
    """

    def __init__(self, row: LineGroup, column: LineGroup, dtype: torch.dtype) -> None:
        assert row.size == column.size, "a grid is square"
        self.row = row
        self.column = column
        self.dtype = dtype

    @property
    def side(self) -> int:
        """Devices of a row, and of a column."""
        return self.row.size

    def along_row(self, block: Tensor, origin: int, width: int | None = None) -> Tensor:
        """Block of the device at `origin` of this row, whose last dim is `width`; None: all are alike."""
        shape = (*block.shape[:-1], block.shape[-1] if width is None else width)
        return _spread(self.row, block, origin, shape)

    def down_column(self, block: Tensor, origin: int, length: int | None = None) -> Tensor:
        """Block of the device at `origin` of this column, whose first dim is `length`; None: all are alike."""
        shape = (len(block) if length is None else length, *block.shape[1:])
        return _spread(self.column, block, origin, shape)

    def summed(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        multiply: Multiply,
        lengths: tuple[int, ...] | None = None,
    ) -> list[Tensor]:
        """Sums of the products of the blocks of `x` of this row with those of each of `weights` of this column.

        Args:
            x: last dim by column.
            weights: first dim by row, whatever it stands for.
            multiply: product of two blocks.
            lengths: of the last dim of each block of `x`, and of the first of a weight's; None: all are alike.
        """

        def made(index: int) -> Iterator[Tensor]:
            length = None if lengths is None else lengths[index]
            x_block = self.along_row(x, index, length)
            return (multiply(x_block, self.down_column(weight, index, length)) for weight in weights)

        totals = [block.to(self.dtype) for block in made(0)]
        for index in range(1, self.side):
            for total, block in zip(totals, made(index), strict=True):
                total += block
        return totals

    def reduced_along_rows(
        self,
        ys: Sequence[Tensor],
        weights: Sequence[Tensor],
        multiply: Multiply,
        lengths: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Sum over this row, and over `ys`, of the products of each with its weight's blocks of this column.

        This device's block of it.
        """

        def made(index: int) -> Tensor:
            length = None if lengths is None else lengths[index]
            products = (
                multiply(y, self.down_column(weight, index, length))
                for y, weight in zip(ys, weights, strict=True)
            )
            total = next(products).to(self.dtype)
            for product in products:
                total += product
            return total

        return self._reduced(self.row, made)

    def reduced_down_columns(self, made: Callable[[int], Tensor]) -> Tensor:
        """Sums over this column of what each device makes for each of its places: this device's one."""
        return self._reduced(self.column, made)

    def _reduced(self, group: LineGroup, made: Callable[[int], Tensor]) -> Tensor:
        def reduced(index: int) -> Tensor:
            block = made(index).to(self.dtype).contiguous()
            group.reduce(block, index)
            return block

        kept: Tensor | None = None
        for index in range(self.side):
            # What is another's is dropped before the next is made.
            if index == group.index:
                kept = reduced(index)
            else:
                reduced(index)
        assert kept is not None
        return kept

    def summed_over_row(self, numbers: Tensor) -> Tensor:
        """Sum over this row, in a new tensor."""
        total = numbers.to(self.dtype, copy=True, memory_format=torch.contiguous_format)
        self.row.sum_in_place(total)
        return total


class GridShare(Share):
    """Share of one device of a grid."""

    def __init__(self, grid: Grid) -> None:
        # What each device of a row has scored is gathered over the row.
        super().__init__(grid.row, grid.dtype)
        self._grid = grid

    @property
    def size(self) -> int:
        return self._grid.side**2

    def rows(self, num_rows: int) -> range:
        return portion_of(num_rows, self._grid.column.index, self._grid.side)

    def enter(self, x: Tensor) -> Tensor:
        return x

    def leave(self, y: Tensor) -> Tensor:
        return y

    def products(self, x: Tensor, weights: Sequence[Tensor], tray: Tray) -> tuple[Tensor, ...]:
        return _linears(x, self._grid, tray, *weights)

    def normed(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, tray: Tray) -> Tensor:
        return _norm(x, weight, eps, dtype, self._grid, tray)

    def embedded(self, tokens_BT: Tensor, weight_VK: Tensor, num_rows: int, tray: Tray) -> Tensor:
        return _embed(weight_VK, tokens_BT, num_rows, self._grid, tray)

    def scores(
        self,
        x_BTK: Tensor,
        labels_BT: Tensor,
        weight_VK: Tensor,
        num_rows: int,
        dtype: torch.dtype,
        tray: Tray,
    ) -> Tensor:
        logits_BTV = _score(x_BTK.to(dtype), weight_VK, num_rows, self._grid, tray)
        # Logits are of the rows of this column's part.
        own = portion_of(num_rows, self._grid.row.index, self._grid.side)
        return merged(self.gathered(block_scores(logits_BTV, labels_BT, own)))


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    grid: Grid
    tray: Tray
    lengths: tuple[int, ...]


class _Linears(Function):
    """`x @ weight.T` of whole matrices, this device's block of each; keeps its own blocks of all."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, grid: Grid, tray: Tray, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.grid, ctx.tray = grid, tray
        made = grid.summed(x, [weight.to(x.dtype) for weight in weights], _by_rows)
        return tuple(y.to(x.dtype) for y in made)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        made = partial(_linear_gradient, grid=ctx.grid)
        grad_weights = [
            ctx.tray.gradient(weight, made, grad, x) for weight, grad in zip(weights, grads, strict=True)
        ]
        grad_x = None
        if ctx.needs_input_grad[0]:
            narrow = [weight.to(x.dtype) for weight in weights]
            grad_x = ctx.grid.reduced_along_rows(grads, narrow, torch.matmul).to(x.dtype)
        return grad_x, None, None, *grad_weights


class _Score(Function):
    """`x @ weight.T` of a whole matrix over the vocabulary: logits of the rows of this column's part."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, weight: Tensor, num_rows: int, grid: Grid, tray: Tray) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.grid, ctx.tray, ctx.lengths = grid, tray, _lengths(num_rows, grid)
        return grid.reduced_along_rows([x], [weight.to(x.dtype)], _by_rows, ctx.lengths)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.to(x.dtype)
        made = partial(_score_gradient, grid=ctx.grid, lengths=ctx.lengths)
        grad_weight = ctx.tray.gradient(weight, made, grad, x)
        (grad_x,) = ctx.grid.summed(grad, [weight.to(grad.dtype)], torch.matmul, ctx.lengths)
        return grad_x.to(x.dtype), grad_weight, None, None, None


class _Embed(Function):
    """Rows of a whole matrix over the vocabulary, features of this column; keeps the tokens."""

    @staticmethod
    def forward(
        ctx: _Context, weight: Tensor, tokens_BT: Tensor, num_rows: int, grid: Grid, tray: Tray
    ) -> Tensor:
        ctx.save_for_backward(weight, tokens_BT)
        ctx.grid, ctx.tray, ctx.lengths = grid, tray, _lengths(num_rows, grid)
        found_BTK = weight.new_zeros((*tokens_BT.shape, weight.shape[1]))
        for index in range(grid.side):
            block = grid.down_column(weight, index, ctx.lengths[index])
            found_BTK += rows_found(tokens_BT, portion_of(num_rows, index, grid.side), block)
        return found_BTK

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, tokens_BT = ctx.saved_tensors
        made = partial(_embed_gradient, grid=ctx.grid, num_rows=sum(ctx.lengths))
        return ctx.tray.gradient(weight, made, grad, tokens_BT), None, None, None, None


class _Norm(Function):
    """The norm of `worker.model.ops.rms_norm` over all features, of which this device has those of its column."""

    @staticmethod
    def forward(
        ctx: _Context, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, grid: Grid, tray: Tray
    ) -> Tensor:
        wide = x.to(weight.dtype)
        squares = grid.summed_over_row((wide * wide).sum(-1, keepdim=True))
        scale = torch.rsqrt(squares.div_(x.shape[-1] * grid.side).add_(eps))
        ctx.save_for_backward(x, weight, scale)
        ctx.grid, ctx.tray = grid, tray
        return (wide * scale).mul_(weight).to(dtype)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        unit = x.to(weight.dtype) * scale
        grad_weight = ctx.tray.gradient(weight, as_made, (grad * unit).flatten(0, -2).sum(0))
        grad_unit = grad * weight
        along = ctx.grid.summed_over_row(torch.linalg.vecdot(grad_unit, unit).unsqueeze(-1))
        along.div_(x.shape[-1] * ctx.grid.side)
        grad_x = grad_unit.sub_(unit.mul_(along)).mul_(scale).to(x.dtype)
        return grad_x, grad_weight, None, None, None, None


def _spread(group: LineGroup, block: Tensor, origin: int, shape: tuple[int, ...]) -> Tensor:
    own = origin == group.index
    spread = block.contiguous() if own else block.new_empty(shape)
    group.spread(spread, origin)
    return spread


def _lengths(num_rows: int, grid: Grid) -> tuple[int, ...]:
    return tuple(len(portion_of(num_rows, index, grid.side)) for index in range(grid.side))


def _by_rows(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


def _linear_gradient(weight: Tensor, grad: Tensor, x: Tensor, *, grid: Grid) -> Tensor:
    def make(index: int) -> Tensor:
        return grad.flatten(0, -2).t() @ grid.along_row(x, index).flatten(0, -2)

    return grid.reduced_down_columns(make).to(weight.dtype)


def _score_gradient(
    weight: Tensor, grad: Tensor, x: Tensor, *, grid: Grid, lengths: tuple[int, ...]
) -> Tensor:
    def make(index: int) -> Tensor:
        return grid.along_row(grad, index, lengths[index]).flatten(0, -2).t() @ x.flatten(0, -2)

    return grid.reduced_down_columns(make).to(weight.dtype)


def _embed_gradient(weight: Tensor, grad: Tensor, tokens_BT: Tensor, *, grid: Grid, num_rows: int) -> Tensor:
    def make(index: int) -> Tensor:
        return rows_added(portion_of(num_rows, index, grid.side), grad, tokens_BT)

    return grid.reduced_down_columns(make).to(weight.dtype)


# torch leaves `apply` without types.
_linears: Callable[..., tuple[Tensor, ...]] = _Linears.apply
_score: Callable[[Tensor, Tensor, int, Grid, Tray], Tensor] = _Score.apply
_embed: Callable[[Tensor, Tensor, int, Grid, Tray], Tensor] = _Embed.apply
_norm: Callable[[Tensor, Tensor, float, torch.dtype, Grid, Tray], Tensor] = _Norm.apply
