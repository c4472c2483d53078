"""A scripted coordinator for whoever asks for `coordinator`."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.client.scripted import Script, serving


@dataclass(frozen=True)
class Scripted:
    """Where it listens, and what it follows."""

    target: str
    script: Script


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripted]:
    monkeypatch.setattr("client.connection._PAUSE_S", 0.01)
    script = Script()
    with serving(script) as target:
        yield Scripted(target, script)
