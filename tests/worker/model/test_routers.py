"""Routers: choices, kept ones and slots on inputs written out, and numbers against plain torch by the definitions."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from bench.experts import PlainExperts, fed
from skein.model.families.mixtral import MixtralModel, MixtralShape
from skein.model.layers import layers_of
from skein.model.sparse.experts import Experts
from skein.model.sparse.routing import DropOrder, RouterKind, RoutingSpec
from skein.rng import stream
from skein.types import Precision
from tests.worker.model.builders import NUM_TOKENS, assert_near, part, samples
from tests.worker.model.test_costs import NUM_SAMPLES, cost, counter, inputs, kept_bytes, run
from tests.worker.model.test_experts import EXPERTS, ROUNDING, gradients, sparse, tokens
from worker.model.base import Crossing, Labels, Stage
from worker.model.pending import add_up, held_bytes
from worker.model.sparse.choosing import slots_of
from worker.model.sparse.junction import Junction, RoutedMicrobatch
from worker.model.sparse.layer import SparseMlp
from worker.model.sparse.routers import ROUTES, ChosenWay, Routed
from worker.model.sparse.rows import slices_of

CHANCES = [
    [0.5, 0.25, 0.125, 0.125],
    [0.125, 0.5, 0.25, 0.125],
    [0.4, 0.3, 0.2, 0.1],
    [0.25, 0.25, 0.25, 0.25],
]
"""Of four tokens for four experts; scores are their logarithms."""
SIZES: dict[str, object] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 4,
}
TOKENS_CHOOSE = [kind for kind in RouterKind if kind.row.tokens_choose]


def routing(kind: RouterKind, **settings: object) -> RoutingSpec:
    """A router's settings, with leave to look ahead where it does."""
    asked = {"router": kind, "allow_lookahead": kind.row.looks_ahead} | settings
    return RoutingSpec.model_validate(asked)


def experts_of(kind: RouterKind, **settings: object) -> Experts:
    return replace(EXPERTS, routing=routing(kind, **settings))


def way_of(experts: Experts, num_valid: int | None = 4) -> tuple[ChosenWay, Junction]:
    """Way of the tokens of `CHANCES`."""
    junction = Junction()
    with junction.visited(num_valid):
        scores = torch.tensor(CHANCES, dtype=torch.float64).log()
        routed = ROUTES[experts.routing.router](scores, experts, junction)
    assert isinstance(routed, Routed)
    return routed.way(experts.num_experts), junction


def choices_by_expert(way: ChosenWay) -> list[list[int]]:
    """Tokens of each expert's rows."""
    return [way.rows.tokens_R[own].tolist() for own in slices_of(way.rows.num_rows)]


WEIGHTS: dict[RouterKind, list[list[float]]] = {
    RouterKind.SOFTMAX_TOPK: [[2 / 3, 1 / 3], [2 / 3, 1 / 3], [4 / 7, 3 / 7], [0.5, 0.5]],
    RouterKind.GSHARD: [[2 / 3, 1 / 3], [2 / 3, 1 / 3], [4 / 7, 3 / 7], [0.5, 0.5]],
    # The logistic function of log p is p / (1 + p).
    RouterKind.SIGMOID: [[1 / 3, 0.2], [1 / 3, 0.2], [2 / 7, 3 / 13], [0.2, 0.2]],
    RouterKind.XMOE: [[0.5, 0.25], [0.5, 0.25], [0.4, 0.3], [0.25, 0.25]],
}


@pytest.mark.parametrize("kind", TOKENS_CHOOSE)
def test_tokens_choose_their_best_experts_with_the_weights_of_the_router(kind: RouterKind) -> None:
    way, _ = way_of(experts_of(kind))
    assert choices_by_expert(way) == [[0, 2, 3], [0, 1, 2, 3], [1], []]
    assert_near(way.weights_NK, torch.tensor(WEIGHTS[kind], dtype=torch.float64), tolerance=ROUNDING)


KEPT = {
    # Two choices an expert. All first choices before second ones: of expert 1 token 1's, then token 0's.
    DropOrder.CHOICE_MAJOR: [[0, 2], [0, 1], [1], []],
    DropOrder.TOKEN_MAJOR: [[0, 2], [0, 1], [1], []],
}
SLOTS = {
    DropOrder.CHOICE_MAJOR: [[0, 1], [0, 0], [1, 2], [2, 3]],
    DropOrder.TOKEN_MAJOR: [[0, 0], [1, 0], [1, 2], [2, 3]],
}


@pytest.mark.parametrize("kind", TOKENS_CHOOSE)
@pytest.mark.parametrize("order", KEPT)
def test_full_experts_take_the_first_of_each_order(kind: RouterKind, order: DropOrder) -> None:
    way, _ = way_of(experts_of(kind, capacity=1.0, drop=order))
    assert choices_by_expert(way) == KEPT[order]
    choices = torch.tensor([[0, 1], [1, 2], [0, 1], [0, 1]])
    assert slots_of(choices, way.weights_NK, 4, order).tolist() == SLOTS[order]


PROBS = {
    RouterKind.SOFTMAX_TOPK: [[0, 2], [1, 3], [1], []],
    RouterKind.GSHARD: [[0, 2], [1, 3], [1], []],
    RouterKind.SIGMOID: [[0, 2], [1, 2], [1], []],
    RouterKind.XMOE: [[0, 2], [1, 2], [1], []],
}
"""Tokens that experts of two choices keep by weight: where weights are divided, even ones count more."""


@pytest.mark.parametrize("kind", TOKENS_CHOOSE)
def test_full_experts_keep_the_largest_weights_of_their_router(kind: RouterKind) -> None:
    way, _ = way_of(experts_of(kind, capacity=1.0, drop=DropOrder.PROBS))
    assert choices_by_expert(way) == PROBS[kind]


def test_experts_choose_their_best_tokens_and_of_equals_the_earlier() -> None:
    way, junction = way_of(experts_of(RouterKind.EXPERT_CHOICE))
    # Two of four tokens each; of 0.25 and 0.25 the earlier; of three times 0.125 tokens 3 and the first.
    assert choices_by_expert(way) == [[0, 2], [1, 2], [1, 3], [0, 3]]
    assert way.weights_NK.tolist() == [pytest.approx(row) for row in CHANCES]
    assert junction.microbatch is None


def test_balance_losses_are_those_of_the_definition_on_numbers_written_out() -> None:
    experts = experts_of(RouterKind.SIGMOID, balance_coefficient=1.0)
    junction = Junction()
    with junction.visited(4) as visit:
        ROUTES[RouterKind.SIGMOID](torch.tensor(CHANCES, dtype=torch.float64).log(), experts, junction)
    # Counts 3, 4, 1 and 0 of 8; mean chances 1.275, 1.3, 0.825 and 0.6 over 4.
    wanted = 4 * (3 * 1.275 + 4 * 1.3 + 1 * 0.825) / 8 / 4
    assert visit.losses == [pytest.approx(wanted, rel=1e-14)]


def both(experts: Experts, *, is_split: bool, num_valid: int = 7) -> None:
    """Results, gradients, balance loss and drops of a layer are those of plain torch."""
    module, other = sparse(experts), sparse(experts)
    plain = PlainExperts([other])
    x, same = (tokens().requires_grad_() for _ in range(2))
    with module.junction.visited(num_valid) as routed:
        y = module(x)
    expected = other(same)
    assert_near(y, expected.detach(), tolerance=1e-10)
    grad = expected.detach().flip(0)
    if is_split:
        with module.tray.opened() as pending:
            torch.autograd.backward(y, grad)
        assert all(parameter.grad is None for parameter in module.parameters())
        add_up(pending)
    else:
        torch.autograd.backward(y, grad)
    losses = plain.taken()
    pull = sum(losses, y.new_zeros(()))
    torch.autograd.backward((expected * grad).sum() + experts.routing.balance_coefficient * num_valid * pull)
    assert same.grad is not None
    assert_near(x.grad, same.grad, tolerance=ROUNDING)
    for name, gradient in gradients(module).items():
        wanted = other.get_parameter(name).grad
        assert wanted is not None
        assert_near(gradient, wanted, tolerance=ROUNDING, what=name)
    assert routed.losses == [pytest.approx(float(loss.detach()), rel=1e-10) for loss in losses]
    assert (routed.balance and routed.balance.drop_ratio) == plain.drop_ratio()


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize(
    "experts",
    [
        *(experts_of(kind, balance_coefficient=0.5, capacity=0.8) for kind in TOKENS_CHOOSE),
        experts_of(RouterKind.SIGMOID),
        experts_of(RouterKind.XMOE, projection=3, temperature=0.07),
        experts_of(RouterKind.EXPERT_CHOICE),
        replace(experts_of(RouterKind.EXPERT_CHOICE), num_chosen=4),
        experts_of(RouterKind.SOFTMOE),
        experts_of(RouterKind.SOFTMOE, slots=3),
    ],
    ids=lambda experts: f"{experts.routing.router}-{experts.num_chosen}-{experts.routing.slots}",
)
def test_results_gradients_and_balance_losses_are_those_of_plain_torch(
    experts: Experts, *, is_split: bool
) -> None:
    both(experts, is_split=is_split)


LUCK, FIRST_LAYER = 11, 3


def fed_by_chance(module: SparseMlp, x_ND: Tensor) -> Tensor:
    """Gshard with noise, and a second expert by chance, by plain torch, token by token."""
    num_experts, asked = module.sizes.num_experts, module.sizes.routing
    drawn = stream(LUCK, FIRST_LAYER).standard_normal((len(x_ND), num_experts))
    coins = 1 - stream(LUCK, FIRST_LAYER, "second").random(len(x_ND))
    rows = []
    for x_D, numbers, coin in zip(x_ND, torch.from_numpy(drawn), coins, strict=True):
        scores = (module.get_parameter("gate.weight") @ x_D).split(num_experts)
        noise = asked.noise * numbers * torch.log1p(scores[1].exp()) if asked.noise else 0
        best, (first, second) = (scores[0] + noise).topk(2)
        weights = best.softmax(0)
        y_D = weights[0] * fed(module, int(first), x_D[None])[0]
        if not asked.random_second or 2 * float(weights[1].detach()) > coin:
            y_D = y_D + weights[1] * fed(module, int(second), x_D[None])[0]
        rows.append(y_D)
    return torch.stack(rows)


@pytest.mark.parametrize(
    "settings", [{"noise": 2.0}, {"random_second": True}, {"noise": 2.0, "random_second": True}], ids=str
)
def test_chance_is_that_of_the_definition_and_belongs_to_the_microbatch_and_the_layer(
    settings: dict[str, object],
) -> None:
    module, other = (sparse(experts_of(RouterKind.GSHARD, **settings)) for _ in range(2))
    x, same = (tokens().requires_grad_() for _ in range(2))
    module.junction = Junction(FIRST_LAYER)
    with module.junction.visited(4, luck=LUCK) as visit:
        y = module(x)
    wanted = fed_by_chance(other, same.flatten(0, -2)).view(same.shape)
    assert_near(y.detach(), wanted.detach(), tolerance=1e-10)
    torch.autograd.backward([y, wanted], [wanted.detach()] * 2)
    assert same.grad is not None
    assert_near(x.grad, same.grad, tolerance=ROUNDING)
    for name, gradient in gradients(module).items():
        assert_near(gradient, gradients(other)[name], tolerance=ROUNDING, what=name)
    made = visit.choices
    assert made is not None
    for layer, luck in ((FIRST_LAYER, LUCK + 1), (FIRST_LAYER + 1, LUCK)):
        module.junction = Junction(layer)
        with module.junction.visited(4, luck=luck) as another:
            module(x)
        assert another.choices is not None
        assert not torch.equal(another.choices, made)
    # What is exported has none.
    silent = sparse(experts_of(RouterKind.GSHARD))
    with torch.no_grad():
        silent.get_parameter("gate.weight").copy_(module.get_parameter("gate.weight")[: len(silent.experts)])
        for name, parameter in silent.experts.named_parameters():
            parameter.copy_(module.experts.get_parameter(name))
        # A matrix of half as many columns is multiplied in another order on some processors.
        assert_near(module(x), silent(x), tolerance=ROUNDING)


class Cast(Junction):
    """Has drawn these numbers of the tokens of `CHANCES`."""

    def __init__(self, *coins: float) -> None:
        super().__init__()
        self._coins = torch.tensor(coins, dtype=torch.float64)

    def evenly_drawn(self, num_tokens: int) -> Tensor:
        assert len(self._coins) == num_tokens
        return self._coins


def second_of(
    junction: Junction, told: list[list[int]] | None = None, **settings: object
) -> tuple[ChosenWay, RoutedMicrobatch]:
    """Way of the tokens of `CHANCES`, whose second experts weigh 1/3, 1/3, 3/7 and 1/2, and what is told of it."""
    experts = experts_of(RouterKind.GSHARD, random_second=True, **settings)
    given = None if told is None else torch.tensor([told], dtype=torch.uint8)
    with junction.visited(4, told=given) as visit:
        scores = torch.tensor(CHANCES, dtype=torch.float64).log()
        routed = ROUTES[RouterKind.GSHARD](scores, experts, junction)
    assert isinstance(routed, Routed)
    return routed.way(experts.num_experts), visit


def test_a_second_expert_is_taken_if_twice_its_weight_is_above_what_is_drawn() -> None:
    way, visit = second_of(Cast(0.66, 0.67, 0.86, 0.99))
    assert choices_by_expert(way) == [[0, 2, 3], [0, 1, 3], [], []]
    # What is left out leaves the first one's weight as it is.
    assert_near(
        way.weights_NK, torch.tensor(WEIGHTS[RouterKind.GSHARD], dtype=torch.float64), tolerance=ROUNDING
    )
    # Four more say that an expert is left out, which counts nowhere.
    assert [made.tolist() for made in visit.made] == [[[0, 1], [1, 6], [0, 5], [0, 1]]]
    assert visit.counts == [(3, 3, 0, 0)]
    assert visit.losses == [pytest.approx(4 * (3 * 1.275 + 3 * 1.3) / 6 / 4, rel=1e-14)]


@pytest.mark.parametrize(
    ("order", "kept"),
    [
        # Without chance token 0 would be the second one at expert 1.
        (DropOrder.CHOICE_MAJOR, [[0, 2], [1, 2], [1], []]),
        (DropOrder.TOKEN_MAJOR, [[0, 2], [1, 2], [1], []]),
        (DropOrder.PROBS, [[0, 2], [1, 3], [1], []]),
    ],
)
def test_a_second_expert_that_is_left_out_leaves_its_place_to_others(
    order: DropOrder, kept: list[list[int]]
) -> None:
    way, visit = second_of(Cast(0.67, 0.66, 0.85, 0.99), capacity=1.0, drop=order)
    assert choices_by_expert(way) == kept
    assert (visit.num_choices, visit.num_dropped) == (7, 2)


def test_a_second_expert_is_left_out_as_elsewhere_only_where_chance_nearly_says_so() -> None:
    told = [[0, 5], [1, 6], [0, 1], [1, 4]]
    way, visit = second_of(Cast(2 / 3 - 1e-6, 0.1, 0.9, 0.999), told)
    # By a hair; not at all; not at all; and of two that score alike the other one alone.
    assert [made.tolist() for made in visit.made] == [[[0, 5], [1, 2], [0, 5], [1, 4]]]
    assert choices_by_expert(way) == [[0, 2], [1, 3], [1], []]
    assert_near(
        way.weights_NK, torch.tensor(WEIGHTS[RouterKind.GSHARD], dtype=torch.float64), tolerance=ROUNDING
    )
    # A first one is never left out, and no expert chosen twice.
    for lie in ([4, 1], [1, 5]):
        way, _ = second_of(Cast(0.66, 0.67, 0.86, 0.999), [[0, 1], [1, 6], [0, 5], lie])
        assert choices_by_expert(way)[:2] == [[0, 2, 3], [0, 1, 3]]


Step = tuple[float, float, float]
"""Loss, gradient norm and balance loss, of all tokens together."""


def trained(model: MixtralModel, cut: tuple[int, ...]) -> list[Step]:
    """Twelve steps of two microbatches each through the stages of a cut, by hand."""
    stages = [part(model, first, stop) for first, stop in pairwise(cut)]
    return _twelve_steps(model, stages, lambda x, labels: _there_and_back(stages, x, labels))


def _twelve_steps(
    model: MixtralModel, stages: list[Stage], visit: Callable[[Tensor, Tensor], tuple[float, float]]
) -> list[Step]:
    """`visit` adds the gradients of a microbatch, and gives its loss and balance loss."""
    parameters = [y for stage in stages for y in stage.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    microbatches = [torch.split(whole, NUM_SAMPLES) for whole in samples(model, 2 * NUM_SAMPLES)]
    told = []
    for _ in range(12):
        optimizer.zero_grad()
        losses, balances = zip(*map(visit, *microbatches), strict=True)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, 1e9))
        optimizer.step()
        told.append((sum(losses), norm, sum(balances)))
    return told


def _there_and_back(stages: list[Stage], x: Tensor, labels: Tensor) -> tuple[float, float]:
    num_valid, balance = Labels(labels).num_valid, 0.0
    crossings: list[tuple[Stage, Crossing, Crossing]] = []
    given = Crossing(x)
    for stage in stages[:-1]:
        with stage.junction.visited(num_valid) as visit:
            made = stage.onward(given.followed(is_sample=not crossings), None)
        crossings.append((stage, given, made))
        given, balance = made.detached(), balance + sum(visit.losses)
    with stages[-1].junction.visited(num_valid) as visit:
        loss, _ = stages[-1].score(given.followed(is_sample=not crossings), labels)
    torch.autograd.backward(loss)
    for stage, before, made in reversed(crossings):
        assert given.hidden.grad is not None
        stage.add_gradients(made.differentiable, [given.hidden.grad])
        given = before
    return float(loss.detach()), balance + sum(visit.losses)


def plainly_trained(model: MixtralModel) -> list[Step]:
    """The same by plain torch, uncut: a loss with the balance losses in it."""
    whole = part(model, 0, 4)
    plain = PlainExperts([whole])

    def visit(x: Tensor, labels: Tensor) -> tuple[float, float]:
        loss, num_valid = whole.loss(x, labels)
        pull = sum(plain.taken(), loss.new_zeros(()))
        torch.autograd.backward(loss + plain.coefficient * num_valid * pull)
        return float(loss.detach()), float(pull.detach())

    return _twelve_steps(model, [whole], visit)


@pytest.mark.parametrize("kind", RouterKind)
def test_twelve_steps_of_two_cuts_are_those_of_plain_torch(kind: RouterKind) -> None:
    # Top 1 at their even share where tokens choose, so that choices are dropped.
    sizes = SIZES | {"num_hidden_layers": 2, "initializer_range": 0.3, "num_experts_per_tok": 1}
    sizes |= {"tie_word_embeddings": False}
    settings = {"balance_coefficient": 0.1, "capacity": 1.0} if kind.row.tokens_choose else {}
    model = MixtralModel(shape=MixtralShape.model_validate(sizes), routing=routing(kind, **settings))
    wanted = plainly_trained(model)
    assert wanted[-1][0] < wanted[0][0]
    for cut in ((0, 4), (0, 2, 4), (0, 1, 2, 3, 4)):
        for found, plain in zip(trained(model, cut), wanted, strict=True):
            assert found == pytest.approx(plain, rel=1e-9), cut


@pytest.mark.parametrize("kind", RouterKind)
def test_only_the_routers_that_say_so_let_later_tokens_change_an_earlier_one(kind: RouterKind) -> None:
    """By what expert choice is refused for models that write: its training sees tokens that writing does not have."""
    module, x = sparse(experts_of(kind)), tokens(1, 9)
    longer = torch.cat([x, 3 * tokens(1, 4)], 1)
    with module.junction.visited(None):
        changed = not torch.allclose(module(longer)[:, :9], module(x), rtol=0, atol=1e-12)
    assert changed == kind.row.looks_ahead


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize(
    ("kind", "own"),
    [
        *((kind, {"slots": 2} if kind is RouterKind.SOFTMOE else {}) for kind in RouterKind),
        (RouterKind.GSHARD, {"noise": 1.0}),
    ],
)
def test_costs_are_those_that_torch_counts(
    kind: RouterKind, own: dict[str, object], precision: Precision
) -> None:
    pull = {"balance_coefficient": 0.1} if kind.row.tokens_choose else {}
    settings = own | pull
    model = MixtralModel(shape=MixtralShape.model_validate(SIZES), routing=routing(kind, **settings))
    # Slots are counted for each sample, though a microbatch has them once.
    stage = part(model, 1, 2, precision=precision)
    x, labels = inputs(model, 1, precision)
    x = x[: 1 if kind.row.mixes_tokens else NUM_SAMPLES].detach().clone().requires_grad_()
    expected = cost(model, 1, 2, precision)
    with stage.junction.visited(NUM_TOKENS, luck=LUCK):
        # Once for a microbatch: how much each expert is pulled at.
        assert (
            kept_bytes(stage, x, labels)
            == len(x) * expected.activation_bytes + len(pull) * 4 * precision.word_bytes
        )
    with stage.junction.visited(NUM_TOKENS, luck=LUCK), counter() as forward:
        result = run(stage, x, labels)
    with counter() as backward:
        pending = stage.put_aside([result])
    with counter() as added:
        held = held_bytes(pending)
        add_up(pending)
    # torch counts no grouped products.
    if precision is not Precision.BF16:
        assert forward.get_total_flops() == len(x) * expected.forward_flops
        assert backward.get_total_flops() + added.get_total_flops() == len(x) * expected.backward_flops
    assert sum(y.numel() for y in stage.parameters()) == expected.num_parameters
    layers = layers_of(model, sequence_tokens=NUM_TOKENS, precision=precision)
    assert held == len(x) * layers[1].pending_bytes + layers[1].num_early_gradients * precision.word_bytes
