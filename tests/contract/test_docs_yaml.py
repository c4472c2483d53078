"""Every YAML block of README and docs is what its page says: a job, a part of README's job, a fleet file, or quotas."""

import re
from pathlib import Path

import pytest
import yaml

from client.jobfile import prepare_job, read_job_text
from client.planning.files.fleetfile import parse_fleet_file
from skein.config.job import JobSpec
from skein.config.load import job_from_document
from skein.config.quota import parse_quotas
from tests.contract.source import ROOT

PAGES = sorted(path for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
BLOCKS = [
    pytest.param(text, id=f"{page.relative_to(ROOT)}:{number}")
    for page in PAGES
    if page.name != "aggregation.md"  # its own test holds its parts to the job that it is about
    for number, text in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.S))
]
README_JOB, *README_PARTS = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


@pytest.mark.parametrize("text", BLOCKS)
def test_a_block_is_taken_as_it_stands(text: str, tmp_path: Path) -> None:
    document = yaml.safe_load(text)
    if "namespaces" in document:
        parse_quotas(text)
    elif "fleet" in document:
        parse_fleet_file(text, origin="block")
    elif "name" in document:
        read_job_text(text, origin="block", base=tmp_path)
    else:
        assert document.keys() <= JobSpec.model_fields.keys()
        merged = yaml.safe_load(README_JOB) | document
        prepare_job(job_from_document(merged), base=tmp_path)


def test_readme_has_a_job_and_what_replicas_far_apart_put_in_its_place() -> None:
    assert yaml.safe_load(README_JOB)["name"] == "my-first-job"
    [part] = README_PARTS
    merged = yaml.safe_load(README_JOB) | yaml.safe_load(part)
    assert prepare_job(job_from_document(merged), base=ROOT).aggregation.rule == "diloco"
