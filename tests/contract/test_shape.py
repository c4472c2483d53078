"""How the tree is cut: one public name is defined in one module, and a file is one idea of at most 800 lines.

Modules are not counted: packages are cut by which code may know which, and import-linter holds that.
"""

import ast
from collections import defaultdict
from pathlib import Path

from tests.contract.source import PACKAGES, ROOT, parse, python_files

MAX_LINES = 800
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


def test_no_file_is_longer_than_people_read_in_one_sitting() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in python_files(*PACKAGES)
    }
    assert {path for path, lines in lengths.items() if lines > MAX_LINES} == set()
