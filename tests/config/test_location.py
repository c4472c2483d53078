"""What a URL in a job file may name, and what is refused with what would be right."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skein.config.location import SCHEMES, Location, parse_location
from skein.errors import UserError

FIELD = "checkpoint.url"


@pytest.mark.parametrize(
    ("url", "scheme", "path"),
    [
        ("/srv/jobs/", "file", "/srv/jobs"),
        ("file:///srv/jobs", "file", "/srv/jobs"),
        ("/srv/50%{a}", "file", "/srv/50%{a}"),
        ("s3://models", "s3", "models"),
        ("gs://models/a/b/", "gs", "models/a/b"),
        ("abfs://models/a", "abfs", "models/a"),
    ],
)
def test_a_place_of_a_known_kind_is_taken(url: str, scheme: str, path: str) -> None:
    assert parse_location(url, field=FIELD) == Location(scheme=scheme, path=path)


@pytest.mark.parametrize(
    ("url", "cure"),
    [
        ("s3//bucket/a", "write s3://bucket/a"),
        ("s3:bucket", "write s3://bucket"),
        ("gs:/bucket", "write gs://bucket"),
        ("file:/srv/a", "write file:///srv/a"),
        ("file://srv/a", "write file:///srv/a"),
        ("gcs://bucket/a", "write gs://bucket/a"),
        ("s3a://bucket", "write s3://bucket"),
        ("abfs://box@account.example/a", "environment"),
        ("s3://key:secret@bucket", "environment"),
        ("s3://bucket/a?endpoint=x", "a place alone"),
        ("s3://bucket/{{a}}", "a place alone"),
        ("s3://bucket/../other", "leave it out"),
        ("s3://b", "3 to 63"),
        ("/srv/../etc", "write /etc"),
        ("srv/jobs", "begin it with /"),
        ("http://host/a", "give an absolute path, or file://"),
        ("memory://jobs", "memory:// is not taken"),
        ("reference:///srv/a.json", "reference:// is not taken"),
        ("reference::file:///srv/a.json", "the inner one alone"),
        ("simplecache::s3://bucket", "the inner one alone"),
        ("dir::/srv", "the inner one alone"),
        ("data:,text", "begin it with /"),
        ("", "1 to 1024"),
        ("/srv/\x07", "not shown"),
    ],
)
def test_anything_else_is_refused_with_what_would_be_right(url: str, cure: str) -> None:
    with pytest.raises(UserError) as failure:
        parse_location(url, field=FIELD)
    assert failure.value.field == FIELD
    assert cure in failure.value.hint


@given(st.text(st.sampled_from("s3gabf:/.?@{}%é \n"), max_size=24) | st.text(max_size=40))
def test_whatever_is_taken_is_a_plain_place_that_reads_as_itself(url: str) -> None:
    try:
        found = parse_location(url, field=FIELD)
    except UserError:
        return
    assert found.scheme in SCHEMES
    assert "::" not in found.path
    assert ".." not in found.path.split("/")
    assert found.path.startswith("/") == (found.scheme == "file")
    assert parse_location(str(found), field=FIELD) == found
