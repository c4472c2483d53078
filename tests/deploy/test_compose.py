"""docker-compose.yml: for both generations of docker-compose, with defaults for all, open to nobody by itself."""

import re

import pytest

from tests.contract.source import ROOT
from tests.deploy.stack import COMPOSE_FILE, Value, listing, mapping, read_yaml, services

SERVICES = services()
TEXT = COMPOSE_FILE.read_text(encoding="utf-8")
LONG_RUNNING = sorted(SERVICES.keys() - {"invitation"})
VARIABLE = re.compile(r"\$\{(\w+)([^}]*)\}")
NEWER_KEYS = {"gpus", "develop", "configs", "provider", "models", "attach", "post_start", "pre_stop"}
"""Of a service; docker-compose 1.29 refuses them."""


def test_no_key_is_known_to_one_generation_of_compose_only() -> None:
    assert {key for key in read_yaml("docker-compose.yml") if not key.startswith("x-")} == {
        "services",
        "networks",
        "volumes",
    }
    for name, service in SERVICES.items():
        assert NEWER_KEYS & service.keys() == set(), name
        for condition in mapping(service.get("depends_on", {})).values():
            assert mapping(condition).keys() == {"condition"}, name
        assert "start_interval" not in mapping(service.get("healthcheck", {})), name
        assert "secrets" not in mapping(service.get("build", {})), name


@pytest.mark.parametrize("name", SERVICES)
def test_no_service_may_do_more_than_it_needs(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert service["init"] is True
    assert "privileged" not in service
    assert "user" not in service, "images run as users of their own, none of them root"


@pytest.mark.parametrize("name", SERVICES)
def test_only_this_machine_reaches_published_ports(name: str) -> None:
    for port in listing(SERVICES[name].get("ports", [])):
        assert re.fullmatch(r"127\.0\.0\.1:\$\{\w+:-(\d+)\}:\1", str(port))


def test_services_wait_for_what_they_cannot_start_without() -> None:
    assert SERVICES["invitation"]["depends_on"] == {"coordinator": {"condition": "service_healthy"}}
    invited = {"invitation": {"condition": "service_completed_successfully"}}
    assert SERVICES["worker"]["depends_on"] == SERVICES["worker-gpu"]["depends_on"] == invited
    assert SERVICES["grafana"]["depends_on"] == {"prometheus": {"condition": "service_healthy"}}


@pytest.mark.parametrize("name", LONG_RUNNING)
def test_services_come_back_unless_they_ended_well(name: str) -> None:
    is_worker = name.startswith("worker")
    assert SERVICES[name]["restart"] == ("on-failure" if is_worker else "unless-stopped")


def mounts(volume: str) -> dict[str, str]:
    """How each service that has a volume mounts it."""
    found = {name: [str(x) for x in listing(s.get("volumes", []))] for name, s in SERVICES.items()}
    return {name: x for name, volumes in found.items() for x in volumes if x.startswith(f"{volume}:")}


def test_workers_are_invited_and_never_see_the_authority() -> None:
    line = "invitation:/etc/skein"
    assert mounts("invitation") == {"invitation": line, "worker": f"{line}:ro", "worker-gpu": f"{line}:ro"}
    assert mounts("state") == {
        "coordinator": "state:/var/lib/skein",
        "invitation": "state:/var/lib/skein:ro",
    }
    for name in ("worker", "worker-gpu"):
        command = [str(x) for x in listing(SERVICES[name]["command"])]
        assert "--join=@/etc/skein/line" in command


def test_nobody_comes_in_without_a_certificate() -> None:
    assert "token-file" not in TEXT
    assert "insecure" not in TEXT
    assert "--host=0.0.0.0" in listing(SERVICES["coordinator"]["command"])


def test_every_variable_has_a_default_and_stands_in_the_example() -> None:
    found = VARIABLE.findall(TEXT)
    assert [name for name, default in found if not default.startswith(":-")] == []
    example = dict(re.findall(r"^(\w+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert {name: default.removeprefix(":-") for name, default in found} == example


def test_images_from_elsewhere_are_pinned() -> None:
    images = {name: str(service["image"]) for name, service in SERVICES.items() if "build" not in service}
    assert {name for name, image in images.items() if not re.search(r":v?\d+\.\d+\.\d+$", image)} == set()


def test_grafana_lets_everybody_look_and_nobody_in() -> None:
    environment: dict[str, Value] = mapping(SERVICES["grafana"]["environment"])
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert [name for name in environment if "PASSWORD" in name] == []


def test_cpu_and_gpu_workers_differ_only_where_they_must() -> None:
    cpu, gpu = SERVICES["worker"], SERVICES["worker-gpu"]
    differing = {key for key in cpu.keys() | gpu.keys() if cpu.get(key) != gpu.get(key)}
    assert differing == {"profiles", "image", "command", "environment", "build", "deploy"}
