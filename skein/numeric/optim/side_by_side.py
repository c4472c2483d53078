"""Updates of rows: each by its own numbers, and equal bit for bit to the update of that row alone.

Adam, AdamW and SGD go over all rows at once, each number a column beside them; others, such as LAMB with its norms of
tensors, are asked row by row. R rows. The rules of `elementwise` hold here, and no sum goes over rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skein.numeric.optim.adamw import MEAN, MEAN_OF_SQUARES, AdamW
from skein.numeric.optim.elementwise import root
from skein.numeric.optim.optimizer import Optimizer
from skein.numeric.optim.sgd import MOMENTUM, Sgd
from skein.numeric.rows import RowBuffer, RowLayout

_PIECE = 2**18
"""Numbers that are worked on together, over all rows: they stay in a CPU's cache. Does not change results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTerms:
    """The numbers of one row's update: its rate, and the factor that makes summed gradients a clipped mean."""

    learning_rate: float
    gradient_scale: float


@torch.no_grad()
def update_rows(
    rows: RowBuffer, grads: Tensor, optimizers: Sequence[Optimizer], terms: Sequence[RowTerms | None]
) -> None:
    """Make one update of every row that has terms, in place; a row without any stays as it is, whatever is in it.

    Args:
        grads: (R, P) sums, laid out as the rows are; not changed.
        optimizers: of each row, alike in kind.
        terms: of each row.
    """
    moved = [row for row, term in enumerate(terms) if term is not None]
    chosen = [term for term in terms if term is not None]
    if len(moved) == len(rows):
        _update(rows, grads, optimizers, chosen)
    elif moved:
        # Selected, not masked by a factor: 0 times infinity is no number.
        part = rows.taken(moved)
        _update(part, grads[moved], [optimizers[row] for row in moved], chosen)
        rows.put(moved, part)


def _update(
    rows: RowBuffer, grads: Tensor, optimizers: Sequence[Optimizer], terms: Sequence[RowTerms]
) -> None:
    adamw = [x for x in optimizers if isinstance(x, AdamW)]
    sgd = [x for x in optimizers if isinstance(x, Sgd)]
    if len(adamw) == len(rows) and len({x.decays_gradients for x in adamw}) == 1:
        _adamw(rows, grads, adamw, terms)
    elif len(sgd) == len(rows) and len({x.nesterov for x in sgd}) == 1:
        _sgd(rows, grads, sgd, terms)
    else:
        _one_by_one(rows, grads, optimizers, terms)
        return
    rows.num_updates = [count + 1 for count in rows.num_updates]


def _one_by_one(
    rows: RowBuffer, grads: Tensor, optimizers: Sequence[Optimizer], terms: Sequence[RowTerms]
) -> None:
    for row, (optimizer, term) in enumerate(zip(optimizers, terms, strict=True)):
        walker = rows.walker(row)
        optimizer.update(
            walker,
            rows.layout.views(grads[row]),
            learning_rate=term.learning_rate,
            gradient_scale=term.gradient_scale,
        )
        rows.num_updates[row] = walker.num_updates


def _adamw(rows: RowBuffer, grads: Tensor, rules: Sequence[AdamW], terms: Sequence[RowTerms]) -> None:
    """`AdamW.update` of each row, operation by operation."""
    column = _columns(rows)
    counts = [count + 1 for count in rows.num_updates]
    rates = [term.learning_rate for term in terms]
    scale = column([term.gradient_scale for term in terms])
    first, first_rest = column([x.betas[0] for x in rules]), column([1.0 - x.betas[0] for x in rules])
    second, second_rest = column([x.betas[1] for x in rules]), column([1.0 - x.betas[1] for x in rules])
    is_adam, decay = rules[0].decays_gradients, column([x.weight_decay for x in rules])
    kept = column([1.0 - rate * x.weight_decay for rate, x in zip(rates, rules, strict=True)])
    size = column([r / (1.0 - x.betas[0] ** t) for r, x, t in zip(rates, rules, counts, strict=True)])
    inverse_root = column([(1.0 - x.betas[1] ** t) ** -0.5 for x, t in zip(rules, counts, strict=True)])
    eps = column([x.eps for x in rules])
    for span, is_decayed, g, x in _spans(rows):
        p, grad = rows.params[:, span], grads[:, span]
        m, v = rows.state[MEAN][:, span], rows.state[MEAN_OF_SQUARES][:, span]
        if is_decayed and not is_adam:
            p.mul_(kept)
        torch.mul(grad, scale, out=g)
        if is_decayed and is_adam:
            g.add_(torch.mul(p, decay, out=x))
        m.mul_(first).add_(torch.mul(g, first_rest, out=x))
        v.mul_(second).add_(torch.mul(g, g, out=x).mul_(second_rest))
        denominator = root(v, out=g).mul_(inverse_root).add_(eps)
        p.sub_(torch.mul(m, size, out=x).div_(denominator))


def _sgd(rows: RowBuffer, grads: Tensor, rules: Sequence[Sgd], terms: Sequence[RowTerms]) -> None:
    """`Sgd.update` of each row, operation by operation."""
    column = _columns(rows)
    scale = column([term.gradient_scale for term in terms])
    rate = column([term.learning_rate for term in terms])
    decay, momentum = column([x.weight_decay for x in rules]), column([x.momentum for x in rules])
    for span, is_decayed, g, x in _spans(rows):
        p = rows.params[:, span]
        torch.mul(grads[:, span], scale, out=g)
        if is_decayed:
            g.add_(torch.mul(p, decay, out=x))
        if MOMENTUM in rows.state:
            b = rows.state[MOMENTUM][:, span]
            b.mul_(momentum).add_(g)
            g = g.add_(torch.mul(b, momentum, out=x)) if rules[0].nesterov else b
        p.sub_(torch.mul(g, rate, out=x))


def _columns(rows: RowBuffer) -> Callable[[Sequence[float]], Tensor]:
    """Makes a number for each row a column (R, 1), in the dtype and on the device of the parameters."""
    return lambda numbers: rows.params.new_tensor(numbers).unsqueeze(1)


def _spans(rows: RowBuffer) -> Iterator[tuple[slice, bool, Tensor, Tensor]]:
    """Columns that are worked on together, whether they decay, and two scratch tensors of their shape."""
    width = max(1, _PIECE // len(rows))
    bounds = [*_bounds(rows.layout, width)]
    scratch = rows.params.new_empty(2, len(rows), max((stop - first for first, stop in bounds), default=0))
    for first, stop in bounds:
        g, x = scratch[..., : stop - first].unbind()
        yield slice(first, stop), stop <= rows.layout.num_decayed, g, x


def _bounds(layout: RowLayout, width: int) -> Iterator[tuple[int, int]]:
    for begin, end in ((0, layout.num_decayed), (layout.num_decayed, layout.num_elements)):
        for first in range(begin, end, width):
            yield first, min(first + width, end)
