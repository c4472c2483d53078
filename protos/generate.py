"""Writes the stubs of `protos/skein/wire/v1` into a source tree: `python protos/generate.py [ROOT]`.

The tool's version is pinned (pyproject.toml), for a stub made by a newer one refuses to load on an older protobuf.
"""

import sys
import sysconfig
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).parent
REPOSITORY = PROTOS.parent
PACKAGE = Path("skein/wire/v1")


def generate(root: Path) -> None:
    """Replace the stubs under `root / PACKAGE`, for messages, services and their types.

    Raises:
        RuntimeError: the compiler refused a file; it has said why on stderr.
    """
    (root / PACKAGE).mkdir(parents=True, exist_ok=True)
    for stale in (root / PACKAGE).glob("*_pb2*"):
        stale.unlink()
    binaries = Path(sysconfig.get_path("scripts"))
    well_known = Path(protoc.__file__).parent / "_proto"
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={PROTOS}",
            f"--proto_path={well_known}",
            *(f"--plugin={name}={binaries / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")),
            *(f"--{kind}_out={root}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")),
            *sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / PACKAGE).glob("*.proto")),
        ]
    )
    if status != 0:
        raise RuntimeError(f"protoc ended with status {status}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY)
