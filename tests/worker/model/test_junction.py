"""Balance loss of a layer of experts: its number, its gradient, and that nothing but chances has any of it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from skein.model.sparse.routing import RoutingSpec
from tests.worker.model.builders import assert_near
from tests.worker.model.test_experts import EXPERTS, ROUNDING, gradients, sparse, tokens
from worker.model.pending import add_up
from worker.model.sparse.junction import Junction
from worker.model.sparse.layer import SparseMlp

COEFFICIENT = 0.5
NUM_VALID = 7


def weighed(chances: list[list[float]], counts: tuple[int, ...]) -> tuple[float, Tensor]:
    """Balance loss of chances of tokens, and the gradient of the chances' sum then."""
    chances_NE = torch.tensor(chances, dtype=torch.float64, requires_grad=True)
    junction = Junction()
    with junction.visited(NUM_VALID) as visit:
        torch.autograd.backward(junction.weighed(chances_NE, torch.tensor(counts), COEFFICIENT).sum())
    assert chances_NE.grad is not None
    return visit.losses[0], chances_NE.grad


def plain_loss(module: SparseMlp, x_BTD: Tensor) -> Tensor:
    """E sum over experts of (share of choices) (mean chance), by loops."""
    num_experts, num_chosen = module.sizes.num_experts, module.sizes.num_chosen
    chances = [torch.softmax(module.gate.weight @ x, -1) for x in x_BTD.flatten(0, -2)]
    counts = [0] * num_experts
    for each in chances:
        for expert in each.topk(num_chosen).indices.tolist():
            counts[expert] += 1
    total = chances[0].new_zeros(())
    for expert, count in enumerate(counts):
        total = total + count / sum(counts) * sum(each[expert] for each in chances) / len(chances)
    return num_experts * total


def test_even_experts_have_a_balance_loss_of_one_and_a_single_favourite_has_their_number() -> None:
    even, grad = weighed([[0.25] * 4] * 2, (1, 1, 1, 1))
    assert even == 1.0
    # d/dP = E share / N = 4 / 4 / 2, times coefficient and valid tokens; one more of the sum.
    assert grad.tolist() == [[1 + 0.5 * COEFFICIENT * NUM_VALID] * 4] * 2
    favoured, grad = weighed([[0.0, 1.0, 0.0, 0.0]] * 2, (0, 4, 0, 0))
    assert favoured == 4.0
    assert grad.tolist() == [[1.0, 1 + 2 * COEFFICIENT * NUM_VALID, 1.0, 1.0]] * 2


@pytest.mark.parametrize("num_chosen", [1, 2, 3])
@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
def test_gradients_are_those_of_the_loss_written_out(num_chosen: int, is_split: bool) -> None:
    routing = RoutingSpec(balance_coefficient=COEFFICIENT)
    experts = replace(EXPERTS, num_chosen=num_chosen, routing=routing)
    module, other = sparse(experts), sparse(experts)
    x, same = (tokens().requires_grad_() for _ in range(2))
    with module.junction.visited(NUM_VALID) as visit:
        y = module(x)
    if is_split:
        with module.tray.opened() as pending:
            torch.autograd.backward(y.sum())
        add_up(pending)
    else:
        torch.autograd.backward(y.sum())
    # The same module outside of a visit has none of it.
    loss = plain_loss(other, same)
    torch.autograd.backward(other(same).sum() + COEFFICIENT * NUM_VALID * loss)
    assert visit.balance is not None
    assert visit.balance.loss_sum == pytest.approx(NUM_VALID * loss.item(), rel=ROUNDING)
    assert visit.balance.num_tokens == NUM_VALID
    assert same.grad is not None
    assert_near(x.grad, same.grad, tolerance=ROUNDING)
    wanted = gradients(other)
    for name, gradient in gradients(module).items():
        assert_near(gradient, wanted[name], tolerance=ROUNDING, what=name)


@pytest.mark.parametrize("num_valid", [0, None])
def test_a_microbatch_without_valid_tokens_pulls_at_nothing(num_valid: int | None) -> None:
    experts = replace(EXPERTS, routing=RoutingSpec(balance_coefficient=COEFFICIENT))
    module, other = sparse(experts), sparse(EXPERTS)
    with module.junction.visited(num_valid):
        torch.autograd.backward(module(tokens()).sum())
    torch.autograd.backward(other(tokens()).sum())
    wanted = gradients(other)
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients(module).items())
