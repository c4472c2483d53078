"""docs/troubleshooting.md has every message that the program refuses with, under a cause and a cure."""

import ast

import pytest

from docs import generate_troubleshooting as generated
from docs.refusals import find_refusals, messages_in


def test_the_page_has_every_message_of_today() -> None:
    assert generated.PAGE.read_text(encoding="utf-8") == generated.page(), "if this is meant: make docs"
    assert len(find_refusals()) > 300


def test_a_message_without_a_section_is_named() -> None:
    [refusal] = messages_in("bench/new.py", ast.parse("raise UserError('seed', seed, 'give another')"))
    assert generated.home(refusal, ["skein/", "client/lab/", "RemoteError"]) is None
    assert generated.home(refusal, ["bench/", "bench/n", "RemoteError"]) == "bench/n"
    assert generated.home(refusal, ["bench/", "UserError"]) == "UserError"


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("raise UserError('seed', seed, f'{seed!r} is odd')", ["seed: …: … is odd"]),
        ("def f():\n hint = 'a'\n raise UserError('x', 1, hint)\n hint = 'b'", ["x: …: a"]),
        ("def f():\n if c: hint = 'a'\n else: hint = 'b'\n raise NoLab(hint)", ["a", "b"]),
        ("refused = partial(UserError, 'x', 1)\ndef f(): return refused('is bad')", ["x: …: is bad"]),
        (
            "raise NotFoundError('job', job, 'gone' if a else 'never was')",
            ["job: …: gone", "job: …: never was"],
        ),
        ("click.UsageError(f'no such command: {name}')", ["no such command: …"]),
        ("Left(worker=w, reason=f'{a}{b} took the name')", ["… took the name"]),
        ("raise ValueError('not for people'); raise UserError(*parts)", []),
    ],
)
def test_what_a_person_would_read_is_found(text: str, messages: list[str]) -> None:
    assert [refusal.message for refusal in messages_in("client/some.py", ast.parse(text))] == messages
