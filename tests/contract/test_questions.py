"""A question that has variants is asked where they are told apart, and nowhere else: others ask for what follows.

Which aggregation rule a job has, which layout, which phase a microbatch is of, one walker or many, what a group of
several stages reduces: who compares with a variant has to be found again when another one comes. So a variant answers
for itself (a trait of its spec, a property of its enumeration), and only files that define it or tell what follows from
it may compare.
"""

import ast
from collections.abc import Iterator
from typing import get_args

import pytest

from skein.config.rule import RuleSpec
from skein.numeric.aggregate import rules
from skein.numeric.aggregate.rule import Rule
from tests.contract.source import PACKAGES, ROOT, parse, python_files

SPECS = [RuleSpec]
"""All that `skein.config.aggregation` defines."""
for known in SPECS:
    SPECS += known.__subclasses__()
RULES = {spec.__name__ for spec in SPECS[1:]} | {
    base.__name__
    for found in vars(rules).values()
    for base in getattr(found, "__mro__", ())
    if Rule in base.__mro__ and base is not Rule
}
"""Classes that say which rule it is: of specs, and of what computes."""
RULE_NAMES = {
    name for spec in SPECS if (field := spec.model_fields.get("rule")) for name in get_args(field.annotation)
}
HOMES = {
    "rule": {"skein/config/aggregation.py", "skein/numeric/aggregate/rules.py"},
    "layout": {"skein/types.py", "skein/plan/cut.py", "skein/plan/check.py"},
    "phase": {"skein/protocol/messages/tensors.py"},
    "walkers": {"skein/config/rule.py"},
    "group": {"skein/model/reduced.py"},
}
"""Where variants are defined, and where what follows from them is told."""


def asked(tree: ast.Module) -> set[str]:
    """Which questions a file asks."""
    return {question for element in ast.walk(tree) for question in _asked_by(element)}


def _asked_by(element: ast.AST) -> Iterator[str]:
    match element:
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, classes]):
            yield from _rules(_names(classes))
        case ast.MatchClass(cls=cls):
            yield from _rules(_names(cls))
        case ast.MatchValue(value=value):
            yield from _variants(value)
        case ast.Compare(left=left, comparators=others):
            for side in (left, *others):
                yield from _variants(side)
                yield from _rules(_names(side))
            found = {
                x.value for side in (left, *others) for x in ast.walk(side) if isinstance(x, ast.Constant)
            }
            if found & RULE_NAMES:
                yield "rule"


def _rules(names: set[str]) -> Iterator[str]:
    if names & RULES:
        yield "rule"
    if "Tied" in names:
        yield "group"


def _variants(value: ast.expr) -> Iterator[str]:
    for element in ast.walk(value):
        match element:
            case ast.Attribute(value=ast.Name(id="Layout" | "Phase" | "Walkers" as name)):
                yield name.lower()


def _names(value: ast.expr) -> set[str]:
    found = {x.id for x in ast.walk(value) if isinstance(x, ast.Name)}
    return found | {x.attr for x in ast.walk(value) if isinstance(x, ast.Attribute)}


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("isinstance(rule, Gossip)", "rule"),
        ("isinstance(rule, aggregation.Lsgd | DiLoCo)", "rule"),
        ("match rule:\n case AllReduce(): ...", "rule"),
        ("match rule:\n case aggregation.AllReduce(): ...", "rule"),
        ("type(rule) is Gossip", "rule"),
        ("job.aggregation.rule in ('lsgd', 'gossip')", "rule"),
        ("plan.layout is not Layout.LOOP", "layout"),
        ("n - (job.parallel.layout is Layout.LINE)", "layout"),
        ("match op:\n case ForwardOp(phase=Phase.TRAIN): ...", "phase"),
        ("key[0] is not Phase.TRAIN", "phase"),
        ("walkers in (Walkers.MANY,)", "walkers"),
        ("result.group == Tied()", "group"),
        ("match group:\n case Tied(): ...", "group"),
    ],
)
def test_every_way_of_asking_is_found(text: str, question: str) -> None:
    assert asked(ast.parse(text)) == {question}


def test_naming_a_variant_without_asking_is_left_alone() -> None:
    text = "Evaluate(phase=Phase.PROBE); AllReduce(); layout = Layout.LOOP; x: Gossip; 'gossip'"
    assert not asked(ast.parse(text))


def test_no_other_file_tells_variants_apart() -> None:
    found = {
        (question, name)
        for path in python_files(*PACKAGES)
        for question in asked(parse(path))
        if (name := str(path.relative_to(ROOT))) not in HOMES[question]
    }
    assert not found
