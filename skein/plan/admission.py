"""Whether a job may become one: what no fleet could run, and aggregation that would diverge, are refused at submit.

Rules of this file
- Both functions are called wherever a job comes in, by the client for its user's sake, by the coordinator for its own.
- `settled` never fails and changes nothing in what it has settled; what it gives is what is stored and run.
"""

from skein.config.aggregation import AllReduce
from skein.config.explain import Words
from skein.config.job import JobSpec, LlamaModel
from skein.errors import UserError
from skein.model.layers import tied_names
from skein.plan.cut import check_job
from skein.types import Layout


def settled(job: JobSpec) -> JobSpec:
    """`job` with everything decided that its file leaves to us."""
    return job


def check_admissible(job: JobSpec) -> None:
    """Refuses a settled job that no fleet could run, or whose aggregation would not work.

    Raises:
        UserError: the first thing that is wrong, and what would be right.
    """
    check_job(job)
    _check_ties(job)


def _check_ties(job: JobSpec) -> None:
    """Two stages that share a matrix sum its gradient between them; only a rule that sums gradients can do that."""
    rule, parallel = job.aggregation.rule, job.parallel
    # LOOP's head is a stage of its own.
    is_cut = parallel.stages > 1 or parallel.layout is Layout.LOOP
    names = tied_names(job.model) if is_cut else frozenset()
    if isinstance(job.aggregation, AllReduce) or not names:
        return
    assert isinstance(job.model, LlamaModel), "nothing else ties anything"
    preset = job.model.preset
    field, value = (
        ("parallel.layout", Words("loop")) if parallel.stages == 1 else ("parallel.stages", parallel.stages)
    )
    untied = "set model.shape.tie_word_embeddings: false"
    if preset is not None:
        untied = f"give the sizes of {preset} as model.shape, with tie_word_embeddings: false"
    hint = f"the first and the last stage share {', '.join(sorted(names))}, and {rule} sums nothing between stages: "
    raise UserError(field, value, f"{hint}{untied}, or parallel: {{stages: 1, layout: line}}")
