"""What becomes a job: all that can be known to fail is refused before it is one."""

import pytest

from skein.config.job import JobSpec
from skein.config.load import parse_job
from skein.errors import UserError
from skein.plan.admission import check_admissible, settled

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


def job(*overrides: str) -> JobSpec:
    return parse_job(GOOD, origin="job", overrides=overrides)


@pytest.mark.parametrize("rule", [ONE_BIT, DILOCO])
def test_tied_embeddings_in_two_stages_are_refused_but_for_all_reduce(rule: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        check_admissible(job(*rule))
    assert str(caught.value) == (
        "parallel.stages: 2: the first and the last stage share model.embed_tokens.weight, and "
        f"{job(*rule).aggregation.rule} sums nothing between stages: set model.shape.tie_word_embeddings: false, "
        "or parallel: {stages: 1, layout: line}"
    )
    for cured in (job(), job(*rule, UNTIED), job(*rule, "parallel.stages=1")):
        check_admissible(cured)
        assert settled(cured) == cured


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
