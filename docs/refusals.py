"""Every refusal in our source, as a pattern of what a person reads: `…` stands for what is known only then.

Nothing is imported for it: errors are known by the classes that theirs come from, texts by where names were given them.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("skein", "coordinator", "worker", "client")
HOLE = "…"
BASES = ("SkeinError", "ClickException", "UsageError", "BadParameter")
"""Errors that are told to people: ours, and those of the library that reads command lines."""
SETTINGS = ("skein/config/", "client/lab/preset.py", "client/planning/files/")
"""Files in which what is wrong with a field is a `ValueError`, to which whoever reads settings adds the field."""
_MOST = 12
"""Most wordings of one refusal that are written out."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A message, and where it is made.

    Args:
        module: path of the file from the root.
        kind: class of the error; "reason" for what a job or a worker is told without one.
        family: classes that it comes from, itself included.
    """

    module: str
    kind: str
    family: frozenset[str]
    message: str


def find_refusals() -> list[Refusal]:
    """Refusals of all packages, by module and in the order of their lines, each once."""
    return [refusal for module, tree in _modules().items() for refusal in messages_in(module, tree)]


def messages_in(module: str, tree: ast.Module) -> list[Refusal]:
    """Refusals of one module, each once."""
    found = (
        Refusal(module=module, kind=kind, family=frozenset(_families().get(kind, {kind})), message=message)
        for kind, message in _Reading(_kinds(module), _Scope(tree)).of(tree)
    )
    return list(dict.fromkeys(found))


@cache
def _modules() -> Mapping[str, ast.Module]:
    paths = (path for folder in PACKAGES for path in sorted((ROOT / folder).rglob("*.py")))
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
        for path in paths
        if "v1" not in path.parts
    }


@cache
def _families() -> Mapping[str, set[str]]:
    """Classes of errors, each with those that it comes from."""
    bases: dict[str, set[str]] = {name: set() for name in BASES}
    for tree in _modules().values():
        for element in tree.body:
            if isinstance(element, ast.ClassDef):
                bases.setdefault(element.name, set()).update(
                    ast.unparse(x).split(".")[-1] for x in element.bases
                )
    families = {name: {name} for name in bases}
    for _ in range(6):
        for name, family in families.items():
            family |= {x for base in bases[name] for x in families.get(base, {base})}
    return {name: family for name, family in families.items() if family & set(BASES)}


def _kinds(module: str) -> frozenset[str]:
    return frozenset(_families()) | (
        frozenset({"ValueError"}) if module.startswith(SETTINGS) else frozenset()
    )


class _Scope:
    """Texts that names have in a module or a function, by line; those of what is around it too."""

    def __init__(self, whole: ast.Module | _Function, around: "_Scope | None" = None) -> None:
        self._whole = whole
        self._around = around

    @cached_property
    def _given(self) -> list[tuple[int, str, ast.expr]]:
        given: list[tuple[int, str, ast.expr]] = []
        for element in ast.walk(self._whole):
            match element:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    given.append((element.lineno, name, value))
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                    pairs = zip(names, values, strict=True)
                    given += [(element.lineno, x.id, value) for x, value in pairs if isinstance(x, ast.Name)]
        return given

    @cached_property
    def _left(self) -> list[int]:
        return [x.lineno for x in ast.walk(self._whole) if isinstance(x, ast.Raise | ast.Return)]

    def values(self, name: str, line: int) -> list[ast.expr]:
        """Expressions that the name may stand for there: those since the last way out, or the last one before."""
        before = [(at, value) for at, found, value in self._given if found == name and at <= line]
        since = max((at for at in self._left if at < line), default=0)
        recent = [value for at, value in before if at > since] or [value for _, value in before[-1:]]
        if recent or self._around is None:
            return recent
        return self._around.values(name, 1 << 30)


@dataclass
class _Reading:
    """A walk through one module or function."""

    kinds: frozenset[str]
    scope: _Scope
    aliases: dict[str, tuple[str, list[ast.expr]]] = field(default_factory=dict)

    def of(self, tree: ast.AST) -> Iterator[tuple[str, str]]:
        """Kinds and messages of all refusals below."""
        for element in ast.iter_child_nodes(tree):
            match element:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    inner = _Reading(self.kinds, _Scope(element, self.scope), dict(self.aliases))
                    yield from inner.of(element)
                    continue
                case ast.Assign(
                    targets=[ast.Name(id=name)],
                    value=ast.Call(func=ast.Name(id="partial"), args=[ast.Name(id=kind), *given]),
                ) if kind in self.kinds:
                    self.aliases[name] = (kind, given)
                case ast.Call():
                    yield from self._made(element)
            yield from self.of(element)

    def _made(self, call: ast.Call) -> Iterator[tuple[str, str]]:
        name = ast.unparse(call.func).split(".")[-1]
        kind, before = self.aliases.get(name, (name, []))
        if kind in self.kinds:
            yield from ((kind, message) for message in self._messages(kind, [*before, *call.args]))
        for keyword in call.keywords:
            if keyword.arg == "reason":
                yield from (("reason", text) for text in self._text(keyword.value) if _says(text))

    def _messages(self, kind: str, arguments: Sequence[ast.expr]) -> Iterator[str]:
        parts = [list(self._text(x)) for x in arguments if not isinstance(x, ast.Starred)]
        if "UserError" in _families().get(kind, ()) and len(parts) == 3:
            parts[1] = [HOLE]
        yield from filter(_says, [": ".join(message) for message in list(product(*parts))[:_MOST]])

    def _text(self, value: ast.expr, depth: int = 0) -> Sequence[str]:
        """Wordings that an expression can have."""
        match value:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=values):
                return [_squeezed("".join(map(_piece, values)))]
            case ast.Name(id=name) if depth < 3 and (given := self.scope.values(name, value.lineno)):
                return [text for one in given for text in self._text(one, depth + 1)]
            case ast.IfExp(body=one, orelse=other):
                return [*self._text(one, depth), *self._text(other, depth)]
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                return [
                    _squeezed(a + b) for a, b in product(self._text(left, depth), self._text(right, depth))
                ]
        return [HOLE]


def _piece(value: ast.expr) -> str:
    return str(value.value) if isinstance(value, ast.Constant) else HOLE


def _squeezed(text: str) -> str:
    while HOLE * 2 in text:
        text = text.replace(HOLE * 2, HOLE)
    return text


def _says(text: str) -> bool:
    """Whether a person could look it up."""
    return any(character.isalpha() for character in text)
