"""docs/aggregation.md says what is: its table is computed, its job files parse, and its refusal is the real one."""

import re

import pytest
import yaml

from docs.generate_aggregation import NUM_PARAMETERS, PAGE, costs, main, page
from skein.config.load import job_from_document
from skein.errors import UserError
from skein.plan.admission import check_admissible, settled_job

TEXT = PAGE.read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```yaml\n(.*?)```", TEXT, re.S)
BASE = """
name: page
model: {family: digits_cnn}
data: {sources: [{format: digits}]}
batch: {samples: 64, microbatch_samples: 8}
parallel: {stages: 1, replicas: 8}
budget: {steps: 5000}
"""


def test_the_table_is_the_computed_one() -> None:
    assert page() == TEXT, "if this is meant: make docs"
    assert main(["--check"]) == 0


def test_the_table_has_every_rule() -> None:
    assert {job.aggregation.rule for _, job, _ in costs()} == {
        "all_reduce",
        "one_bit_adam",
        "one_bit_lamb",
        "lsgd",
        "gossip",
        "diloco",
    }
    [plain] = [cost for title, _, cost in costs() if title == "`all_reduce`"]
    assert plain.step_bytes == 2 * 7 / 8 * 4 * NUM_PARAMETERS


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_every_job_on_the_page_is_admitted(snippet: str) -> None:
    check_admissible(settled_job(job_from_document(yaml.safe_load(BASE) | yaml.safe_load(snippet))))


def test_the_page_has_a_job_for_every_rule() -> None:
    rules = {yaml.safe_load(snippet)["aggregation"]["rule"] for snippet in SNIPPETS}
    assert rules == {"all_reduce", "one_bit_lamb", "lsgd", "gossip", "diloco"}


def test_the_refusal_on_the_page_is_the_real_one() -> None:
    changes = "optimizer: {name: sgd}\naggregation: {rule: gossip, graph: static_exponential}"
    with pytest.raises(UserError) as caught:
        check_admissible(job_from_document(yaml.safe_load(BASE) | yaml.safe_load(changes)))
    assert str(caught.value) in " ".join(TEXT.split())


def test_the_readme_says_what_the_table_says() -> None:
    [cost] = [cost for title, _, cost in costs() if title == "`diloco`, 50 steps, int4"]
    readme = (PAGE.parent.parent / "README.md").read_text(encoding="utf-8")
    assert f"# {cost.ratio:.0f} times fewer bytes than summing gradients in float32" in readme


def test_links_of_the_page_lead_somewhere() -> None:
    targets = [target.partition("#") for target in re.findall(r"\]\(([^)]+)\)", TEXT)]
    assert len(targets) > 5
    for path, _, heading in targets:
        found = (PAGE.parent / path).resolve() if path else PAGE
        assert found.exists(), path
        if heading:
            titles = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.M)
            assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
