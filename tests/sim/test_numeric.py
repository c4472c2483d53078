"""Real numbers under the same faults: losses, norms and parameters are those of the undisturbed run, to rounding."""

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
from numpy.typing import NDArray

from skein.numeric.arrays import arrays_of
from skein.protocol.messages.directives import StepRecord
from skein.protocol.worker.ops import BackwardOp, InputOp
from skein.sim.compute.aggregating import AggregatingModel
from skein.sim.compute.numeric import F64, NumericExecutor, NumericModel, NumericPassage
from skein.sim.scenario import LIMIT_S, curve_of, disturbed, run_to_end
from skein.sim.shapes import shape_of
from skein.sim.world import World
from tests.support.extent import part

SHAPES = (
    "line 2x2",
    "line 3x2",
    "loop 2x2",
    "loop 3x2 tied",
    "line 3x2 tied",
    "line 1x3",
    "line 4x1",
    "line 2x3 ring",
    "line 2x2 tied rows auto",
    "line 2x2 tied rows output",
    "line 2x2 chunks 2",
    "loop 2x2 tied chunks 2",
    "line 4x2 split",
    "line 2x2 chunks 2 split v",
    "line 2x2 chunks 2 tied rows both split",
    "line 3x2 chunks 2 rows output split v",
    "line 3x2 sparse",
    "loop 3x2 tied split sparse",
)
STEPS = 6
RTOL = 1e-9
"""Sums of some tens of float64 numbers of like size differ by their order in the last few of 52 bits."""


def run(text: str, *, seed: int, num_faults: int) -> tuple[tuple[StepRecord, ...], dict[str, F64]]:
    """The curve, and the parameters at its end."""
    shape = shape_of(text)
    model = AggregatingModel(shape.job(steps=STEPS))
    new_world = partial(World, new_executor=model.executor)
    world = disturbed(shape, seed=seed, num_faults=num_faults, steps=STEPS, new_world=new_world)
    try:
        run_to_end(world, limit_s=LIMIT_S)
    except Exception as error:
        raise AssertionError(f"{text} seed={seed}: {error!r}\n" + "\n".join(world.lines[-30:])) from error
    newest = {
        name: theta
        for worker, process in world.workers.items()
        for chunk in process.executor.chunks.values()
        if chunk.version == STEPS
        for name, theta in arrays_of(model.held(chunk.lineage, worker, chunk.stage).walker.params).items()
    }
    return curve_of(world.log), newest


@cache
def undisturbed(text: str) -> tuple[tuple[StepRecord, ...], dict[str, F64]]:
    return run(text, seed=0, num_faults=0)


@pytest.mark.parametrize("text", part(SHAPES, every=2))
def test_the_model_learns(text: str) -> None:
    curve, newest = undisturbed(text)
    model = NumericModel(shape_of(text).job(steps=STEPS))
    assert all(np.all(theta != model.drawn(name)) for name, theta in newest.items())
    assert all(record.loss > 0 and record.gradient_norm > 0 for record in curve)
    assert len({record.loss for record in curve}) == STEPS


@pytest.mark.parametrize("text", part(SHAPES, every=2))
def test_faults_change_neither_loss_nor_tokens_nor_norm(text: str) -> None:
    expected, parameters = undisturbed(text)
    for seed in part(range(6), every=6, start=SHAPES.index(text)):
        curve, newest = run(text, seed=seed, num_faults=6)
        for name, theta in newest.items():
            about = f"{text} seed={seed}: {name}"
            np.testing.assert_allclose(theta, parameters[name], rtol=RTOL, err_msg=about)
        assert [record.num_tokens for record in curve] == [record.num_tokens for record in expected], seed
        np.testing.assert_allclose(
            numbers(curve), numbers(expected), rtol=RTOL, err_msg=f"{text} seed={seed}"
        )


def test_a_gradient_that_meets_other_choices_of_experts_than_it_was_made_with_bends_the_curve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or the runs above would not show that whoever computes again is told of them."""
    text = "line 3x2 sparse"
    expected, _ = undisturbed(text)
    told = NumericExecutor._gradient

    def untold(executor: NumericExecutor, op: BackwardOp | InputOp) -> tuple[NumericPassage, F64]:
        own = executor._passages[op.microbatch, op.chunk.stage].own
        passage, dy_BD = told(executor, op)
        return replace(passage, own=own), dy_BD / passage.own * own

    monkeypatch.setattr(NumericExecutor, "_gradient", untold)
    curves = [run(text, seed=seed, num_faults=6)[0] for seed in (5, 7, 8)]
    assert not all(np.allclose(numbers(curve), numbers(expected), rtol=RTOL, atol=0) for curve in curves)


def numbers(curve: tuple[StepRecord, ...]) -> NDArray[np.float64]:
    return np.array([(record.loss, record.gradient_norm, record.clip) for record in curve])


def test_gradients_are_those_of_differences() -> None:
    model = NumericModel(shape_of("line 2x2").job(steps=1))
    for layer in (0, 1, model.num_layers - 1):
        draw = np.random.default_rng(layer)
        theta, x_BD, dy_BD = draw.normal(size=(3, 3)), draw.normal(size=(2, 3)), draw.normal(size=(2, 3))
        dx_BD, dtheta = model.backward(layer, theta, x_BD, dy_BD)
        small = 1e-6
        for at in np.ndindex(3, 3):
            step = np.zeros((3, 3))
            step[at] = small
            up = model.forward(layer, theta + step, x_BD)
            down = model.forward(layer, theta - step, x_BD)
            # Central differences in float64 are good to about the cube root of its precision, squared.
            np.testing.assert_allclose(np.sum((up - down) * dy_BD) / (2 * small), dtheta[at], atol=1e-8)
        for at in np.ndindex(2, 3):
            nudge = np.zeros((2, 3))
            nudge[at] = small
            up, down = model.forward(layer, theta, x_BD + nudge), model.forward(layer, theta, x_BD - nudge)
            np.testing.assert_allclose(np.sum((up - down) * dy_BD) / (2 * small), dx_BD[at], atol=1e-8)
