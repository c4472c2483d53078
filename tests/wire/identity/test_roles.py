"""The table of roles and methods has a row for each; whom it refuses, tests/coordinator/test_every_method.py asks."""

from importlib import import_module
from pathlib import Path

from google.protobuf.descriptor import MethodDescriptor

import skein.wire.v1
from skein.wire.identity.roles import ROLES


def described() -> dict[str, MethodDescriptor]:
    """All methods of all services, by Service/Method."""
    stubs = sorted(Path(skein.wire.v1.__path__[0]).glob("*_pb2.py"))
    files = [import_module(f"skein.wire.v1.{path.stem}").DESCRIPTOR for path in stubs]
    services = [service for file in files for service in file.services_by_name.values()]
    return {f"{service.name}/{method.name}": method for service in services for method in service.methods}


def methods() -> list[str]:
    """Names of all methods of all services."""
    return list(described())


def test_each_method_of_each_service_says_who_may_call_it() -> None:
    assert sorted(methods()) == sorted(ROLES)
