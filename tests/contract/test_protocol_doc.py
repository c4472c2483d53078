"""docs/protocol.md is what the machines say of themselves; docs/glossary.md points at code that exists."""

import re
from collections.abc import Iterator

import pytest

from docs.generate_protocol import PAGE, main, page
from tests.contract.source import ROOT
from tests.contract.test_names import BANNED

GLOSSARY = ROOT / "docs" / "glossary.md"
_PLACE = re.compile(r"`([\w/]+\.py)`(?: `(\w+)`)?")


def places() -> Iterator[tuple[str, str]]:
    """Files that the glossary names, each with the name inside it, if any."""
    yield from _PLACE.findall(GLOSSARY.read_text(encoding="utf-8"))


def test_the_page_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "if this is meant: make docs"
    assert main(["--check"]) == 0


def test_every_place_in_the_glossary_exists() -> None:
    for path, name in places():
        assert (ROOT / path).is_file(), path
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not name or re.search(rf"\b{name}\b", text), f"{name} is not in {path}"
    assert len(list(places())) > 20


@pytest.mark.parametrize("word", sorted(BANNED - {"util"}))
def test_the_glossary_names_each_word_that_is_not_used(word: str) -> None:
    last = GLOSSARY.read_text(encoding="utf-8").rpartition("## ")[2]
    assert re.search(rf"\b{word}\b", last)
