"""Each part of the coordinator alone changes its fields; records that are private to a module are that module's."""

import ast
from collections.abc import Iterator

from tests.contract.source import parse, python_files

MUTATING = {
    "add",
    "append",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "setdefault",
    "update",
}


def test_nobody_changes_the_fields_of_another_part() -> None:
    for path in python_files("skein/protocol/coordinator"):
        tree = parse(path)
        own = {
            field.target.id
            for record in ast.walk(tree)
            if isinstance(record, ast.ClassDef) and record.name.startswith("_")
            for field in record.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        }
        changed = {ast.unparse(field) for field in fields_changed(tree) if field.attr not in own}
        assert {x for x in changed if x.rpartition(".")[0] != "self"} == set(), path.name


def fields_changed(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Fields that are assigned, deleted, or changed in place by a method of a container."""
    for step in ast.walk(tree):
        match step:
            case ast.Assign(targets=found) | ast.Delete(targets=found):
                targets = [
                    x
                    for target in found
                    for x in (target.elts if isinstance(target, ast.Tuple) else [target])
                ]
            case ast.AugAssign(target=one) | ast.AnnAssign(target=one):
                targets = [one]
            case ast.Call(func=ast.Attribute(value=changed, attr=name)) if name in MUTATING:
                targets = [changed]
            case _:
                continue
        for target in targets:
            while isinstance(target, ast.Subscript):
                target = target.value
            if isinstance(target, ast.Attribute):
                yield target


def test_the_look_at_changed_fields_misses_none() -> None:
    lines = (
        "a.b = 1",
        "a.b, c.d[0] = 1, 2",
        "a.b += 1",
        "del a.b[0]",
        "a.b[0].append(1)",
        "a.b.c: int = 1",
        "a.b()",
    )
    assert [[ast.unparse(x) for x in fields_changed(ast.parse(line))] for line in lines] == [
        ["a.b"],
        ["a.b", "c.d"],
        ["a.b"],
        ["a.b"],
        ["a.b"],
        ["a.b.c"],
        [],
    ]
