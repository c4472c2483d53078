"""What a verb has printed."""

import json

import pytest

Captured = pytest.CaptureFixture[str]


def lines(text: str) -> list[dict[str, object]]:
    """Each line of standard output as the object that it is."""
    return [json.loads(line) for line in text.splitlines()]
