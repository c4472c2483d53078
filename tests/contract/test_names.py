"""One word, one thing: words that docs/glossary.md replaces stand in no name of ours."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.protos import described, described_files
from tests.contract.source import PACKAGES, ROOT, parse, python_files, where

BANNED = {
    "node", "task", "agent", "rank", "master", "slave", "iteration",
    "util", "helper", "manager", "handler", "common", "misc",
}  # fmt: skip
LIBRARIES = {
    "compose_node",  # PyYAML's, overridden
    "add_generic_rpc_handlers",  # what generated stubs call on a server of grpc
    "add_registered_method_handlers",
}
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def banned_words(name: str) -> set[str]:
    """Banned words inside an identifier, singular or plural.

    >>> banned_words("TaskGroups"), banned_words("ranking"), banned_words("num_nodes")
    ({'task'}, set(), {'node'})
    """
    words = {word.lower() for word in WORD.findall(name)}
    return {word for word in BANNED if {word, f"{word}s"} & words}


def defined_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Classes, functions and annotated fields of classes: names that we chose."""
    for element in ast.walk(tree):
        match element:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield element.lineno, name
            case ast.ClassDef(name=name, body=body):
                yield element.lineno, name
                for part in body:
                    if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                        yield part.lineno, part.target.id


def path_words(path: Path) -> set[str]:
    return set().union(*(banned_words(part) for part in path.relative_to(ROOT).with_suffix("").parts))


def test_no_module_is_named_by_a_banned_word() -> None:
    found = [where(path, 1, str(words)) for path in python_files(*PACKAGES) if (words := path_words(path))]
    assert found == []


def test_no_class_function_or_field_is_named_by_a_banned_word() -> None:
    found = [
        where(path, line, name)
        for path in python_files(*PACKAGES)
        for line, name in defined_names(parse(path))
        if banned_words(name) and name not in LIBRARIES
    ]
    assert found == []


def test_no_proto_name_holds_a_banned_word(tmp_path: Path) -> None:
    names = [part.name for file in described_files(tmp_path) for part in described(file)]
    assert [name for name in names if banned_words(name)] == []


@pytest.mark.parametrize("name", ["on_task", "TaskRunner", "rank", "worker_utils", "HTTPHandler", "node2"])
def test_banned_words_are_found_inside_identifiers(name: str) -> None:
    assert banned_words(name)


@pytest.mark.parametrize("name", ["ranking", "commonly", "multitasking", "worker", "iterate"])
def test_longer_words_are_left_alone(name: str) -> None:
    assert not banned_words(name)
