"""A test that can be passed over, or tried again until it passes, proves nothing: there is none."""

import ast
import re
import tomllib

import pytest

from tests.contract.source import ROOT, parse, python_files_with, uses, where

PASSED_OVER = re.compile(
    r"(pytest|unittest)(\.\w+)*\.(skip|skipif|skipIf|skipUnless|SkipTest|xfail|expectedFailure|importorskip"
    r"|flaky|rerun|reruns)"
    r"|self\.(skipTest|subTest)"
    r"|collect_ignore(_glob)?"
)
WORDS = re.compile("skip|Skip|xfail|expectedFailure|flaky|rerun|subTest|collect_ignore")
"""One of them stands in each of those names."""
PASSING_OVER = ("--reruns", "--deselect", "-k ", "--ignore-glob", "rerunfailures", "flaky")


def find_marks(tree: ast.Module) -> list[tuple[int, str]]:
    return [(use.line, use.name) for use in uses(tree) if PASSED_OVER.fullmatch(use.name)]


@pytest.mark.parametrize(
    "text",
    [
        "import pytest\n@pytest.mark.skip\ndef test(): ...",
        "import pytest\npytestmark = pytest.mark.skipif(True, reason='')",
        "from pytest import mark as m\n@m.xfail\ndef test(): ...",
        "from pytest import importorskip\nimportorskip('torch')",
        "import pytest as p\np.skip('no')",
        "import unittest\nraise unittest.SkipTest",
        "from pytest import mark\n@mark.flaky\ndef test(): ...",
    ],
)
def test_every_way_of_passing_over_a_test_is_found(text: str) -> None:
    assert WORDS.search(text)
    assert find_marks(ast.parse(text))


def test_names_that_only_look_like_marks_are_left_alone() -> None:
    assert not find_marks(ast.parse("job.skip.ratio; plan.skip(); import pytest; pytest.mark.timeout(5)"))


def test_no_test_can_be_passed_over_or_retried() -> None:
    found = [
        where(path, line, name)
        for path in python_files_with(WORDS, "tests", "skein", "coordinator", "worker", "client", "bench")
        for line, name in find_marks(parse(path))
    ]
    assert found == []


def test_no_command_line_leaves_tests_out() -> None:
    pytest_options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    for text in (str(pytest_options), (ROOT / "Makefile").read_text(), (ROOT / ".ci/run").read_text()):
        assert [option for option in PASSING_OVER if option in text] == []
