"""What 1-bit LAMB and 1-bit Adam send, by the tensors that they really encode; headers come with the wire itself.

A small language model's tensors, a million elements and some, through one exchange of four peers. The whole run is that
of 1-bit LAMB's paper: 1000 of 5993 steps of BERT's first phase are warm-up, which here as there sends two bytes for an
element.
"""

from collections.abc import Iterator

import torch

from bench.report import Row
from bench.studies.aggregation.counted import exchanged
from skein.config import aggregation
from skein.config.optimizer import AdamWSpec, LambSpec
from skein.numeric.aggregate.one_bit.adam import OneBitAdamRule
from skein.numeric.aggregate.one_bit.freezing import OneBit
from skein.numeric.aggregate.one_bit.lamb import OneBitLambRule
from skein.numeric.aggregate.rule import Terms
from skein.numeric.walker import Tensors, Walker
from skein.plan.agreeing.payload import payload_bytes

_NUM_PEERS = 4
_WARMUP_STEPS, _NUM_STEPS = 1000, 5993
_STEP_GOAL, _RUN_GOAL = 30.0, 4.5
_LAYER = {"attention": (4, 128, 128), "gate": (3, 344, 128), "norms": (2, 128)}
_NUM_LAYERS = 6


def rows(*, is_quick: bool) -> Iterator[Row]:
    """A step's bytes beside those of an fp32 all-reduce, and a run's beside those of one in two bytes."""
    for name, rule in _rules():
        params = _params(1 if is_quick else _NUM_LAYERS)
        num_elements = sum(param.numel() for param in params.values())
        shares = 2 * (_NUM_PEERS - 1) / _NUM_PEERS  # of the vector: to the owners, and back to all
        sent = _sent(rule, params)
        fp32, two_bytes = (
            shares * payload_bytes("fp32", num_elements),
            shares * payload_bytes("bf16", num_elements),
        )
        run = _WARMUP_STEPS * two_bytes + (_NUM_STEPS - _WARMUP_STEPS) * sent
        of = f"{num_elements / 1e6:.2f} M elements, {_NUM_PEERS} peers"
        yield _row(
            f"{name}, {of}: bytes a peer sends in a step", sent, fp32, "an fp32 all-reduce", _STEP_GOAL
        )
        yield _row(
            f"{name}, {of}: bytes a peer sends in {_NUM_STEPS} steps, {_WARMUP_STEPS} of them warm-up",
            run,
            _NUM_STEPS * two_bytes,
            "an all-reduce in two bytes",
            _RUN_GOAL,
        )


def _row(what: str, value: float, other: float, against: str, goal: float) -> Row:
    return Row(
        what=what,
        value=value,
        unit="bytes",
        against=f"{against} over this / this",
        ratio=other / value,
        goal=f"ratio >= {goal:g}",
        holds=other / value >= goal,
        spread=0.0,
    )


def _rules() -> tuple[tuple[str, OneBit], ...]:
    adam = aggregation.OneBitAdam(rule="one_bit_adam", warmup_steps=2)
    lamb = aggregation.OneBitLamb(rule="one_bit_lamb", warmup_steps=2)
    return (
        ("1-bit LAMB", OneBitLambRule(spec=lamb, optimizer=LambSpec(name="lamb"))),
        ("1-bit Adam", OneBitAdamRule(spec=adam, optimizer=AdamWSpec())),
    )


def _params(num_layers: int) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    shapes = {f"{n}.{name}": shape for n in range(num_layers) for name, shape in _LAYER.items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _sent(rule: OneBit, params: Tensors) -> float:
    """Bytes that a peer sends in the first exchange."""
    walkers = [Walker(params=params, state=rule.init(params)).copy() for _ in range(_NUM_PEERS)]
    (due,) = rule.spec.due(2)
    terms = Terms(step=2, learning_rate=1e-3, gradient_scale=1.0)
    return exchanged(rule, walkers, [params] * _NUM_PEERS, terms, due)
