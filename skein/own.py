"""Whether the packages that Skein imports beside this one are its own.

`client`, `worker` and `coordinator` are names that others use, too: a `client.py` on the path is found first, and a
wheel that has a `worker` writes over ours in silence.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

NAMES = ("client", "coordinator", "worker")
_ROOT = Path(__file__).parents[1]
_MARK = '"""Part of Skein: '
"""Begins the `__init__.py` of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageFault:
    """Name of a package of Skein's under which something else is found, or nothing; `cure` is what to do."""

    name: str
    found: str
    cure: str

    def __str__(self) -> str:
        return f"{self.name}: {self.found}: {self.cure}"


def install_hint(extra: str) -> str:
    """Command that installs an extra. No index has Skein: it is installed from its source folder, or a wheel of it."""
    return f"pip install '.[{extra}]' in Skein's source folder"


def package_faults(root: Path = _ROOT) -> Iterator[PackageFault]:
    """Packages of Skein's that are missing, or hidden by others of their name. Nothing is imported to find out.

    Args:
        root: the folder that `skein` itself was imported from.
    """
    alone = "give Skein an environment of its own (pipx, or python3 -m venv)"
    for name in NAMES:
        ours, spec = root / name / "__init__.py", _spec(name)
        if not ours.is_file():
            yield PackageFault(name=name, found=f"is not in {root}", cure=f"install Skein again, or {alone}")
        elif spec is None or spec.origin is None or not Path(spec.origin).samefile(ours):
            place = "nothing" if spec is None else spec.origin or "a folder without __init__.py"
            cure = f"take its folder off PYTHONPATH, rename it, or {alone}"
            yield PackageFault(name=name, found=f"{place} is found before Skein's own {ours}", cure=cure)
        elif not ours.read_text(encoding="utf-8", errors="replace").startswith(_MARK):
            found = f"{ours} is not Skein's any more: another distribution has written over it"
            yield PackageFault(name=name, found=found, cure=f"install Skein again, and {alone}")


def _spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ValueError:  # already imported, and by something that is no proper module
        return None
