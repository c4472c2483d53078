"""Quotas of namespaces: what is read, and that each refusal names field, value and what would be right."""

import pytest

from skein.config.load import JobFileErrors
from skein.config.quota import UNBOUNDED, QuotaSpec, parse_quotas

GOOD = """
default: {workers: 4, running_jobs: 2, queued_jobs: 20, job_bytes: 64 KiB, stored_bytes: 50 GiB}
namespaces:
  lab: {workers: null, stored_bytes: 1 TiB}
"""


def test_sizes_have_units_and_what_is_said_by_name_goes_before() -> None:
    quotas = parse_quotas(GOOD)
    assert quotas.of("mill") == QuotaSpec(
        workers=4, running_jobs=2, queued_jobs=20, job_bytes=64 << 10, stored_bytes=50 << 30
    )
    assert quotas.of("lab") == quotas.default.model_copy(update={"workers": None, "stored_bytes": 1 << 40})


def test_nothing_is_bounded_unless_somebody_says_so() -> None:
    assert UNBOUNDED.of("lab") == QuotaSpec()
    assert set(QuotaSpec().model_dump().values()) == {None}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("default: {workers: 0}", r"default\.workers: 0: give a whole number from 1 to 1000000, or null"),
        ("default: {wrokers: 1}", r"default\.wrokers: 1: .*workers"),
        ("default: {stored_bytes: much}", r"default\.stored_bytes: 'much': give a size such as '50 GiB'"),
        ("namespaces: {lab: 3}", r"namespaces\.lab: 3: give a mapping"),
        ("lab: {workers: 1}", r"lab: .*default, namespaces"),
        ("default: {workers: '4'}", r"default\.workers: '4': give a whole number"),
        ("default: [", "line 1"),
    ],
)
def test_what_is_wrong_is_named(text: str, said: str) -> None:
    with pytest.raises(JobFileErrors, match=said):
        parse_quotas(text)
