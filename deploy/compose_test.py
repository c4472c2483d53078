"""Brings coordinator, four workers and Prometheus up with docker-compose, has a job trained, and asks about it.

Rules of this file
- The standard library only: it runs where nothing of the project is installed. The client runs in a container on the
  host's network, so it meets the coordinator as a user does: at the published ports, with an identity of its own.
- Everything belongs to a project of its own, is waited for with a deadline, and is removed whatever happens.
- Grafana is not started; what it would ask Prometheus is read from the dashboard that it is given.
"""

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeAlias

Json: TypeAlias = "str | float | bool | list[Json] | dict[str, Json] | None"

ROOT = Path(__file__).resolve().parent.parent
DASHBOARDS = ROOT / "deploy/grafana/dashboards"
EXAMPLES = ROOT / "deploy/config/examples"
JOB_FILE = "compose-text.yaml"
TRIALS_FILE = "sweep.yaml"
NUM_TRIALS = 8
NUM_WORKERS = 4
ONE_DEVICE, MESH = "cpu", "cpu:2"
"""Devices of a worker: the first one is a mesh."""
NUM_STEPS = 40
NUM_MORTAL_STEPS = 80
MORTAL = (
    f"budget.steps={NUM_MORTAL_STEPS}",
    "parallel.stages=1",
    "resources.min_workers=2",
    "resources.max_workers=2",
)
"""Settings of jobs during which somebody dies: two of them have the whole fleet."""
RULES = (
    ("model={family: mixtral, preset: mixtral-1m, placement: mesh, routing: {capacity: 1.25}}",),
    ("aggregation.rule=diloco", "aggregation.local_steps=5"),
    ("aggregation.rule=lsgd", "aggregation.local_every_steps=5", "aggregation.global_every_steps=10"),
)
"""Of the jobs that run, one after the other: each has numbers on the dashboard that others lack."""
ROWS = "{format: jsonl, path: data://mounted/rows.jsonl, field: x, label: y}"
NUM_ROWS = 600
OF_ROWS = (
    f"budget.steps={NUM_STEPS}",
    "model={family: mlp, widths: [32], num_features: 4, num_classes: 3}",
    f"data={{sources: [{ROWS}], validation_ratio: 0.1}}",
)
"""Settings of jobs over `NUM_ROWS` samples with classes, that are mounted in the workers."""
CHOOSING = ("sweep=null", "data.coreset={method: craig, fraction: 0.2, warmup_epochs: 1, refresh_epochs: 1}")
SERVICES = ("coordinator", "worker", "prometheus")
OUR_USER, NOBODY = "10001", "65534"
RATE_INTERVAL = "20s"
"""What Grafana puts for `$__rate_interval`: four scrapes."""
BUILD_S, HEALTHY_S, JOB_S, ANSWER_S, STOP_S = 1800.0, 180.0, 180.0, 45.0, 60.0
_BEGAN = time.monotonic()


class CheckError(Exception):
    """Something is not as it should be."""


def check(is_so: bool, complaint: str) -> None:
    if not is_so:
        raise CheckError(complaint)


def say(line: str) -> None:
    print(f"compose-test: {time.monotonic() - _BEGAN:4.0f} s  {line}", flush=True)


def wait_until(is_so: Callable[[], bool], what: str, limit_s: float) -> None:
    """Looks once a second."""
    deadline = time.monotonic() + limit_s
    while not is_so():
        check(time.monotonic() < deadline, f"not within {limit_s:.0f} s: {what}")
        time.sleep(1.0)


def attempt(
    command: Sequence[str], *, limit_s: float = 60.0, env: Mapping[str, str] | None = None, text: str = ""
) -> "subprocess.CompletedProcess[str]":
    """Runs a command that may fail, with `text` on its standard input."""
    try:
        return subprocess.run(
            command,
            cwd=ROOT,
            env=env,
            timeout=limit_s,
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CheckError(f"not done after {limit_s:.0f} s: {' '.join(command)}") from error


def run(
    command: Sequence[str], *, limit_s: float = 60.0, env: Mapping[str, str] | None = None, text: str = ""
) -> str:
    """What a command prints on standard output.

    Raises:
        CheckError: it fails; with all that it said.
    """
    done = attempt(command, limit_s=limit_s, env=env, text=text)
    check(done.returncode == 0, f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def get(url: str) -> str:
    """The body of an HTTP reply; whatever proxy is set is for other addresses than this machine's."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=10.0) as reply:
            body: bytes = reply.read()
    except urllib.error.HTTPError as error:
        raise CheckError(f"{url}: {error.code} {error.read().decode(errors='replace')}") from error
    except OSError as error:
        raise CheckError(f"{url}: {error}") from error
    return body.decode()


def at(value: Json, *path: str | int) -> Json:
    """What lies at `path` in parsed JSON."""
    for key in path:
        match value, key:
            case dict(), str():
                value = value[key]
            case list(), int():
                value = value[key]
            case _:
                raise CheckError(f"{path} is not in {value}")
    return value


def items(value: Json) -> list[Json]:
    assert isinstance(value, list), value
    return value


# --- the services ---


class Services:
    """One project of docker-compose, on ports and under a name that nothing else has."""

    def __init__(self, data: Path) -> None:
        names = ("SKEIN_PORT", "SKEIN_METRICS_PORT", "SKEIN_ENROL_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")
        ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.project = f"skein-test-{os.getpid()}"
        self.client_name = f"{self.project}-client"
        self.address = f"127.0.0.1:{ports['SKEIN_PORT']}"
        self.enrol_address = f"127.0.0.1:{ports['SKEIN_ENROL_PORT']}"
        self.metrics_url = f"http://127.0.0.1:{ports['SKEIN_METRICS_PORT']}/metrics"
        self.prometheus_url = f"http://127.0.0.1:{ports['PROMETHEUS_PORT']}"
        # The environment wins over a `.env` that the owner of the checkout has written.
        chosen = {name: str(port) for name, port in ports.items()} | {"SKEIN_DATA": str(data)}
        self._env = {**os.environ, **chosen}
        self._command = [*compose_command(), "--project-name", self.project]

    def compose(self, *arguments: str, limit_s: float = 60.0, text: str = "") -> str:
        return run([*self._command, *arguments], limit_s=limit_s, env=self._env, text=text)

    def build(self) -> None:
        self.compose("build", "coordinator", "worker", limit_s=BUILD_S)

    def up(self, *, num_workers: int = NUM_WORKERS, devices: str = ONE_DEVICE) -> None:
        """So many workers are healthy then; those that were there keep the devices that they have."""
        command = [*self._command, "up", "--detach", "--no-build", "--no-recreate"]
        chosen = self._env | {"SKEIN_WORKER_DEVICES": devices}
        run([*command, "--scale", f"worker={num_workers}", *SERVICES], limit_s=HEALTHY_S, env=chosen)
        for service in SERVICES:
            self.wait_healthy(service)

    def down(self) -> None:
        arguments = ("down", "--volumes", "--remove-orphans", "--timeout", "5")
        attempt(["docker", "rm", "--force", self.client_name])
        done = attempt([*self._command, *arguments], limit_s=120.0, env=self._env)
        if done.returncode != 0:
            print(done.stderr, file=sys.stderr)

    def logs(self) -> str:
        return attempt([*self._command, "logs", "--no-color", "--tail", "60"], env=self._env).stdout

    def containers(self, service: str) -> list[str]:
        """Ids of a service's containers."""
        return self.compose("ps", "--quiet", service).split()

    def wait_healthy(self, service: str) -> None:
        for container in self.containers(service):
            wait_until(partial(is_healthy, container), f"{service} is healthy", HEALTHY_S)

    def promtool(self, *arguments: str, text: str = "") -> None:
        # It keeps what it makes up in a folder, and the volume is the only one there is.
        place = ("--env", "TMPDIR=/prometheus")
        self.compose("exec", "-T", *place, "prometheus", "promtool", *arguments, text=text)


def compose_command() -> list[str]:
    """Whichever docker-compose is here."""
    return ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def inspect(container: str) -> Json:
    parsed: Json = json.loads(run(["docker", "inspect", container]))
    return at(parsed, 0)


def is_healthy(container: str) -> bool:
    return at(inspect(container), "State", "Health", "Status") == "healthy"


# --- the client ---


class Client:
    """`skein` on the host's network, with an identity that belongs to whoever runs this."""

    def __init__(self, services: Services, folder: Path) -> None:
        self._address = services.address
        self._name = services.client_name
        self._image = str(at(inspect(services.containers("coordinator")[0]), "Config", "Image"))
        self._folder = folder
        line = services.compose(
            "exec", "-T", "coordinator", "skein", "token", "create", "--role", "submitter"
        )
        places = ("--at", services.address, "--enrol-at", services.enrol_address)
        run(self.command("join", line.strip(), "--name", "tester", *places))

    def command(self, *arguments: str, has_identity: bool = True) -> list[str]:
        container = ["docker", "run", "--rm", "--name", self._name, "--network", "host", "--read-only"]
        owner = ["--user", f"{os.getuid()}:{os.getgid()}", "--env", f"SKEIN_COORDINATOR={self._address}"]
        jobs = ["--volume", f"{EXAMPLES}:/jobs:ro"]
        identity = ["--volume", f"{self._folder}:/config", "--env", "XDG_CONFIG_HOME=/config"]
        return [*container, *owner, *jobs, *(identity if has_identity else []), self._image, *arguments]

    def ask(self, *arguments: str, limit_s: float = 60.0) -> list[Json]:
        """What a command says with `--json`, line by line."""
        said = run(self.command(*arguments, "--json"), limit_s=limit_s)
        return [json.loads(line) for line in said.splitlines()]


# --- what is checked ---


def check_hardening(services: Services) -> None:
    """Nobody is root, nothing can be written but volumes, and only this machine reaches the ports."""
    for service in SERVICES:
        for container in services.containers(service):
            found = inspect(container)
            user = run(["docker", "exec", container, "id", "-u"]).strip()
            wanted = NOBODY if service == "prometheus" else OUR_USER
            check(user == wanted, f"{service} runs as user {user}")
            check(at(found, "HostConfig", "ReadonlyRootfs") is True, f"{service} can write its own files")
            check(at(found, "HostConfig", "CapDrop") == ["ALL"], f"{service} has capabilities")
            options = str(at(found, "HostConfig", "SecurityOpt"))
            check("no-new-privileges" in options, f"{service} may gain privileges")
            ports = at(found, "HostConfig", "PortBindings") or {}
            assert isinstance(ports, dict)
            hosts = {at(binding, "HostIp") for bindings in ports.values() for binding in items(bindings)}
            check(hosts <= {"127.0.0.1"}, f"{service} is published at {hosts}")


def check_images(services: Services) -> None:
    """Each image has what its service needs, and no more."""
    for service, absent in (("coordinator", "torch"), ("worker", "ray")):
        script = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({absent!r}) is not None)"
        container = services.containers(service)[0]
        done = attempt(["docker", "exec", container, "python", "-c", script])
        check(done.returncode == 0, f"the image of {service} has {absent}")


def check_stranger(client: Client) -> None:
    done = attempt(client.command("jobs", has_identity=False))
    check(
        done.returncode == 1, f"a client without an identity got exit code {done.returncode}: {done.stdout}"
    )
    check("Traceback" not in done.stderr, done.stderr)


def train(client: Client, *rule: str) -> str:
    """Hands in the job, watches it to its end; gives its id."""
    settings = (f"budget.steps={NUM_STEPS}", "evaluation.every_steps=20", "checkpoint.every_steps=20", *rule)
    overrides = [word for setting in settings for word in ("--set", setting)]
    submitted, *events = client.ask("submit", f"/jobs/{JOB_FILE}", "--wait", *overrides, limit_s=JOB_S)
    job = str(at(submitted, "job"))
    check(len(events) > NUM_STEPS, f"only {len(events)} events were seen")
    [status] = client.ask("status", job)
    check(at(status, "state") == "finished", f"{job}: {status}")
    check(at(status, "step") == NUM_STEPS, f"{job}: {status}")
    loss = at(status, "evaluation_loss")
    # Even odds over 256 byte values are 5.55 nats; 40 steps reach about 2.9, of walkers with half the samples 3.3.
    check(isinstance(loss, float) and 1.0 < loss < 4.5, f"validation loss is {loss}")
    return job


def write_rows(folder: Path) -> None:
    """Samples of three classes in lines of JSON, that any user may read."""
    lines = ({"x": [math.sin((k + 1) * i) + i % 3 for k in range(4)], "y": i % 3} for i in range(NUM_ROWS))
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    (folder / "rows.jsonl").chmod(0o644)
    folder.chmod(0o755)


def train_on_rows(client: Client, *rule: str) -> Json:
    """Hands in a job over rows, and waits for its end; gives its status."""
    overrides = [word for setting in (*OF_ROWS, *rule) for word in ("--set", setting)]
    submitted, *_ = client.ask("submit", f"/jobs/{TRIALS_FILE}", "--wait", *overrides, limit_s=JOB_S)
    [status] = client.ask("status", str(at(submitted, "job")))
    check(at(status, "state") == "finished", f"{status}")
    return status


def search(client: Client) -> str:
    """Trials side by side; gives the sweep's id."""
    status = train_on_rows(client, "sweep.round_steps=10")
    steps = [at(trial, "num_steps") for trial in items(at(status, "trials"))]
    check(steps == [NUM_STEPS] * NUM_TRIALS, f"trials: {at(status, 'trials')}")
    return str(at(status, "job"))


def choose(client: Client) -> str:
    """Trains on rows that are chosen along the run; gives the job's id."""
    status = train_on_rows(client, *CHOOSING)
    check(at(status, "choice") is not None, f"nothing was chosen: {status}")
    return str(at(status, "job"))


def check_deaths(services: Services, client: Client) -> list[str]:
    """Two jobs at once, a worker of one of them killed, then the coordinator: both finish without a step lost.

    Each stage has two holders, so that one may die; gives the jobs' ids.
    """
    overrides = [word for setting in MORTAL for word in ("--set", setting)]
    jobs = [str(at(client.ask("submit", f"/jobs/{JOB_FILE}", *overrides)[0], "job")) for _ in range(2)]
    wait_until(partial(have_steps, client, jobs, 5), "both jobs train at once", JOB_S)
    kill_all(services.containers("worker")[0])
    wait_until(partial(have_incidents, client, jobs), "the death of a worker is noticed", JOB_S)
    kill_all(services.containers("coordinator")[0])
    services.wait_healthy("coordinator")
    wait_until(partial(are_finished, client, jobs), "both jobs finish", 2 * JOB_S)
    for job in jobs:
        [status] = client.ask("status", job)
        check(at(status, "step") == NUM_MORTAL_STEPS, f"{job}: {status}")
        check(at(status, "num_steps_lost") == 0, f"{job}: {status}")
    return jobs


def kill_all(container: str) -> None:
    """The container's processes die at once, and it is started again as after any crash."""
    script = "import os, signal; os.kill(-1, signal.SIGKILL)"
    _ = attempt(["docker", "exec", container, "python", "-c", script])


def have_steps(client: Client, jobs: Sequence[str], count: int) -> bool:
    """All these jobs run, and have so many steps."""
    known = {at(status, "job"): status for status in client.ask("jobs")}
    return all(
        at(known[job], "state") == "running" and float(str(at(known[job], "step"))) >= count for job in jobs
    )


def have_incidents(client: Client, jobs: Sequence[str]) -> bool:
    """One of these jobs has had a failure, and goes on."""
    return any(client.ask("incidents", job) for job in jobs)


def are_finished(client: Client, jobs: Sequence[str]) -> bool:
    done = attempt(client.command("jobs", "--json"))
    # The coordinator may be away still.
    known = {at(x, "job"): at(x, "state") for x in map(json.loads, done.stdout.splitlines())}
    return done.returncode == 0 and all(known.get(job) == "finished" for job in jobs)


def dashboard_queries() -> Iterator[str]:
    """Every expression of all dashboards, as Grafana sends it."""
    boards: list[Json] = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(DASHBOARDS.iterdir())
    ]
    panels = [panel for board in boards for panel in items(at(board, "panels")) if at(panel, "type") != "row"]
    expressions = [at(target, "expr") for panel in panels for target in items(at(panel, "targets"))]
    expressions += [
        at(annotation, "expr") for board in boards for annotation in items(at(board, "annotations", "list"))
    ]
    for expression in dict.fromkeys(map(str, expressions)):
        yield expression.replace("$__rate_interval", RATE_INTERVAL)


def has_data(prometheus_url: str, query: str, *, since_s: float) -> bool:
    """Prometheus has at least one number for `query` between then and now."""
    end_s = time.time()
    asked = urllib.parse.urlencode({"query": query, "start": since_s, "end": end_s, "step": "5"})
    reply: Json = json.loads(get(f"{prometheus_url}/api/v1/query_range?{asked}"))
    series = items(at(reply, "data", "result"))
    points = [point for one in series for point in items(at(one, "values"))]
    return any(math.isfinite(float(str(at(point, 1)))) for point in points)


def check_queries(services: Services, *, since_s: float) -> int:
    """Asks all of them; gives their number. The last steps may not have been scraped yet, so it asks again."""
    waiting = list(dashboard_queries())
    num_queries = len(waiting)
    deadline = time.monotonic() + ANSWER_S
    while waiting:
        waiting = [q for q in waiting if not has_data(services.prometheus_url, q, since_s=since_s)]
        check(not waiting or time.monotonic() < deadline, "no data for:\n  " + "\n  ".join(waiting))
        time.sleep(1.0 if waiting else 0.0)
    return num_queries


def are_targets_up(services: Services) -> bool:
    """The coordinator and each worker is found and answers."""
    reply: Json = json.loads(get(f"{services.prometheus_url}/api/v1/targets?state=active"))
    healths = [at(target, "health") for target in items(at(reply, "data", "activeTargets"))]
    return healths == ["up"] * (1 + NUM_WORKERS)


def check_alerts(services: Services) -> None:
    """The rules do what their tests say, load, and have nothing to say about a run without faults."""
    services.promtool("check", "config", "/etc/prometheus/prometheus.yml")
    services.promtool("test", "rules", "/etc/prometheus/alerts_test.yml")
    services.promtool("check", "metrics", text=get(services.metrics_url))
    reply: Json = json.loads(get(f"{services.prometheus_url}/api/v1/rules"))
    rules = [rule for group in items(at(reply, "data", "groups")) for rule in items(at(group, "rules"))]
    check(len(rules) > 0 and {at(rule, "health") for rule in rules} == {"ok"}, f"rules: {rules}")
    alerts = [rule for rule in rules if at(rule, "type") == "alerting"]
    firing = [at(rule, "name") for rule in alerts if at(rule, "state") != "inactive"]
    check(firing == [], f"alerts without a reason: {firing}")


def check_drain(services: Services, client: Client) -> None:
    """A worker that is asked to stop hands over, ends well, and is not taken for lost."""
    container = services.containers("worker")[-1]
    run(["docker", "stop", "-t", f"{STOP_S:.0f}", container], limit_s=STOP_S + 10)
    code = at(inspect(container), "State", "ExitCode")
    check(code == 0, f"a drained worker ended with exit code {code}")
    is_over = partial(are_workers_idle, client, NUM_WORKERS - 1)
    wait_until(is_over, "the others are idle, and the drained worker is no longer listed", ANSWER_S)


def are_workers_idle(client: Client, count: int) -> bool:
    """So many workers are known, and all of them wait for work."""
    return [at(worker, "state") for worker in client.ask("workers")] == ["idle"] * count


def check_restart(services: Services, client: Client, jobs: list[str]) -> None:
    """What a coordinator knew, the next one in its place knows."""
    services.compose("restart", "--timeout", f"{STOP_S:.0f}", "coordinator", limit_s=STOP_S + HEALTHY_S)
    services.wait_healthy("coordinator")
    known = {at(status, "job"): at(status, "state") for status in client.ask("jobs")}
    check(known == dict.fromkeys(jobs, "finished"), f"after a restart the jobs are {known}")


def test(services: Services, folder: Path) -> None:
    services.build()
    say("images are built")
    services.up(num_workers=1, devices=MESH)
    services.up()
    wait_until(partial(are_targets_up, services), "all targets of Prometheus are up", ANSWER_S)
    say(f"coordinator, {NUM_WORKERS} workers, one of them a mesh, and Prometheus are healthy")
    check_hardening(services)
    check_images(services)
    client = Client(services, folder)
    check_stranger(client)
    say("no root, no capabilities, no spare packages, no strangers")
    since_s = time.time() - 10.0
    jobs = [*(train(client, *rule) for rule in RULES), search(client), choose(client)]
    say(f"{', '.join(jobs)}: {NUM_STEPS} steps each through {services.address}")
    num_queries = check_queries(services, since_s=since_s)
    say(f"{num_queries} queries of the dashboard have data")
    check_alerts(services)
    check_drain(services, client)
    check_restart(services, client, jobs)
    say("alerts are silent, a worker drained, the coordinator came back with its memory")
    services.up()
    mortal = check_deaths(services, client)
    say(f"{' and '.join(mortal)} at once: a worker and the coordinator killed, no step lost")


def main() -> int:
    """The exit code: 0 if all is well. Everything is taken down before."""
    signal.signal(signal.SIGTERM, _leave)
    with ExitStack() as undo:
        folder, data = (
            undo.enter_context(tempfile.TemporaryDirectory(prefix=f"skein-compose-{of}-"))
            for of in ("client", "data")
        )
        write_rows(Path(data))
        services = Services(Path(data))
        undo.callback(services.down)
        try:
            test(services, Path(folder))
        except CheckError as error:
            print(services.logs(), file=sys.stderr)
            print(f"compose-test: failed: {error}", file=sys.stderr)
            return 1
    say("done")
    return 0


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
