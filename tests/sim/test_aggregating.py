"""Every aggregation rule over whole simulated jobs, on real tensors: they end, and what is equal stays so."""

from functools import cache, partial
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from skein.config.job import BudgetSpec
from skein.protocol.log.records import CheckpointCommitted, RolledBack, StepCommitted
from skein.protocol.messages.directives import StepRecord
from skein.sim.compute.aggregating import AggregatingModel, HeldStage
from skein.sim.judging.invariants import Violated
from skein.sim.scenario import LIMIT_S, curve_of, disturbed, make_world, run_to_end, small_fleet
from skein.sim.shapes import SimShape, shape_of
from skein.sim.world import World
from skein.types import Exchanged, StageIndex, StageSpec
from tests.support.extent import part
from tests.support.worlds import kill_everything, of_kind, run_until, version_of, worker

STEPS = 8
ONE = ("bf16", "int8", "robust", "one_bit_adam", "one_bit_lamb")
MANY = ("diloco", "overlapped", "decentlam", "qg_dmsgd", "lsgd")
BASES = ("line 1x3", "loop 2x3", "line 2x4", "line 3x3 on 7")


def run(shape: SimShape, *, seed: int = 0, num_faults: int = 0) -> tuple[World, AggregatingModel]:
    """A world of a shape by a rule, at its end."""
    model = AggregatingModel(shape.job(steps=STEPS))
    new_world = partial(World, new_executor=model.executor)
    world = disturbed(shape, seed=seed, num_faults=num_faults, steps=STEPS, new_world=new_world)
    try:
        run_to_end(world, limit_s=LIMIT_S)
    except Exception as error:
        raise AssertionError(
            f"{shape.text} seed={seed}: {error!r}\n" + "\n".join(world.lines[-30:])
        ) from error
    return world, model


@cache
def curve(text: str) -> tuple[StepRecord, ...]:
    return curve_of(run(shape_of(text))[0].log)


def losses(records: tuple[StepRecord, ...]) -> NDArray[np.float64]:
    return np.array([record.loss for record in records])


@pytest.mark.parametrize(("base", "rule"), part(list(product(BASES, (*ONE, *MANY))), every=7))
def test_a_job_runs_to_its_end_and_every_exchange_keeps_what_it_must(base: str, rule: str) -> None:
    world, model = run(shape_of(f"{base} by {rule}"))
    committed = [record.record for record in of_kind(world.log, StepCommitted)]
    assert [record.step for record in committed] == list(range(STEPS))
    named = {
        (x.group, x.attempt) for record in committed for x in record.results if isinstance(x.group, Exchanged)
    }
    assert named
    assert model.checked == named


@pytest.mark.parametrize("rule", ["diloco", "overlapped"])
def test_walkers_meet_in_the_last_step_of_their_epochs(rule: str) -> None:
    shape = shape_of(f"line 2x2 by {rule}")
    job = shape.job(steps=STEPS)
    budget = BudgetSpec(epochs=(STEPS - 1) * job.batch.samples / 10**6)
    model = AggregatingModel(job.model_copy(update={"budget": budget}))
    world = make_world(
        model.job, small_fleet(shape), seed=0, new_world=partial(World, new_executor=model.executor)
    )
    run_to_end(world, limit_s=LIMIT_S)
    committed = [record.record for record in of_kind(world.log, StepCommitted)]
    assert [record.step for record in committed] == list(range(STEPS - 1))
    assert any(isinstance(result.group, Exchanged) for result in committed[-1].results)


PAIRS = ("line 1x2", "line 2x2", "loop 2x2")
FOR_TWO = ("diloco", "decentlam", "qg_dmsgd", "lsgd", "int8", "one_bit_lamb")


@pytest.mark.parametrize(
    ("rule", "base"),
    [(rule, base) for i, rule in enumerate(part(FOR_TWO, every=2)) for base in part(PAIRS, every=3, start=i)],
)
def test_two_are_enough(rule: str, base: str) -> None:
    run(shape_of(f"{base} by {rule}"))


@pytest.mark.parametrize("rule", part(["int8", "bf16", "one_bit_adam"], every=2))
def test_a_single_holder_talks_to_nobody(rule: str) -> None:
    for base in ("line 1x1", "line 3x1"):
        run(shape_of(f"{base} by {rule}"))


@pytest.mark.parametrize("base", part(["line 2x2", "line 3x3 on 7", "line 2x4"], every=3))
def test_rounding_hardly_changes_the_curve_and_the_gradient_is_that_of_the_batch(base: str) -> None:
    exact, rounded = (curve(f"{base} by {rule}") for rule in ("fp32", "int8"))
    # int8 blocks keep 7 bits of the largest element, and error feedback the rest: a percent of it is ample.
    np.testing.assert_allclose(losses(rounded), losses(exact), rtol=0.01)
    norms = [np.array([record.gradient_norm for record in records]) for records in (rounded, exact)]
    np.testing.assert_allclose(norms[0], norms[1], rtol=0.02)


@pytest.mark.parametrize(
    ("seed", "base", "rule"),
    [
        *part([(0, "line 2x3", rule) for rule in (*ONE, *MANY)], every=4),
        *part([(1, "line 3x4 on 9", rule) for rule in (*ONE, *MANY)], every=10, start=1),
    ],
)
def test_faults_end_no_job_and_mix_no_walkers(seed: int, base: str, rule: str) -> None:
    run(shape_of(f"{base} by {rule}"), seed=seed, num_faults=10)


@pytest.mark.parametrize(
    ("text", "seed"),
    [
        # A result of the step before arrives again; walkers move onto workers that others copy at the same time.
        ("line 1x4 on 5 by diloco", 102),
        ("line 2x3 on 7 by decentlam", 279),
    ],
)
def test_faults_that_have_mixed_steps_or_walkers_do_not_any_more(text: str, seed: int) -> None:
    run(shape_of(text), seed=seed, num_faults=8)


@pytest.mark.parametrize("rule", part(["diloco", "decentlam", "one_bit_lamb"], every=2))
def test_a_power_cut_goes_back_to_the_checkpoint_each_walker_to_its_own(rule: str) -> None:
    shape = shape_of(f"line 2x3 by {rule}")
    model = AggregatingModel(shape.job(steps=STEPS))
    world = make_world(
        shape.job(steps=STEPS),
        small_fleet(shape),
        seed=0,
        new_world=partial(World, new_executor=model.executor),
    )
    run_until(world, lambda world: bool(of_kind(world.log, CheckpointCommitted)) and version_of(world) >= 4)
    kill_everything(world)
    run_to_end(world, limit_s=LIMIT_S)
    [back] = of_kind(world.log, RolledBack)
    assert back.to_version == 3
    assert [record.step for record in curve_of(world.log)] == list(range(STEPS))


def test_who_trims_waits_for_enough_members_to_choose_from() -> None:
    shape = shape_of("line 2x3 by trimmed")
    model = AggregatingModel(shape.job(steps=STEPS))
    world = make_world(
        shape.job(steps=STEPS),
        small_fleet(shape),
        seed=0,
        new_world=partial(World, new_executor=model.executor),
    )
    run_until(world, lambda world: version_of(world) == 3)
    victim = world.workers[worker(1)].machine.identity
    world.kill_worker(worker(1))
    run_until(world, lambda world: any("paused" in line for line in world.lines))
    assert "paused: trimmed_mean needs 3 holders of each stage: stage 1 has 2" in world.lines[-1]
    world.add_worker(
        victim.worker,
        victim.site,
        flops_per_s=victim.profile.flops_per_s,
        memory_bytes=victim.profile.memory_bytes,
    )
    run_to_end(world, limit_s=LIMIT_S)
    assert not of_kind(world.log, RolledBack)
    assert [record.step for record in curve_of(world.log)] == list(range(STEPS))


# --- what the checks find ---


STAGE = StageSpec(index=StageIndex(0), first=0, stop=2)


def model_of(rule: str) -> AggregatingModel:
    return AggregatingModel(shape_of(f"line 2x3 by {rule}").job(steps=STEPS))


def nudged(held: HeldStage, slot: str) -> HeldStage:
    """With one element moved by a rounding, in the parameters or in a slot."""
    copy = held.copy()
    tensors = copy.walker.params if slot == "params" else copy.walker.state[slot]
    tensors[min(tensors)].view(-1)[0] += 1e-12
    return copy


@pytest.mark.parametrize(
    ("rule", "slot"), [("int8", "params"), ("one_bit_lamb", "exp_avg"), ("diloco", "global_params")]
)
def test_replicas_that_drift_apart_are_found(rule: str, slot: str) -> None:
    model = model_of(rule)
    held = model.fresh(STAGE)
    model.hold("one", worker(0), STAGE, held)
    model.hold("one", worker(1), STAGE, held.copy())
    with pytest.raises(Violated, match="differ in"):
        model.hold("one", worker(2), STAGE, nudged(held, slot))


@pytest.mark.parametrize(
    ("rule", "slot"), [("int8", "residual"), ("diloco", "params"), ("decentlam", "params")]
)
def test_what_is_a_walkers_own_may_differ(rule: str, slot: str) -> None:
    model = model_of(rule)
    held = model.fresh(STAGE)
    model.hold("one", worker(0), STAGE, held)
    model.hold("one", worker(1), STAGE, nudged(held, slot))


def test_a_walker_of_two_trajectories_is_found() -> None:
    model = model_of("decentlam")
    first, second = (model.moved("one", walker, "initial") for walker in (0, 1))
    assert model.moved("two", 0, first) == model.moved("two", 0, first)
    with pytest.raises(Violated, match="walker 0 is of"):
        model.moved("two", 0, second)
