"""Whether a job may become one: what no fleet could run, and aggregation that would diverge, are refused at submit.

Rules of this file
- Both functions are called wherever a job comes in, by the client for its user's sake, by the coordinator for its own.
- `settled_job` never fails and changes nothing in what it has settled; what it gives is what is stored and run.
- Judging stability takes from a millisecond to some seconds: nobody does it on an event loop.
"""

from typing import assert_never

from skein.config.explain import Words
from skein.config.job import JobSpec
from skein.config.optimizer import AdadeltaSpec, AdamSpec, AdamWSpec, LambSpec, OptimizerSpec, SgdSpec
from skein.config.rule import Neighbourhood
from skein.errors import UserError
from skein.model.decoder import DecoderModel
from skein.model.layers import tied_names
from skein.plan.cut import check_job
from skein.plan.paths import widest_jump
from skein.plan.sweeping.checking import check_sweep
from skein.topology.stability import Stable, Verdict, verdict

_MOST_JUDGED = 64
"""A graph of more walkers is judged as one of so many: more of the same are as stable, and drawn ones take minutes."""


def settled_job(job: JobSpec) -> JobSpec:
    """`job` with everything decided that its file leaves to us: an unstable gossip method, where it says so."""
    mixed = job.aggregation.neighbourhood
    if mixed is None or mixed.fallback is None or isinstance(_judged(job, mixed), Stable):
        return job
    changed = job.aggregation.model_copy(update={"method": mixed.fallback})
    return job.model_copy(update={"aggregation": changed})


def check_admissible(job: JobSpec) -> None:
    """Refuses a settled job that no fleet could run, or whose aggregation would not work.

    Raises:
        UserError: the first thing that is wrong, and what would be right.
    """
    check_job(job)
    _check_jump(job)
    _check_most_workers(job)
    _check_warmup(job)
    _check_ties(job)
    if job.aggregation.neighbourhood is not None:
        _check_stability(job, job.aggregation.neighbourhood)
    check_sweep(job, check_admissible)


def momentum_of(optimizer: OptimizerSpec) -> float:
    """Share of the last step's direction that goes into the next: gossip's momentum is the optimizer's.

    >>> momentum_of(AdamWSpec())
    0.9
    """
    match optimizer:
        case SgdSpec():
            return optimizer.momentum
        case AdamWSpec() | AdamSpec() | LambSpec():
            return optimizer.betas[0]
        case AdadeltaSpec():
            return 0.0
        case _:
            assert_never(optimizer)


def _check_warmup(job: JobSpec) -> None:
    """The default is cut short by a shorter job; who asks for a warm-up wants all of it."""
    steps, default = job.optimizer.warmup_steps, type(job.optimizer).model_fields["warmup_steps"].default
    if steps > job.total_steps and steps != default:
        hint = f"the job has {job.total_steps} steps: give at most {job.total_steps}, or a larger budget"
        raise UserError("optimizer.warmup_steps", steps, hint)


def _check_jump(job: JobSpec) -> None:
    """Stages are left out in rotation, whoever makes the plan."""
    most, stages = job.skip.max_jump, job.parallel.num_stages
    least = widest_jump(stages, job.num_visited_stages, job.parallel.layout)
    if most is not None and most < least:
        hint = f"leaving stages out in rotation jumps {least} at once: give at least {least}, or null"
        raise UserError("skip.max_jump", most, hint)


def _check_most_workers(job: JobSpec) -> None:
    """A worker may hold every stage, but one holder of each only: robust combiners want several to choose from."""
    robust, most = job.aggregation.combiner, job.resources.max_workers
    least = job.parallel.num_stages * robust.least_members
    if robust.least_members > 1 and most is not None and most < least:
        hint = f"{robust.kind} needs {robust.least_members} holders of each stage: give at least {least}, or null"
        raise UserError("resources.max_workers", most, hint)


def _check_stability(job: JobSpec, rule: Neighbourhood) -> None:
    judged = _judged(job, rule)
    if isinstance(judged, Stable):
        return
    is_graph = judged.method == rule.method
    field, value, cure = (
        ("graph", rule.graph, judged.graph) if is_graph else ("method", rule.method, judged.method)
    )
    every = f" every {rule.every_steps} steps" if rule.every_steps > 1 else ""
    left = (
        ", which losses may leave," if judged.num_members < min(job.parallel.replicas, _MOST_JUDGED) else ""
    )
    why = "and from 1 on walkers part" if judged.radius >= 1 else "too near to 1 where rounds are drawn"
    hint = (
        f"{rule.method} with momentum {momentum_of(job.optimizer):g} on graph {rule.graph} of {judged.num_members} "
        f"walkers{left}{every} has stability radius {judged.radius:.3f}, {why}: give {cure}"
    )
    if rule.fallback is None and rule.method != "qg_dmsgd":
        hint += ", or if_unstable: qg_dmsgd"
    raise UserError(f"aggregation.{field}", value, hint)


def _judged(job: JobSpec, rule: Neighbourhood) -> Verdict:
    num_walkers = min(job.parallel.replicas, _MOST_JUDGED)
    momentum = momentum_of(job.optimizer)
    return verdict(rule.method, momentum, rule.graph, num_walkers, every_steps=rule.every_steps)


def _check_ties(job: JobSpec) -> None:
    """Two stages that share a matrix sum its gradient between them, which takes plain sums and no exchange."""
    rule, parallel = job.aggregation.rule, job.parallel
    names = tied_names(job.model) if parallel.is_cut else frozenset()
    if not names or job.aggregation.is_additive:
        return
    assert isinstance(job.model, DecoderModel), "nothing else ties anything"
    preset = job.model.preset
    is_loop = parallel.num_stages == 1
    field, value = ("layout", Words("loop")) if is_loop else ("stages", parallel.num_stages)
    untied = "set model.shape.tie_word_embeddings: false"
    if preset is not None:
        untied = f"give the sizes of {preset} as model.shape, with tie_word_embeddings: false"
    shared = f"the first and the last stage share {', '.join(sorted(names))}"
    cures = f"{untied}, or parallel: {{stages: 1, layout: line}}"
    is_summing = job.aggregation.exchanges_gradients
    which = f"{rule} with wire: fp32 and without robust alone" if is_summing else f"{rule} never"
    hint = f"{shared}, and {which} sums between stages: {cures}"
    raise UserError(f"parallel.{field}", value, hint)
