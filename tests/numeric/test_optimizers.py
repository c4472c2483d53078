"""Laws that every optimizer obeys. A new one adds a row to `ROWS` and inherits them all."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.reference import torch_optimizer
from skein.config.optimizer import AdadeltaSpec, AdamSpec, AdamWSpec, LambSpec, OptimizerSpec, SgdSpec
from skein.numeric.optim import elementwise
from skein.numeric.optim.groups import decayed_names
from skein.numeric.optim.optimizers import optimizer_of
from skein.numeric.walker import Tensors, Walker
from tests.support import extent

RATE = 3e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An optimizer under test, beside the same rule by somebody else."""

    name: str
    spec: OptimizerSpec
    reference: Callable[[OptimizerSpec, Tensors, Sequence[Tensors]], Mapping[str, Tensor]]
    """Parameters after updates with these gradients."""

    def walker(self, params: Tensors) -> Walker:
        return Walker(params=params, state=optimizer_of(self.spec).init(params))

    def update(self, walker: Walker, grads: Mapping[str, Tensor], scale: float) -> None:
        optimizer_of(self.spec).update(walker, grads, learning_rate=RATE, gradient_scale=scale)


def by_torch(spec: OptimizerSpec, params: Tensors, grads: Sequence[Tensors]) -> Tensors:
    leaves = {name: param.clone().requires_grad_() for name, param in params.items()}
    reference = torch_optimizer(spec, leaves.values())
    for group in reference.param_groups:
        group["lr"] = RATE
    for grads_now in grads:
        for name, leaf in leaves.items():
            leaf.grad = grads_now[name]
        reference.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


def by_numpy_lamb(spec: OptimizerSpec, params: Tensors, grads: Sequence[Tensors]) -> Tensors:
    """LAMB as the equations stand, whole tensors at a time."""
    assert isinstance(spec, LambSpec)
    moved = {}
    for name, param in params.items():
        decay = spec.weight_decay if param.ndim >= 2 else 0.0
        x, m, v = param.numpy().copy(), np.zeros(param.shape), np.zeros(param.shape)
        for t, grads_now in enumerate(grads, start=1):
            x, m, v = _lamb_step(spec, x, m, v, grads_now[name].numpy(), t, decay)
        moved[name] = torch.from_numpy(x)
    return moved


F64 = NDArray[np.float64]


def _lamb_step(spec: LambSpec, x: F64, m: F64, v: F64, g: F64, t: int, decay: float) -> tuple[F64, F64, F64]:
    b1, b2 = spec.betas
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
    m_hat, v_hat = (m / (1 - b1**t), v / (1 - b2**t)) if spec.bias_correction else (m, v)
    u = m_hat / (np.sqrt(v_hat) + spec.eps) + decay * x
    norms = float(np.sqrt(np.sum(x**2))), float(np.sqrt(np.sum(u**2)))
    ratio = float(np.clip(norms[0] / norms[1], spec.min_ratio, spec.max_ratio)) if all(norms) else 1.0
    return np.asarray(x - RATE * ratio * u), m, v


def row(name: str, spec: OptimizerSpec) -> Row:
    reference = by_numpy_lamb if isinstance(spec, LambSpec) else by_torch
    return Row(name=name, spec=spec, reference=reference)


ROWS = (
    row("adamw", AdamWSpec(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)),
    row("adamw without decay", AdamWSpec(betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0)),
    row("adamw without means", AdamWSpec(betas=(0.0, 0.0), eps=1e-3, weight_decay=0.01)),
    row("adam", AdamSpec(name="adam", weight_decay=0.1)),
    row("adam without decay", AdamSpec(name="adam", betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0)),
    row("adadelta", AdadeltaSpec(name="adadelta", weight_decay=0.1)),
    row("adadelta without decay", AdadeltaSpec(name="adadelta", rho=0.5, eps=1e-3, weight_decay=0.0)),
    row("sgd", SgdSpec(name="sgd", momentum=0.0, weight_decay=0.1)),
    row("sgd with momentum", SgdSpec(name="sgd", momentum=0.9, weight_decay=0.1)),
    row("sgd with Nesterov's", SgdSpec(name="sgd", momentum=0.9, nesterov=True, weight_decay=0.01)),
    row("sgd without decay", SgdSpec(name="sgd", momentum=0.5, nesterov=True, weight_decay=0.0)),
    row("lamb", LambSpec(name="lamb", weight_decay=0.1)),
    row("lamb without decay", LambSpec(name="lamb", weight_decay=0.0, betas=(0.8, 0.95))),
    row("lamb with bias correction", LambSpec(name="lamb", weight_decay=0.01, bias_correction=True)),
    row("lamb at its lower bound", LambSpec(name="lamb", weight_decay=0.1, min_ratio=5.0)),
    row("lamb at its upper bound", LambSpec(name="lamb", weight_decay=0.1, max_ratio=0.02)),
)


@pytest.fixture(params=extent.part(ROWS, every=2), ids=lambda row: row.name)
def law(request: pytest.FixtureRequest) -> Row:
    chosen: Row = request.param
    return chosen


def make_params(dtype: torch.dtype = torch.float64) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {"embed": (33, 8), "kernel": (4, 2, 3, 3), "norm": (8,), "scale": ()}
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def make_grads(params: Tensors, num_updates: int) -> Iterator[Tensors]:
    """Gradients of very different sizes: every update its own power of ten."""
    generator = torch.Generator().manual_seed(2)
    for index in range(num_updates):
        size = 10.0 ** (index % 7 - 4)
        yield {
            name: torch.randn(param.shape, generator=generator, dtype=param.dtype) * size
            for name, param in params.items()
        }


def same_bits(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def same_walkers(left: Walker, right: Walker) -> bool:
    alike = [
        same_bits(left.state[slot], right.state[slot]) for slot in left.state.keys() | right.state.keys()
    ]
    return all(alike) and same_bits(left.params, right.params) and left.num_updates == right.num_updates


def test_fifty_updates_equal_the_reference(law: Row) -> None:
    walker = law.walker(make_params())
    grads = list(make_grads(walker.params, 50))
    scaled = [{name: grad * 0.25 for name, grad in grads_now.items()} for grads_now in grads]
    wanted = law.reference(law.spec, make_params(), scaled)
    for grads_now in grads:
        law.update(walker, grads_now, 0.25)
    for name, param in walker.params.items():
        # float64 rounds at 1e-16; fifty updates of order 1e-3 to 1, ordered differently, leave far less than 1e-12.
        torch.testing.assert_close(param, wanted[name], rtol=1e-12, atol=1e-12)
        assert not torch.equal(param, make_params()[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_inputs_give_equal_bits(law: Row, dtype: torch.dtype) -> None:
    first, second = (law.walker(make_params(dtype)) for _ in range(2))
    for walker in (first, second):
        for grads in make_grads(walker.params, 5):
            law.update(walker, grads, 0.3)
    assert same_walkers(first, second)


def test_a_copy_continues_equally_and_shares_nothing(law: Row) -> None:
    walker = law.walker(make_params())
    first, *others = make_grads(walker.params, 4)
    law.update(walker, first, 1.0)
    twin = walker.copy()
    for one in (walker, twin):
        for grads in others:
            law.update(one, grads, 1.0)
    assert same_walkers(walker, twin)
    assert walker.num_updates == 4


def test_any_cut_of_the_parameters_gives_the_same_result(law: Row) -> None:
    whole = law.walker(make_params())
    parts = [law.walker({name: param.clone()}) for name, param in whole.params.items()]
    for grads in make_grads(whole.params, 4):
        law.update(whole, grads, 0.7)
        for part in parts:
            law.update(part, {name: grads[name] for name in part.params}, 0.7)
    assert same_bits({name: param for part in parts for name, param in part.params.items()}, whole.params)


def test_zero_gradients_move_nothing_that_does_not_decay(law: Row) -> None:
    walker, before = law.walker(make_params()), make_params()
    law.update(walker, {name: torch.zeros_like(param) for name, param in before.items()}, 1.0)
    moved = {name for name, param in walker.params.items() if not torch.equal(param, before[name])}
    assert moved == (decayed_names(before) if law.spec.weight_decay else set())


def test_scaling_by_the_rule_is_scaling_the_gradients(law: Row) -> None:
    scaled, unscaled = (law.walker(make_params(torch.float32)) for _ in range(2))
    (grads,) = make_grads(scaled.params, 1)
    law.update(scaled, grads, 1 / 3)
    law.update(unscaled, {name: grad * (1 / 3) for name, grad in grads.items()}, 1.0)
    assert same_walkers(scaled, unscaled)


def big_update(law: Row) -> Walker:
    """Of a tensor of more than one piece, whose last row is not full."""
    generator = torch.Generator().manual_seed(3)
    walker = law.walker({"big": torch.randn(300_001, generator=generator)})
    for _ in range(2):
        law.update(walker, {"big": torch.randn(300_001, generator=generator)}, 0.1)
    return walker


def test_the_number_of_threads_changes_no_bit(law: Row) -> None:
    walkers = []
    num_threads = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            walkers.append(big_update(law))
    finally:
        torch.set_num_threads(num_threads)
    assert same_walkers(walkers[0], walkers[1])
    assert same_walkers(walkers[0], walkers[2])


def test_the_size_of_pieces_changes_no_bit(law: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    # It is another on a GPU, whose replicas must stay equal to those on CPUs.
    usual = big_update(law)
    monkeypatch.setattr(elementwise, "_CPU_PIECE", 2**14)
    assert same_walkers(big_update(law), usual)


def test_a_stage_without_parameters_just_counts(law: Row) -> None:
    walker = law.walker({})
    law.update(walker, {}, 1.0)
    assert walker.num_updates == 1


def test_state_has_the_form_of_its_slots(law: Row) -> None:
    params = make_params(torch.float32)
    optimizer = optimizer_of(law.spec)
    state = optimizer.init(params)
    assert state.keys() == optimizer.slots.keys()
    for tensors in state.values():
        assert tensors.keys() == params.keys()
        for name, tensor in tensors.items():
            assert (tensor.shape, tensor.dtype) == (params[name].shape, torch.float32)
            assert not tensor.any()


@pytest.mark.parametrize("fault", ["name", "shape", "dtype", "strides"])
def test_a_refused_update_has_changed_nothing(law: Row, fault: str) -> None:
    walker = law.walker(make_params())
    (grads,) = make_grads(walker.params, 1)
    before = copy.deepcopy(walker)
    embed = grads.pop("embed")
    wrong = {
        "name": {"other": embed},
        "shape": {"embed": embed[1:]},
        "dtype": {"embed": embed.float()},
        "strides": {"embed": embed.t().contiguous().t()},
    }
    with pytest.raises(ValueError, match="embed"):
        law.update(walker, grads | wrong[fault], 1.0)
    assert same_walkers(walker, before)


@pytest.mark.parametrize(
    "law", [row for row in ROWS if optimizer_of(row.spec).slots], ids=lambda row: row.name
)
def test_state_that_lacks_a_tensor_is_refused(law: Row) -> None:
    walker = law.walker(make_params())
    (grads,) = make_grads(walker.params, 1)
    slot = min(walker.state)
    del walker.state[slot]["norm"]
    before = copy.deepcopy(walker)
    with pytest.raises(ValueError, match=slot):
        law.update(walker, grads, 1.0)
    assert same_walkers(walker, before)
