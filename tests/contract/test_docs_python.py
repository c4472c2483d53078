"""What Python blocks of README and docs import is there under that name."""

import ast
import importlib
import re

import pytest

from tests.contract.source import ROOT

IMPORTS = [
    pytest.param(node.module, alias.name, id=f"{page.relative_to(ROOT)}: {node.module}.{alias.name}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    for node in ast.walk(ast.parse(block))
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
]


@pytest.mark.parametrize(("module", "name"), IMPORTS)
def test_what_a_block_imports_is_there(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)
