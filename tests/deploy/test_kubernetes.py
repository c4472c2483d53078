"""deploy/k8s: manifests that a cluster of today takes, open to nobody by themselves, and that start what is here.

Kinds of Kubernetes itself are held to its own schemas. The two that operators bring (KubeRay's RayCluster, Prometheus'
PodMonitor) have none that a package here carries: `CUSTOM` says which of their fields these manifests may use, after
ray-operator/apis/ray/v1/raycluster_types.go (ray-project/kuberay) and pkg/apis/monitoring/v1/podmonitor_types.go
(prometheus-operator/prometheus-operator).
"""

import re
import shlex
from copy import deepcopy

import jsonschema
import kubernetes_validate
import pytest
import yaml

from coordinator.__main__ import main as coordinator_command
from tests.contract.source import ROOT
from tests.deploy.stack import Value, listing, mapping, read_yaml, services
from worker.__main__ import up as worker_command

FOLDER = ROOT / "deploy/k8s"
VERSIONS = ("1.28", kubernetes_validate.latest_version())

_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_SELECTOR = {"type": "object", "properties": {"matchLabels": _TEXTS}, "additionalProperties": False}
CUSTOM: dict[str, dict[str, object]] = {
    "ray.io/v1": {
        "type": "object",
        "required": ["headGroupSpec"],
        "additionalProperties": False,
        "properties": {
            "rayVersion": {"type": "string"},
            "headGroupSpec": {
                "type": "object",
                "required": ["rayStartParams", "template"],
                "additionalProperties": False,
                "properties": {
                    "serviceType": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
                    "rayStartParams": _TEXTS,
                    "template": {"type": "object"},
                },
            },
            "workerGroupSpecs": {"type": "array", "maxItems": 0},
        },
    },
    "monitoring.coreos.com/v1": {
        "type": "object",
        "required": ["podMetricsEndpoints", "selector"],
        "additionalProperties": False,
        "properties": {
            "selector": _SELECTOR,
            "podMetricsEndpoints": {
                "type": "array",
                "items": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "port": {"type": "string"},
                        "interval": {"type": "string", "pattern": r"^\d+(ms|s|m)$"},
                        "honorLabels": {"type": "boolean"},
                    },
                },
            },
        },
    },
}

Manifest = dict[str, Value]


def base() -> list[Manifest]:
    """Manifests of the base, in the order of its kustomization."""
    folder = FOLDER / "base"
    names = listing(read_yaml("deploy/k8s/base/kustomization.yaml")["resources"])
    assert {*map(str, names)} == {path.name for path in folder.iterdir()} - {"kustomization.yaml"}
    texts = [(folder / str(name)).read_text(encoding="utf-8") for name in names]
    return [mapping(manifest) for text in texts for manifest in yaml.safe_load_all(text)]


def on_gpus() -> list[Manifest]:
    """The same with the patches of deploy/k8s/gpu, which replace and add whole values (RFC 6902)."""
    patches = yaml.safe_load((FOLDER / "gpu/workers.yaml").read_text(encoding="utf-8"))
    manifests = deepcopy(base())
    [worker] = [one for one in manifests if one["kind"] == "Deployment"]
    for patch in patches:
        *folders, last = patch["path"].strip("/").split("/")
        place: Value = worker
        for part in folders:
            place = place[int(part)] if isinstance(place, list) else mapping(place)[part]
        assert patch["op"] == ("replace" if last in mapping(place) else "add")
        mapping(place)[last] = patch["value"]
    return manifests


VARIANTS = {"base": base(), "gpu": on_gpus()}


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Templates of pods, by the kind that makes them."""
    specs = {str(one["kind"]): mapping(one["spec"]) for one in manifests if "spec" in one}
    return {
        "RayCluster": mapping(mapping(specs["RayCluster"]["headGroupSpec"])["template"]),
        "Deployment": mapping(specs["Deployment"]["template"]),
    }


def container(manifests: list[Manifest], kind: str) -> Manifest:
    """The only container of a pod."""
    [one] = listing(mapping(pods(manifests)[kind]["spec"])["containers"])
    return mapping(one)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_field_is_one_that_kubernetes_knows(variant: str, version: str) -> None:
    for manifest in VARIANTS[variant]:
        schema = CUSTOM.get(str(manifest["apiVersion"]))
        if schema is None:
            kubernetes_validate.validate(manifest, version, strict=True)
        else:
            jsonschema.validate(manifest["spec"], schema)
    for kind, template in pods(VARIANTS[variant]).items():
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": kind.lower()},
            "spec": template["spec"],
        }
        kubernetes_validate.validate(pod, version, strict=True)


@pytest.mark.parametrize("kind", ["RayCluster", "Deployment"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_pod_may_do_more_than_it_needs(variant: str, kind: str) -> None:
    spec = mapping(pods(VARIANTS[variant])[kind]["spec"])
    assert spec["automountServiceAccountToken"] is False
    user = mapping(spec["securityContext"])
    assert (user["runAsNonRoot"], user["runAsUser"]) == (True, 10001)
    assert user["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(VARIANTS[variant], kind)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_only_ports_that_a_rule_names_are_reached() -> None:
    policies = {
        str(mapping(one["metadata"])["name"]): mapping(one["spec"])
        for one in base()
        if one["kind"] == "NetworkPolicy"
    }
    assert policies["nobody"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    opened = {
        name: {
            mapping(port)["port"]
            for rule in listing(policy["ingress"])
            for port in listing(mapping(rule)["ports"])
        }
        for name, policy in policies.items()
        if "ingress" in policy
    }
    assert opened == {
        name: {mapping(port)["containerPort"] for port in listing(container(base(), kind)["ports"])}
        for name, kind in (("coordinator", "RayCluster"), ("worker", "Deployment"))
    }


def test_whatever_selects_pods_finds_them() -> None:
    labels = [mapping(mapping(pod["metadata"])["labels"]) for pod in pods(base()).values()]
    text = "".join(path.read_text(encoding="utf-8") for path in (FOLDER / "base").glob("*.yaml"))
    found = re.findall(r"app\.kubernetes\.io/name: (\w+)", text)
    assert {*found} == {str(one["app.kubernetes.io/name"]) for one in labels}


def test_images_are_those_that_docker_compose_builds() -> None:
    built = {
        str(service["image"]).partition(":-")[2].removesuffix("}")
        for service in services().values()
        if "build" in service
    }
    gpu = listing(read_yaml("deploy/k8s/gpu/kustomization.yaml")["images"])
    used = {str(container(base(), kind)["image"]) for kind in ("RayCluster", "Deployment")}
    assert used | {str(mapping(image)["newName"]) for image in gpu} == built


def test_ray_is_the_release_that_the_image_has() -> None:
    [cluster] = [one for one in base() if one["kind"] == "RayCluster"]
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f"ray=={mapping(cluster['spec'])['rayVersion']}" in pins


@pytest.mark.parametrize("variant", VARIANTS)
def test_services_are_started_with_options_that_they_have(variant: str) -> None:
    shell = str(listing(container(VARIANTS[variant], "RayCluster")["args"])[0]).replace("\\\n", " ")
    [line] = [line for line in shell.splitlines() if line.startswith("exec skein ")]
    worker = listing(container(VARIANTS[variant], "Deployment")["args"])
    for command, words in (
        (coordinator_command, shlex.split(line)[4:]),
        (worker_command, [str(word) for word in worker][2:]),
    ):
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known
