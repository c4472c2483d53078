"""Nothing that turns bytes or text into running code may be reached by data from another machine."""

import ast
import re

import pytest

from tests.contract.source import PACKAGES, parse, python_files_with, uses, where

UNSAFE_NAME = re.compile(
    r"(.+\.)?(c?[pP]ickle|cloudpickle|dill|marshal|shelve|joblib)(\..+)?"
    r"|torch\.(load|serialization\.load|hub\.load|jit\.load|package)(\..+)?"
    r"|yaml\.(load|load_all|unsafe_load|unsafe_load_all|full_load|full_load_all|Loader|UnsafeLoader)"
    r"|(builtins\.)?(eval|exec)"
    r"|os\.(system|popen)|subprocess\.(getoutput|getstatusoutput)"
)
WORDS = re.compile(
    r"[pP]ickle|\b(dill|marshal|shelve|joblib|load|torch\.package|load_all|unsafe_load\w*|full_load\w*|Loader|UnsafeLoader"
    r"|eval|exec|system|popen|getoutput|getstatusoutput|shell|trust_remote_code|weights_only)\b"
)
"""One of them stands where there is one of those names or keywords."""
UNSAFE_KEYWORDS = {"shell": True, "allow_pickle": True, "trust_remote_code": True, "weights_only": False}


def find_unsafe(tree: ast.Module) -> list[tuple[int, str]]:
    names = [(use.line, use.name) for use in uses(tree) if UNSAFE_NAME.fullmatch(use.name)]
    keywords = [
        (keyword.lineno, f"{keyword.arg}={keyword.value.value}")
        for keyword in ast.walk(tree)
        if isinstance(keyword, ast.keyword)
        and isinstance(keyword.value, ast.Constant)
        and keyword.arg in UNSAFE_KEYWORDS
        and keyword.value.value is UNSAFE_KEYWORDS[keyword.arg]
    ]
    return names + keywords


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from ray import cloudpickle",
        "import torch\ntorch.load(path)",
        "from torch import load\nload(path)",
        "import yaml\nyaml.load(text, yaml.SafeLoader)",
        "eval(text)",
        "exec(text)",
        "import subprocess\nsubprocess.run(text, shell=True)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_every_unsafe_call_is_found(text: str) -> None:
    assert WORDS.search(text)
    assert find_unsafe(ast.parse(text))


@pytest.mark.parametrize("text", ["model.eval()", "import yaml\nyaml.safe_load(text)", "run(x, shell=False)"])
def test_safe_calls_are_left_alone(text: str) -> None:
    assert not find_unsafe(ast.parse(text))


def test_our_packages_make_no_unsafe_call() -> None:
    found = [
        where(path, line, what)
        for path in python_files_with(WORDS, *PACKAGES, "bench")
        for line, what in find_unsafe(parse(path))
    ]
    assert found == []
