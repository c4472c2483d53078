"""Gauges of sweeps, by a simulated world one of whose rows diverges."""

from prometheus_client import CollectorRegistry

from coordinator.telling.queued import SweepGauges
from skein.config.sweep.spec import SweepSpec, ValuesSpec
from skein.protocol.log.records import StepCommitted
from skein.sim.scenario import make_world, with_arrays
from skein.sim.world import World
from tests.support.jobs import small_job
from tests.support.worlds import fleet_of, of_kind, run_until


def test_trials_are_counted_by_what_became_of_them_while_arrays_work() -> None:
    alone = small_job(stages=1, replicas=1, microbatches=2, steps=40)
    # The simulator has rows of seed 2 diverge in their third round.
    space = {"seed": ValuesSpec(values=(0, 1, 2, 3))}
    spec = alone.model_copy(update={"sweep": SweepSpec(space=space, round_steps=8)})
    world = make_world(spec, fleet_of(1), seed=0, new_world=with_arrays(World))
    run_until(world, lambda world: len(of_kind(world.log, StepCommitted)) > 2)
    registry = CollectorRegistry()
    assert world.coordinator is not None
    SweepGauges(registry).sample(world.coordinator.view)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("skein_sweep_trials", job="small-1", state="training") == 3
    assert value("skein_sweep_trials", job="small-1", state="retired") == 1
