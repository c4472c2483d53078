"""Docstrings have a subject: a noun of the glossary or of the code, or a verb; no pronoun, and no word that asks."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.contract.source import ROOT, parse, python_files

VAGUE = re.compile(
    r"(What|Whatever|Who|Whom|Whose|Whoever|How|Where|When|Why|Which|It|Those|They"
    r"|One|Something|Somebody|Everybody|Everyone|Nobody|Nothing|As|Of|From)\b"
)

FOLDERS = (
    "skein/config",
    "skein/data",
    "skein/model",
    "skein/numeric",
    "skein/plan",
    "skein/protocol",
    "skein/sim",
    "skein/storage",
    "skein/topology",
    "skein/wire",
    "coordinator",
    "worker",
    "client",
)
"""Where all sentences have been gone through."""


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of the strings that stand alone, those below a field or a constant included."""
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            text = statement.value.value
            if isinstance(text, str):
                yield statement.lineno, text


@pytest.mark.parametrize(
    ("text", "is_vague"),
    [("What it costs.", True), ("Of a worker.", True), ("Whether it is due.", False), ("Offset.", False)],
)
def test_sentences_without_a_subject_are_found(text: str, *, is_vague: bool) -> None:
    ((line, found),) = docstrings(ast.parse(f'"""{text}"""'))
    assert (line, VAGUE.match(found) is not None) == (1, is_vague)


def test_docstrings_have_a_subject() -> None:
    vague = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in python_files(*FOLDERS)
        for line, text in docstrings(parse(path))
        if VAGUE.match(text)
    ]
    assert vague == []
