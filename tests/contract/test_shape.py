"""How the tree is cut: one public name, one module; packages of at most a dozen modules, files of 500 lines.

Who looks for a class or a function finds one, and who opens a folder takes it in at a glance.
"""

import ast
from collections import defaultdict
from pathlib import Path

from tests.contract.source import PACKAGES, ROOT, parse, python_files

MAX_MODULES = 12
MAX_LINES = 500
SEVERAL_MODULES = {"Refused", "main", "run"}
"""A message by its name on the wire, and what users of the client catch: both are held to it. And where each program
begins: with the arguments of its process, or with those given."""


def public_names(tree: ast.Module) -> set[str]:
    """Names of the classes and functions that others import: a command's is what users type, below its group.

    >>> sorted(public_names(ast.parse("class Plan: ...\\nclass _Cut: ...\\ndef f():\\n    class Local: ...")))
    ['Plan', 'f']
    >>> sorted(public_names(ast.parse("@click.command()\\ndef pause(): ...\\n@cache\\ndef g(): ...")))
    ['g']
    """
    return {
        x.name
        for x in tree.body
        if isinstance(x, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and not x.name.startswith("_")
        and not any(
            ast.unparse(by).startswith(("click.command(", "remote_command")) for by in x.decorator_list
        )
    }


def test_one_public_name_is_defined_in_one_module() -> None:
    modules: dict[str, list[Path]] = defaultdict(list)
    for path in python_files(*PACKAGES):
        for name in public_names(parse(path)):
            modules[name].append(path)
    assert {name for name, paths in modules.items() if len(paths) > 1} == SEVERAL_MODULES


def test_no_package_has_more_than_a_dozen_modules() -> None:
    modules: dict[str, int] = defaultdict(int)
    for path in python_files(*PACKAGES):
        modules[str(path.parent.relative_to(ROOT))] += path.stem != "__init__"
    assert {folder for folder, count in modules.items() if count > MAX_MODULES} == set()


def test_no_file_is_longer_than_people_read_in_one_sitting() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in python_files(*PACKAGES)
    }
    assert {path for path, lines in lengths.items() if lines > MAX_LINES} == set()
