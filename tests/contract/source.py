"""Reads our own source as syntax trees, with names traced back to what was imported."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("skein", "coordinator", "worker", "client")


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A dotted name as it stands in a file, spelt from the module it was imported from."""

    line: int
    name: str


def python_files(*folders: str) -> list[Path]:
    """Hand-written Python files under `folders` of the repository, sorted."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in found if not path.stem.endswith(("_pb2", "_pb2_grpc")))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def python_files_with(words: re.Pattern[str], *folders: str) -> list[Path]:
    """Those of `python_files` in whose text one of the words stands; others need not be parsed."""
    return [path for path in python_files(*folders) if words.search(path.read_text(encoding="utf-8"))]


def uses(tree: ast.Module) -> Iterator[Use]:
    """Every import, name and attribute chain of `tree`.

    >>> tree = ast.parse("from torch import load as fetch; fetch('x'); import yaml as y; y.load")
    >>> sorted({use.name for use in uses(tree)})
    ['torch.load', 'yaml', 'yaml.load']
    """
    origins: dict[str, str] = {}
    for element in ast.walk(tree):
        match element:
            case ast.Import(names=names):
                origins |= {name.asname: name.name for name in names if name.asname}
                yield from (Use(line=element.lineno, name=name.name) for name in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                origins |= {name.asname or name.name: f"{module}.{name.name}" for name in names}
                yield from (Use(line=element.lineno, name=f"{module}.{name.name}") for name in names)
    for element in ast.walk(tree):
        if isinstance(element, ast.Name | ast.Attribute) and (dotted := _dotted(element)):
            first, _, rest = dotted.partition(".")
            origin = origins.get(first, first)
            yield Use(line=element.lineno, name=f"{origin}.{rest}" if rest else origin)


def where(path: Path, line: int, what: str) -> str:
    return f"{path.relative_to(ROOT)}:{line}: {what}"


def _dotted(element: ast.expr) -> str:
    match element:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            owner = _dotted(value)
            return f"{owner}.{attr}" if owner else ""
    return ""
