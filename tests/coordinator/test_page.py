"""The page: who may look, what is shown, and that it is what the command shows."""

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from client.aio import AsyncClient
from client.cli import run
from coordinator import serving
from coordinator.identity.office import ADMIN_FILE, FOLDER
from coordinator.identity.page_tls import PageTls
from coordinator.serving import Serving, ServingOptions
from skein.protocol.log.records import Record
from skein.protocol.messages.reports import Beat, Count
from skein.types import JobId
from skein.wire.identity.authority import LIFE_S, Authority
from skein.wire.identity.names import Caller
from skein.wire.serving import pages
from skein.wire.shown.plain import plain
from tests.coordinator.builders import (
    WAIT_S,
    checkpointed,
    committed,
    eventually,
    hello,
    job_spec,
    plan_at_once,
    submitted,
)
from tests.coordinator.serving import ScriptedWorker, admin_of, connected, write_log
from tests.support.incidents import incident

JOB = "digits-1"
HOSTILE = "<script>alert(1)</script>"


@asynccontextmanager
async def coordinator(
    state_dir: Path,
    *,
    has_certificates: bool = False,
    host: str = "127.0.0.1",
    balance_loss: float | None = None,
) -> AsyncIterator[Serving]:
    """One with a past: a job of five steps, the last with this balance, and an incident, another that waits."""
    waits = replace(submitted("other-2"), spec=job_spec(name="waits").canonical_json())
    steps = [committed(JOB, step, wall_s=10.0 + step) for step in range(5)]
    steps[-1] = replace(steps[-1], record=replace(steps[-1].record, balance_loss=balance_loss))
    past: list[Record] = [submitted(JOB), waits, *steps, checkpointed(JOB, 5), incident(JOB, seconds=0.6)]
    write_log(state_dir, past)
    options = ServingOptions(
        state_dir=state_dir, has_certificates=has_certificates, metrics_host=host, metrics_port=0
    )
    running = await Serving.start(options, plan_at_once)
    try:
        yield running
    finally:
        await running.stop()


def page_of(running: Serving) -> str:
    return running.where().metrics_address or ""


async def asked(
    running: Serving, path: str, method: str = "GET", tls: ssl.SSLContext | None = None, **fields: str
) -> tuple[int, dict[str, str], bytes]:
    """Status, header and body of an answer."""
    target = page_of(running).replace("0.0.0.0", "127.0.0.1")
    sent = {"Host": target} | {name.replace("_", "-"): value for name, value in fields.items()}
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection(*target.rsplit(":", 1), ssl=tls)
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items()), "\r\n"]
        writer.write("\r\n".join(lines).encode())
        answer = await reader.read()
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *rest = head.decode().split("\r\n")
    found = dict(line.split(": ", 1) for line in rest)
    return int(status.split()[1]), found, body


async def figures(running: Serving, path: str) -> object:
    status, _, body = await asked(running, path)
    assert status == 200, body
    return json.loads(body)


# --- what is shown ---


async def test_the_page_is_one_small_file_that_may_run_nothing_else(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as running:
        status, fields, body = await asked(running, "/")
    assert (status, fields["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert len(body) < 300_000
    policy = dict(part.split(" ", 1) for part in fields["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert policy["script-src"].startswith("'sha256-")
    assert "unsafe" not in fields["Content-Security-Policy"]
    assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b"")
    assert b"https://" not in body
    assert re.search(rb"innerHTML|insertAdjacent|document\.write|\beval\b", body) is None


async def test_every_figure_is_that_of_the_command(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as running, connected(running) as channel:
        worker = ScriptedWorker(channel)
        await worker.say(hello())
        await worker.hear()
        async with AsyncClient(running.where().address) as client:
            job, listed = await client.job(JOB).status(), await client.jobs()
            workers, failed = await client.workers(), await client.incidents(JOB)
            known = await client.job(JOB).history()
        assert await figures(running, f"/api/jobs/{JOB}") == plain(job)
        assert await figures(running, f"/api/jobs/{JOB}/incidents") == plain(failed)
        points = await figures(running, f"/api/jobs/{JOB}/curve")
        assert isinstance(points, list)
        assert [point["step"] for point in points] == [1, 2, 3, 4, 5]
        assert points[-1]["loss"] == plain(job)["loss"]  # type: ignore[index]
        assert len(known) > len(points)
        overview = await figures(running, "/api/overview")
    assert isinstance(overview, dict)
    wanted = [plain(one) for one in listed]
    assert [one | {"spec": None} for one in overview["jobs"]] == [one | {"spec": None} for one in wanted]  # type: ignore[operator]
    ages = {"beat_age_s": None, "measured_age_s": None}
    assert [one | ages for one in overview["workers"]] == [plain(one) | ages for one in workers]  # type: ignore[operator]
    assert overview["num_jobs"] == 2


@pytest.mark.parametrize("balance_loss", [1.25, None], ids=["sparse", "dense"])
async def test_tokens_of_experts_are_those_that_workers_of_a_sparse_job_tell(
    tmp_path: Path, balance_loss: float | None
) -> None:
    told = {"0/1": 3.0, "0/0": 1.0, "10/0": 2.0}
    counts = (Count(name="skein_worker_expert_tokens", label=x, value=told[x]) for x in told)
    async with coordinator(tmp_path, balance_loss=balance_loss) as running, connected(running) as channel:
        worker = ScriptedWorker(channel)
        await worker.say(hello())
        await worker.hear()
        await worker.say(Beat(progress=0, running_s=0.0, statistics=tuple(counts)))
        await eventually(lambda: bool(running.metrics.reported("skein_worker_expert_tokens")))
        await eventually(lambda: bool(running.driver.machine.view.crew_of(JobId(JOB))))
        found = await figures(running, f"/api/jobs/{JOB}/experts")
        job = await figures(running, f"/api/jobs/{JOB}")
    assert isinstance(job, dict)
    assert job["balance_loss"] == balance_loss
    wanted = [{"layer": 0, "tokens": {"0": 1.0, "1": 3.0}}, {"layer": 10, "tokens": {"0": 2.0}}]
    assert found == (wanted if balance_loss else [])
    assert (job["busiest_expert"], job["idlest_expert"]) == ((1.5, 0.5) if balance_loss else (None, None))


async def test_a_curve_is_followed_from_look_to_look(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as running:
        assert len(await figures(running, f"/api/jobs/{JOB}/curve")) == 5  # type: ignore[arg-type]
        running.driver.journal.recorded([committed(JOB, 5, wall_s=30.0)])
        points = await figures(running, f"/api/jobs/{JOB}/curve")
        assert [point["step"] for point in points] == [1, 2, 3, 4, 5, 6]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "path", ["/nothing", "/api/jobs/none", "/api/jobs/none/curve", f"/api/jobs/{HOSTILE}"]
)
async def test_what_is_not_there_is_not_found_and_not_repeated(tmp_path: Path, path: str) -> None:
    async with coordinator(tmp_path) as running:
        status, fields, body = await asked(running, path)
    assert status == 404
    assert fields["Content-Type"].startswith("text/plain")
    assert HOSTILE.encode() not in body


# --- who may look ---


async def test_with_certificates_a_link_lets_one_browser_in_once(tmp_path: Path) -> None:
    async with coordinator(tmp_path, has_certificates=True) as running:
        for path in ("/", "/api/overview", "/api/live", f"/api/jobs/{JOB}"):
            status, fields, body = await asked(running, path)
            assert (status, body) == (401, b"To look at this page, run: skein page\n"), path
        async with AsyncClient(running.where().address, passport=admin_of(tmp_path)) as client:
            url = await client.page()
        assert url.startswith(f"http://{page_of(running)}/login?link=")
        login = url.partition(page_of(running))[2]
        assert (await asked(running, login, method="HEAD"))[0] == 401
        status, fields, _ = await asked(running, login)
        cookie, *how = fields["Set-Cookie"].split("; ")
        assert status == 200
        assert {"HttpOnly", "SameSite=Strict"} <= set(how)
        assert (await asked(running, "/", Cookie=f"other=1; {cookie}"))[0] == 200
        assert (await asked(running, "/api/overview", Cookie=cookie))[0] == 200
        assert (await asked(running, "/api/overview", Cookie=f"{cookie}x"))[0] == 401
        status, _, body = await asked(running, login)
        assert (status, body) == (401, b"This link was used, or is over. For another one, run: skein page\n")


async def test_beyond_this_machine_the_page_is_encrypted_and_scrapes_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority, admin = tmp_path / "authority.pem", tmp_path / FOLDER / ADMIN_FILE
    async with coordinator(tmp_path, has_certificates=True, host="0.0.0.0") as running:
        command = ["page", "--json", "--authority", str(authority), "--identity", str(admin)]
        called = ["--coordinator", running.where().address]
        assert await asyncio.to_thread(run, [*command, *called]) == 0
        url = urlsplit(json.loads(capsys.readouterr().out)["url"])
        # Verifies the chain, and that the certificate is of this address.
        tls = ssl.create_default_context(cafile=str(authority))
        assert (url.scheme, url.hostname) == ("https", "127.0.0.1")
        login = f"{url.path}?{url.query}"
        status, fields, _ = await asked(running, login)
        assert (status, fields["Location"]) == (308, f"https://{url.netloc}/")
        status, fields, _ = await asked(running, login, tls=tls)
        cookie, *how = fields["Set-Cookie"].split("; ")
        assert (status, "Secure" in how) == (200, True)
        assert (await asked(running, "/api/overview", tls=tls, Cookie=cookie))[0] == 200
        assert (await asked(running, "/api/overview", Cookie=cookie))[0] == 308
        assert (await asked(running, "/metrics"))[0] == (await asked(running, "/metrics", tls=tls))[0] == 200


def test_the_page_has_another_certificate_before_the_last_one_ends() -> None:
    now = [0.0]
    tls = PageTls(Authority.new(now_s=0.0), ("lab", "10.0.0.1"), clock=lambda: now[0])
    first = tls.context()
    now[0] = 0.66 * LIFE_S
    assert tls.context() is first
    now[0] = 0.67 * LIFE_S
    assert tls.context() is not first


async def test_on_this_machine_alone_everybody_may_look_where_nobody_is_asked(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as running:
        async with AsyncClient(running.where().address) as client:
            assert await client.page() == f"http://{page_of(running)}/"
        assert (await asked(running, "/"))[0] == 200


@pytest.mark.parametrize("path", ["/", "/api/overview", "/login?link=x"])
async def test_a_name_that_is_not_ours_is_refused(tmp_path: Path, path: str) -> None:
    async with coordinator(tmp_path) as running:
        assert (await asked(running, path, Host="rebound.example:80"))[0] == 421
        assert (await asked(running, "/metrics", Host="rebound.example:80"))[0] == 200


async def test_what_another_site_asks_for_is_refused(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as running:
        for site, status in (("cross-site", 403), ("same-origin", 200), ("none", 200)):
            assert (await asked(running, "/api/overview", Sec_Fetch_Site=site))[0] == status


# --- news ---


@asynccontextmanager
async def listening(running: Serving) -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await asyncio.open_connection(*page_of(running).rsplit(":", 1))
    writer.write(f"GET /api/live HTTP/1.1\r\nHost: {page_of(running)}\r\n\r\n".encode())
    try:
        async with asyncio.timeout(WAIT_S):
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"Content-Type: text/event-stream" in head
            yield reader
    finally:
        writer.close()


async def news(reader: asyncio.StreamReader) -> object:
    while not (line := await reader.readline()).startswith(b"data: "):
        assert line, "ended"
    return json.loads(line.removeprefix(b"data: "))


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """News come faster than once a second."""
    monkeypatch.setattr(serving, "SAMPLE_S", 0.05)


@pytest.mark.usefixtures("often")
async def test_who_listens_is_told_how_things_are_and_again_when_they_change(tmp_path: Path) -> None:
    async with coordinator(tmp_path) as running, listening(running) as reader:
        first = await news(reader)
        assert {job["job"] for job in first["jobs"]} == {JOB, "other-2"}  # type: ignore[index]
        async with connected(running) as channel:
            worker = ScriptedWorker(channel)
            await worker.say(hello())
            while [x["worker"] for x in (await news(reader))["workers"]] != ["w1"]:  # type: ignore[index]
                pass


@pytest.mark.usefixtures("often")
async def test_listeners_are_few_and_leave_room_for_everything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MAX_LIVE_PER_ADDRESS", 2)
    async with coordinator(tmp_path) as running:
        async with listening(running) as first, listening(running) as second, listening(running) as third:
            await news(third)
            await first.read()
            await news(second)
            assert (await asked(running, "/metrics"))[0] == 200
        board = running._doors.board
        await eventually(lambda: board._num_listening == 0)


async def test_a_listener_that_reads_nothing_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "SECONDS", 0.2)
    async with coordinator(tmp_path) as running:
        board = running._doors.board

        async def huge(_reader: Caller) -> bytes:
            return b"x" * (32 << 20)

        monkeypatch.setattr(board, "_next", huge)
        async with listening(running):
            await eventually(lambda: board._num_listening == 0)


async def test_a_session_that_ends_takes_its_listener_along(tmp_path: Path) -> None:
    async with coordinator(tmp_path, has_certificates=True) as running:
        board = running._doors.board
        link = board.link(admin_of(tmp_path).caller).link
        cookie = (await asked(running, f"/login?link={link}"))[1]["Set-Cookie"].partition(";")[0]
        stream = asyncio.create_task(asked(running, "/api/live", Cookie=cookie))
        await eventually(lambda: board._num_listening == 1)
        board.sessions = type(board.sessions)()
        status, _, body = await stream
    assert status == 200
    assert body.count(b"data: ") <= 1
