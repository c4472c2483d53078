"""What becomes a job: all that can be known to fail is refused before it is one."""

from pathlib import Path

import pytest

from client.planning.estimates import estimate_of_job
from skein.config.aggregation import Gossip
from skein.config.job import JobSpec
from skein.config.load import parse_job
from skein.errors import UserError
from skein.model.layers import tied_names
from skein.plan.admission import check_admissible, settled_job
from skein.plan.balanced import make_balanced_plan
from skein.plan.plan import Infeasible, Plan
from tests.contract.source import ROOT
from tests.plan.builders import fleet

GOOD = """
name: admitted
model: {family: llama, shape: {num_hidden_layers: 4}}
data: {sources: [{format: text, path: /books}]}
batch: {samples: 32, microbatch_samples: 4}
parallel: {stages: 2, replicas: 4}
budget: {steps: 400}
"""
UNTIED = "model.shape.tie_word_embeddings=false"
ONE_BIT = ("aggregation={rule: one_bit_lamb, warmup_steps: 60}", "optimizer.name=lamb")
DILOCO = ("aggregation.rule=diloco",)


def refusal(asked: JobSpec) -> str:
    """The refusal of a job; empty if it is admitted."""
    try:
        check_admissible(asked)
    except UserError as error:
        return str(error)
    return ""


def job(*overrides: str) -> JobSpec:
    return parse_job(GOOD, origin="job", overrides=overrides)


@pytest.mark.parametrize("rule", [ONE_BIT, DILOCO])
def test_tied_embeddings_in_two_stages_are_refused_but_for_all_reduce(rule: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        check_admissible(job(*rule))
    assert str(caught.value) == (
        "parallel.stages: 2: the first and the last stage share model.embed_tokens.weight, and "
        f"{job(*rule).aggregation.rule} never sums between stages: set model.shape.tie_word_embeddings: false, "
        "or parallel: {stages: 1, layout: line}"
    )
    for cured in (job(), job(*rule, UNTIED), job(*rule, "parallel.stages=1")):
        check_admissible(cured)
        assert settled_job(cured) == cured


@pytest.mark.parametrize("change", ["wire=int8", "wire=bf16", "robust.kind=median_norm_clip"])
def test_ties_want_a_plain_sum_of_all_reduce_too(change: str) -> None:
    with pytest.raises(
        UserError, match="and all_reduce with wire: fp32 and without robust alone sums between"
    ):
        check_admissible(job(f"aggregation.{change}"))
    check_admissible(job(f"aggregation.{change}", UNTIED))


def test_a_head_of_its_own_shares_with_the_only_stage() -> None:
    with pytest.raises(UserError, match=r"^parallel.layout: loop: the first and the last stage share"):
        check_admissible(job(*DILOCO, "parallel={stages: 1, replicas: 4, layout: loop}"))
    cured = job(*DILOCO, "parallel={stages: 1, replicas: 4, layout: loop}", UNTIED)
    check_admissible(cured)


def test_who_named_a_preset_is_told_how_to_untie_it() -> None:
    with pytest.raises(
        UserError, match=r"give the sizes of llama-1m as model.shape, with tie_word_embeddings: false"
    ):
        check_admissible(job(*DILOCO, "model={family: llama, preset: llama-1m}"))


def test_what_no_fleet_could_run_is_refused_first() -> None:
    with pytest.raises(UserError, match=r"^parallel.stages: 9: the model has 6 layers to cut"):
        check_admissible(job(*DILOCO, "parallel.stages=9"))


@pytest.mark.parametrize("kind", ["trimmed_mean", "krum, bad: 0"])
@pytest.mark.parametrize("layout", ["line", "loop"])
@pytest.mark.parametrize("most", range(1, 9))
def test_a_job_whose_most_workers_are_too_few_for_its_combiner_is_refused_and_no_other(
    most: int, layout: str, kind: str
) -> None:
    parallel = f"parallel={{stages: 2, replicas: 4, layout: {layout}}}"
    asked = job(UNTIED, parallel, f"aggregation.robust={{kind: {kind}}}", f"resources.max_workers={most}")
    placed = make_balanced_plan(asked, fleet([1e9] * most), None, 0)
    wanted = f"resources.max_workers: {most}: {kind[:4]}" if isinstance(placed, Infeasible) else ""
    told = refusal(asked)
    assert told.startswith(wanted)
    assert told.endswith(" needs 3 holders of each stage: give at least 6, or null") == bool(wanted)
    assert bool(told) == bool(wanted)


def test_a_job_whose_jumps_are_too_short_for_its_rotation_is_refused_and_no_other() -> None:
    short, cured = (
        job(UNTIED, "parallel.stages=5", f"skip={{ratio: 0.4, max_jump: {most}}}") for most in (2, 3)
    )
    with pytest.raises(UserError) as caught:
        check_admissible(short)
    assert str(caught.value) == (
        "skip.max_jump: 2: leaving stages out in rotation jumps 3 at once: give at least 3, or null"
    )
    assert isinstance(make_balanced_plan(short, fleet([1e9] * 20), None, 0), Infeasible)
    check_admissible(cured)
    assert isinstance(make_balanced_plan(cured, fleet([1e9]), None, 0), Plan)


# --- stability ---

GOSSIP = ("aggregation.rule=gossip", UNTIED, "optimizer={name: sgd}")
EIGHT = ("parallel.replicas=8",)


def gossiping(*overrides: str) -> JobSpec:
    return job(*GOSSIP, *overrides)


def test_an_unstable_graph_is_refused_with_its_radius_and_the_nearest_that_is_stable() -> None:
    with pytest.raises(UserError) as caught:
        check_admissible(gossiping(*EIGHT, "aggregation.graph=static_exponential"))
    assert str(caught.value) == (
        "aggregation.graph: 'static_exponential': decentlam with momentum 0.9 on graph static_exponential of 8 walkers "
        "has stability radius 1.237, and from 1 on walkers part: give symmetric_exponential, or if_unstable: qg_dmsgd"
    )
    check_admissible(gossiping(*EIGHT, "aggregation.graph=symmetric_exponential"))


def test_an_unstable_method_is_refused_with_one_that_is_stable_there() -> None:
    with pytest.raises(UserError) as caught:
        check_admissible(gossiping(*EIGHT, "aggregation.graph=one_peer_exponential"))
    assert (caught.value.field, caught.value.value) == ("aggregation.method", "decentlam")
    assert caught.value.hint.endswith(
        "has stability radius 1.114, and from 1 on walkers part: give qg_dmsgd, or if_unstable: qg_dmsgd"
    )


@pytest.mark.parametrize(
    ("momentum", "graph", "is_stable"),
    [
        (momentum, graph, is_stable)
        # The rows of n = 8 in the table of stability radii: 1 or more is refused.
        for graph, row in {
            "ring": (True, True, True),
            "static_exponential": (True, False, False),
            "one_peer_exponential": (True, False, False),
        }.items()
        for momentum, is_stable in zip((0.5, 0.8, 0.9), row, strict=True)
    ],
)
def test_what_decentlam_may_do_depends_on_momentum_and_graph(
    momentum: float, graph: str, is_stable: bool
) -> None:
    asked = gossiping(*EIGHT, f"aggregation.graph={graph}", f"optimizer.momentum={momentum}")
    if is_stable:
        check_admissible(asked)
    else:
        with pytest.raises(UserError, match="stability radius"):
            check_admissible(asked)


def test_a_job_that_says_so_takes_qg_dmsgd_instead_and_stays_so() -> None:
    asked = gossiping(*EIGHT, "aggregation.graph=one_peer_exponential", "aggregation.if_unstable=qg_dmsgd")
    found = settled_job(asked)
    assert isinstance(found.aggregation, Gossip)
    assert found.aggregation.method == "qg_dmsgd"
    assert found.aggregation.graph == "one_peer_exponential"
    check_admissible(found)
    assert settled_job(found) == found


def test_a_stable_job_keeps_its_method_whatever_it_says_of_unstable_ones() -> None:
    asked = gossiping("aggregation.if_unstable=qg_dmsgd", "aggregation.graph=ring")
    assert settled_job(asked) == asked


def test_the_first_beta_is_adams_momentum() -> None:
    adam = ("aggregation.rule=gossip", UNTIED, *EIGHT, "aggregation.graph=static_exponential")
    with pytest.raises(UserError, match=r"with momentum 0\.9 "):
        check_admissible(job(*adam))
    check_admissible(job(*adam, "optimizer.betas=[0.5, 0.95]"))


def test_what_is_stable_until_somebody_is_lost_is_refused_with_how_many_are_left() -> None:
    with pytest.raises(UserError) as caught:
        check_admissible(gossiping("aggregation.graph=random_matching", "optimizer.momentum=0.8"))
    assert str(caught.value) == (
        "aggregation.method: 'decentlam': decentlam with momentum 0.8 on graph random_matching of 3 walkers, which "
        "losses may leave, has stability radius 0.998, too near to 1 where rounds are drawn: give qg_dmsgd, "
        "or if_unstable: qg_dmsgd"
    )


def test_periods_count_and_are_told() -> None:
    # DecentLaM's correction is applied again and again until the next exchange renews it.
    with pytest.raises(UserError, match=r"walkers every 8 steps has stability radius"):
        check_admissible(gossiping("aggregation.graph=ring", "aggregation.every_steps=8"))


# --- examples ---

EXAMPLES = sorted((ROOT / "deploy/config/examples").glob("*.yaml"))


# Sizes of what begins from a Hugging Face directory are known where that is.
KNOWN = [path for path in EXAMPLES if "init_from" not in path.read_text()]


@pytest.mark.parametrize("path", KNOWN, ids=lambda path: path.stem)
def test_examples_are_admitted(path: Path) -> None:
    found = settled_job(parse_job(path.read_text(), origin=path.name))
    check_admissible(found)
    is_alone = found.parallel.replicas == 1 and not (found.parallel.stages > 1 and tied_names(found.model))
    assert (estimate_of_job(found).step_bytes == 0) == is_alone


def test_every_rule_has_an_example() -> None:
    named = {parse_job(path.read_text(), origin=path.name).aggregation.rule for path in EXAMPLES}
    assert named == {"all_reduce", "one_bit_adam", "one_bit_lamb", "lsgd", "gossip", "diloco"}
