"""The wheel holds the four packages whole, and imports with only what its extras promise."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.contract.source import PACKAGES, ROOT
from tests.support.extent import part

IMPORT_ALL = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"{name} is not installed", name=name)

ABSENT, packages, left_out = (set(text.split()) for text in sys.argv[1:])
sys.meta_path.insert(0, Absent())
for package in sorted(packages):
    module = importlib.import_module(package)
    assert module.__file__.startswith(sys.path[1]), module.__file__
    for found in pkgutil.walk_packages(module.__path__, f"{package}."):
        if not found.name.endswith("__main__") and not found.name.startswith(tuple(left_out) or "-"):
            importlib.import_module(found.name)
"""


WITH_TORCH = (
    "skein.numeric skein.sim.compute.aggregating skein.sim.compute.lying skein.sim.lying skein.sim.moments"
)
"""What simulates real tensors needs torch; the rest of the simulator does without."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, for setuptools leaves its build folder beside the source."""
    folder = tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns("__pycache__")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / "source" / package, ignore=ignore)
    for path in (*ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "LICENSE"):
        shutil.copy(path, folder / "source")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(folder / "source"))
    [built] = folder.glob("skein_train-*.whl")
    return built


def pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    source = wheel.parent / "source"
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {
        str(path.relative_to(source))
        for package in PACKAGES
        for suffix in ("*.py", "*.pyi", "py.typed", "*.yaml", "*.json", "*.html", "*.css", "*.js")
        for path in (source / package).rglob(suffix)
    }
    assert held == wanted
    assert {f"{package}/py.typed" for package in PACKAGES} <= held


def test_wheel_has_the_command_and_the_licence(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    held = {name.partition("/")[2]: name for name in archive.namelist() if ".dist-info/" in name}
    assert "skein = skein.__main__:main" in archive.read(held["entry_points.txt"]).decode()
    assert "licenses/LICENSE" in held


@pytest.mark.parametrize(
    ("absent", "packages", "left_out"),
    part(
        [
            pytest.param(
                "torch transformers tokenizers sklearn ray", "client skein", WITH_TORCH, id="client-alone"
            ),
            pytest.param(
                "torch transformers tokenizers sklearn",
                "client coordinator skein",
                WITH_TORCH,
                id="coordinator",
            ),
            pytest.param("ray transformers sklearn", "worker skein", "", id="worker"),
        ],
        every=3,
    ),
)
def test_packages_import_without_what_their_extras_leave_out(
    tmp_path: Path, absent: str, packages: str, left_out: str
) -> None:
    """In the source, which the wheel holds whole."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", IMPORT_ALL, absent, packages, left_out]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
