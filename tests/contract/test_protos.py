"""The committed stubs are those of the .proto files, load where we say they do, and explain themselves."""

import re
import tomllib
from pathlib import Path

import pytest

from protos.generate import PACKAGE, PROTOS, generate
from tests.contract.protos import commented, described, described_files
from tests.contract.source import ROOT

COMMITTED = ROOT / PACKAGE


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stubs")
    generate(root)
    return root / PACKAGE


def test_committed_stubs_are_what_the_protos_generate(fresh: Path) -> None:
    committed = {path.name: path.read_text() for path in COMMITTED.glob("*_pb2*")}
    generated = {path.name: path.read_text() for path in fresh.glob("*_pb2*")}
    assert sorted(committed) == sorted(generated)
    assert [name for name in sorted(committed) if committed[name] != generated[name]] == [], (
        "run `make proto`"
    )


def test_every_proto_file_has_its_stubs() -> None:
    protos = {path.stem for path in (PROTOS / PACKAGE).glob("*.proto")}
    assert protos
    assert {f"{stem}_pb2.py" for stem in protos} <= {path.name for path in COMMITTED.glob("*.py")}


@pytest.mark.parametrize(
    ("requirement", "pattern", "suffix"),
    [
        ("protobuf", r"# Protobuf Python Version: (\d+)\.(\d+)\.(\d+)", "*_pb2.py"),
        ("grpcio", r"GRPC_GENERATED_VERSION = '(\d+)\.(\d+)\.(\d+)'", "*_pb2_grpc.py"),
    ],
)
def test_stubs_load_with_the_oldest_runtime_that_we_declare(
    requirement: str, pattern: str, suffix: str
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [floor] = [line for line in project["dependencies"] if line.startswith(f"{requirement}>=")]
    declared = tuple(map(int, re.findall(r"\d+", floor.partition(",")[0])))
    needed = [re.search(pattern, path.read_text()) for path in COMMITTED.glob(suffix)]
    assert needed
    assert max(tuple(map(int, found.groups())) for found in needed if found) <= declared


def test_every_enum_value_is_explained(tmp_path: Path) -> None:
    silent = [
        f"{file.name}: {part.name}"
        for file in described_files(tmp_path)
        for part in described(file)
        if part.kind == "value" and part.location not in commented(file)
    ]
    assert silent == []
