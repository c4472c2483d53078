"""The public surface of a job file: a field more or less is a decision, shown in the diff of `job_fields.txt`."""

from skein.config.job import JobSpec
from tests.contract.job_fields import LISTED, listing


def test_fields_of_a_job_are_the_listed_ones() -> None:
    assert listing() == LISTED.read_text(), "if this is meant: python -m tests.contract.job_fields"


def test_every_part_of_a_job_says_what_it_is() -> None:
    schema = JobSpec.model_json_schema()
    parts = {name: part for name, part in schema["$defs"].items() if name != "JsonValue"}  # pydantic's own
    assert [name for name, part in parts.items() if not part.get("description")] == []
