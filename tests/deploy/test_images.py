"""What goes into the images: lists of packages, a user without rights, a token, a health check."""

import asyncio
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from packaging.utils import canonicalize_name

from deploy.docker.health import complaint
from deploy.docker.requirements import requirements
from skein.wire.channel import bind, open_server
from skein.wire.credentials import Credentials, Wallet
from skein.wire.identity.authority import Authority
from skein.wire.identity.names import COORDINATOR
from tests.contract.source import ROOT
from tests.deploy.stack import listing, services

DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text(encoding="utf-8")
PROJECT = ROOT / "pyproject.toml"
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def stages() -> dict[str, str]:
    """Text of each stage of the Dockerfile, by name."""
    parts = re.split(r"^FROM \S+ AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def names(extra: str) -> set[str]:
    return {re.split(r"[\[<>=!;]", line)[0] for line in requirements([extra], PROJECT)}


# --- packages ---


def test_the_coordinator_needs_ray_and_a_compiler_and_no_torch() -> None:
    assert names("coordinator") >= {"ray", "numba"}
    assert "torch" not in names("coordinator")


def test_an_extra_of_extras_is_what_these_need() -> None:
    assert names("all") >= names("coordinator") | names("worker")
    assert "skein-train" not in names("all")


def test_the_worker_needs_torch_and_no_ray() -> None:
    assert "torch" in names("worker")
    assert "ray" not in names("worker")


def test_an_extra_that_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError, match="gpu"):
        requirements(["gpu"], PROJECT)


@pytest.mark.parametrize(
    ("image", "extras"), [("coordinator", ["coordinator"]), ("worker", ["worker", "examples"])]
)
def test_an_image_installs_pinned_packages_by_their_hashes(image: str, extras: list[str]) -> None:
    text = (ROOT / f"deploy/docker/{image}.lock").read_text(encoding="utf-8")
    packages = [package.split() for package in text.replace("\\\n", " ").splitlines()]
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    assert [package for package in packages if package[0] not in pins] == [], "run: make locks"
    assert [
        package for package in packages if not all(map(HASH.fullmatch, package[1:])) or not package[1:]
    ] == []
    wanted = {canonicalize_name(re.split(r"[\[<>=!;]", line)[0]) for line in requirements(extras, PROJECT)}
    assert wanted - {pin.split("==")[0] for pin, *_ in packages} <= {"torch"}, "run: make locks"
    assert f"--require-hashes --requirement {image}.lock" in stages()[f"{image}-packages"]


def test_targets_of_the_compose_file_are_stages() -> None:
    targets = set(re.findall(r"^\s+target: (\S+)$", (ROOT / "docker-compose.yml").read_text(), re.MULTILINE))
    assert targets == {"coordinator", "worker"}
    assert targets <= stages().keys()


@pytest.mark.parametrize("stage", ["coordinator", "worker"])
def test_images_run_as_a_user_without_rights_and_tell_their_health(stage: str) -> None:
    text = stages()["runtime"] + stages()[stage]
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE)[-1] == "10001:10001"
    assert "HEALTHCHECK" in stages()[stage]


def test_nothing_is_copied_that_was_not_named() -> None:
    assert re.search(r"^(COPY|ADD) (\. |\./ |http)", DOCKERFILE, re.MULTILINE) is None


def test_workers_keep_big_buffers_instead_of_faulting_them_in() -> None:
    found = dict(re.findall(r"(MALLOC_\w+_)=(\d+)", stages()["worker"]))
    assert found.keys() == {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"}


def test_the_planner_is_compiled_before_the_coordinator_starts() -> None:
    text = stages()["coordinator"]
    [folder] = re.findall(r"NUMBA_CACHE_DIR=(\S+)", text)
    assert folder in stages()["runtime"], "it must belong to the user that compiles"
    assert "RUN python -m skein.plan.route.warm" in text
    assert folder in {str(volume) for volume in listing(services()["coordinator"]["volumes"])}
    assert "-m skein.plan.route.warm" in (ROOT / "Makefile").read_text()


def test_health_is_asked_at_the_port_that_the_service_listens_on() -> None:
    for service, stage in (("coordinator", "coordinator"), ("worker", "worker"), ("worker-gpu", "worker")):
        [port] = re.findall(r'"127\.0\.0\.1:(\d+)"', stages()[stage])
        published = str(services()[service].get("ports", "")) + str(services()[service]["command"])
        assert port in published, service


# --- health ---


@pytest.fixture
def checker() -> health.HealthServicer:
    return health.HealthServicer()


@pytest.fixture
def target(checker: health.HealthServicer) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(checker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_a_service_that_serves_has_no_complaint(target: str) -> None:
    assert complaint(target) is None


def test_a_service_that_is_going_down_is_not_healthy(checker: health.HealthServicer, target: str) -> None:
    checker.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert complaint(target) == f"{target}: NOT_SERVING"


async def test_a_service_that_wants_certificates_is_healthy_while_it_shakes_hands() -> None:
    authority = Authority.new(now_s=time.time())
    mine = Credentials(wallet=Wallet(authority.make_out(COORDINATOR, now_s=time.time())))
    server = open_server(credentials=mine)
    port = bind(server, "127.0.0.1", 0, credentials=mine)
    await server.start()
    try:
        assert await asyncio.to_thread(complaint, f"127.0.0.1:{port}") is None
    finally:
        await server.stop(None)


def test_nobody_is_not_healthy(target: str) -> None:
    nobody = "127.0.0.1:1"
    assert nobody != target
    assert "UNAVAILABLE" in str(complaint(nobody))
