"""A URL in a job never reaches more than the file system that it names."""

import sys
from collections.abc import Iterator
from dataclasses import replace

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from skein.errors import UserError
from skein.storage.places import ANYWHERE

OPENED: list[str] = []


class Watched(MemoryFileSystem):  # type: ignore[misc]  # no stubs
    """Notes that it was made."""

    protocol = "watched"
    cachable = False

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        OPENED.append("made")


@pytest.fixture(autouse=True)
def watched() -> Iterator[None]:
    fsspec.register_implementation("watched", Watched, clobber=True)
    yield
    OPENED.clear()
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize(
    "url",
    [
        "watched://bucket",
        "simplecache::watched://bucket",
        "dir::watched://bucket",
        "reference::watched://bucket/templates.json",
        'reference://?fo={"templates": {"a": "{{ cycler.__init__.__globals__.os.getcwd() }}"}}',
        "s3://bucket::watched://bucket",
    ],
)
def test_a_url_that_is_refused_opens_nothing(url: str) -> None:
    for use in (ANYWHERE.admit, ANYWHERE.open):
        with pytest.raises(UserError, match=r"checkpoint\.url"):
            use(url)
    assert OPENED == []


def test_a_url_is_admitted_without_opening_it() -> None:
    places = replace(ANYWHERE, schemes=("watched",))
    assert places.admit("watched://bucket/runs").path == "bucket/runs"
    assert OPENED == []
    places.open("watched://bucket/runs", "small-1").put("a/b", b"1")
    assert OPENED == ["made"]
    assert fsspec.filesystem("memory").cat("/bucket/runs/small-1/a/b") == b"1"


def test_what_opens_a_place_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(UserError, match="pip install adlfs"):
        ANYWHERE.open("abfs://bucket")
