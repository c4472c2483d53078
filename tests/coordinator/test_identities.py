"""Identities at a coordinator that serves on loopback with certificates on."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import grpc
import pytest
from grpc import aio

from client.aio import AsyncClient
from client.cli import run
from coordinator.identity.__main__ import run as init
from coordinator.identity.office import ADMIN_FILE, FOLDER, IdentityOffice
from coordinator.identity.register import Register
from coordinator.lead.addresses import FOLDER as ADDRESSES_FOLDER
from coordinator.lead.addresses import KEPT_S, CoordinatorAddress, SharedAddresses
from coordinator.service.calls import BusyError
from coordinator.service.identity import MAX_OF_HOST, Enrol
from coordinator.serving import Serving, ServingOptions
from coordinator.telling.metrics import CoordinatorMetrics
from skein.config.quota import UNBOUNDED, QuotasSpec
from skein.errors import LocalError, RemoteError, UserError
from skein.protocol.messages.directives import Welcome
from skein.types import JobId, Step
from skein.wire import codec
from skein.wire.channel import Lane, open_channel, open_enrolment_channel
from skein.wire.context import Context
from skein.wire.credentials import Credentials, Wallet
from skein.wire.extra import PutStart
from skein.wire.identity.authority import LIFE_S, Authority
from skein.wire.identity.enrolling import enrol, renew_wallet, renewed, renewed_if_due
from skein.wire.identity.joining import JoinLine
from skein.wire.identity.names import LOCAL, Caller, CallerRole
from skein.wire.identity.passport import Passport
from skein.wire.v1 import (
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    identity_pb2,
    identity_pb2_grpc,
    jobs_pb2,
    jobs_pb2_grpc,
)
from tests.coordinator.builders import WAIT_S, checkpointed, hello, plan_at_once
from tests.coordinator.serving import ScriptedWorker
from tests.coordinator.test_service_files import FILE, log_with_steps
from worker.joining import identity_by


def shared_of(folder: Path, address: str = "a:1", enrol_address: str = "a:2") -> SharedAddresses:
    """Addresses below `folder`, where one coordinator has announced these."""
    shared = SharedAddresses(folder / ADDRESSES_FOLDER)
    shared.announce(CoordinatorAddress(address=address, enrol_address=enrol_address))
    return shared


class Cluster:
    """A coordinator with certificates, and its admin."""

    def __init__(self, running: Serving, state_dir: Path) -> None:
        self.running = running
        self.target = running.where().address
        self.admin = Passport.load(state_dir / FOLDER / ADMIN_FILE)

    @asynccontextmanager
    async def channel(self, passport: Passport) -> AsyncIterator[aio.Channel]:
        shown = Credentials(wallet=Wallet(passport))
        async with open_channel(self.target, Lane.CONTROL, credentials=shown) as channel:
            yield channel

    async def line(
        self, role: str = "worker", *, life_s: float = 60.0, uses: int = 1, namespace: str = ""
    ) -> JoinLine:
        request = identity_pb2.CreateTokenRequest(role=role, life_s=life_s, uses=uses, namespace=namespace)
        async with self.channel(self.admin) as channel:
            reply = await identity_pb2_grpc.IdentitiesStub(channel).CreateToken(request)
        return JoinLine.parse("line", reply.line)

    async def passport(self, name: str, role: str = "worker", *, namespace: str = "") -> Passport:
        return await enrol(await self.line(role, namespace=namespace), name, clock=time.time)

    async def revoke(self, name: str, role: str = "worker") -> None:
        request = identity_pb2.RevokeRequest(role=role, name=name)
        async with self.channel(self.admin) as channel:
            await identity_pb2_grpc.IdentitiesStub(channel).Revoke(request)

    async def version(self, passport: Passport) -> int:
        async with self.channel(passport) as channel:
            return (await jobs_pb2_grpc.JobsStub(channel).Version(jobs_pb2.VersionRequest())).epoch


@asynccontextmanager
async def cluster(state_dir: Path, *, quotas: QuotasSpec = UNBOUNDED) -> AsyncIterator[Cluster]:
    options = ServingOptions(state_dir=state_dir, has_certificates=True, metrics_port=0, quotas=quotas)
    running = await Serving.start(options, plan_at_once)
    try:
        async with asyncio.timeout(4 * WAIT_S):
            yield Cluster(running, state_dir)
    finally:
        await running.stop()


def test_an_authority_is_made_before_its_coordinator_and_kept_by_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--state-dir", str(tmp_path), "--advertise", "lab.example"]
    assert init(asked) == 0
    said = capsys.readouterr().out
    made = Passport.load(tmp_path / FOLDER / ADMIN_FILE)
    assert f"identity of its admin: {tmp_path / FOLDER / ADMIN_FILE}\n" in said
    assert (made.addresses, made.enrol_addresses) == ("lab.example:7411", "lab.example:7413")
    assert made.caller.role is CallerRole.ADMIN
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / FOLDER).iterdir() if path.suffix != ".pem"}
    assert modes == {0o600}
    assert init(asked) == 0
    assert "as it was" in capsys.readouterr().out
    assert Passport.load(tmp_path / FOLDER / ADMIN_FILE).key == made.key
    assert init(["--state-dir", str(tmp_path), "--advertise", "lab:example:7"]) == 2
    assert "give host:port" in capsys.readouterr().err


async def test_whoever_has_a_line_joins_under_a_name_and_renews(tmp_path: Path) -> None:
    async with cluster(tmp_path) as known:
        mine = await known.passport("w-1")
        assert mine.caller == Caller(name="w-1", role=CallerRole.WORKER)
        assert await known.version(mine) == 1
        again = await renewed(mine, clock=time.time)
        assert again.key == mine.key
        assert again.certificate != mine.certificate
        assert await known.version(again) == 1


async def test_a_line_lets_in_as_many_as_it_says_for_as_long_as_it_says(tmp_path: Path) -> None:
    async with cluster(tmp_path) as known:
        line = await known.line(uses=2)
        for name in ("a", "b"):
            await enrol(line, name, clock=time.time)
        with pytest.raises(
            UserError, match=r"is used up; get another line .*skein token create --role worker"
        ):
            await enrol(line, "c", clock=time.time)
        with pytest.raises(UserError, match="is not known here"):
            await enrol(replace(line, secret="x" * 43), "c", clock=time.time)
        with pytest.raises(UserError, match=r"belongs to another key until"):
            await enrol(await known.line(), "a", clock=time.time)


async def test_tokens_identities_and_revocations_outlive_the_coordinator(tmp_path: Path) -> None:
    async with cluster(tmp_path) as known:
        line, kept, revoked = (
            await known.line(),
            await known.passport("kept"),
            await known.passport("revoked"),
        )
        await known.revoke("revoked")
        admin = known.admin
    async with cluster(tmp_path) as known:
        assert await known.version(kept) == 2
        assert await known.version(admin) == 2
        with pytest.raises(aio.AioRpcError, match="worker revoked was revoked"):
            await known.version(revoked)
        assert known.admin.key == admin.key
        moved = replace(line, addresses=known.admin.addresses, enrol_addresses=known.admin.enrol_addresses)
        assert (await enrol(moved, "late", clock=time.time)).caller.name == "late"


async def test_a_worker_that_claims_the_name_of_another_is_refused_and_the_other_stays(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as known:
        one, two = await known.passport("one"), await known.passport("two")
        async with known.channel(one) as honest, known.channel(two) as hostile:
            worker = ScriptedWorker(honest)
            await worker.say(hello("one"))
            assert isinstance(await worker.hear(), Welcome)
            liar = ScriptedWorker(hostile)
            await liar.say(hello("one"))
            assert await liar.call.code() is grpc.StatusCode.PERMISSION_DENIED
            assert "the certificate is that of worker two" in str(await liar.call.details())
            async with known.channel(known.admin) as channel:
                status = await jobs_pb2_grpc.JobsStub(channel).Workers(jobs_pb2.WorkersRequest())
            assert [(x.worker, x.state) for x in status.workers] == [("one", jobs_pb2.WORKER_STATE_IDLE)]


async def test_workers_outside_a_job_upload_and_read_no_checkpoint_however_many_calls_they_hold(
    tmp_path: Path,
) -> None:
    log_with_steps(tmp_path, checkpointed("digits-1", 3, FILE))
    start = PutStart(job=JobId("digits-1"), version=Step(5), name=FILE.name, num_bytes=1 << 30)
    async with cluster(tmp_path) as known, AsyncExitStack() as opened:
        passports = [await known.passport(f"outsider{number}") for number in range(4)]
        channels = [await opened.enter_async_context(known.channel(each)) for each in passports]
        uploads = [checkpoint_pb2_grpc.CheckpointStub(each).Put() for each in channels for _ in range(12)]  # type: ignore[call-arg]
        for upload in uploads:
            await upload.write(codec.PUT_PART.encode(start))
        assert {await upload.code() for upload in uploads} == {grpc.StatusCode.FAILED_PRECONDITION}
        assert "was not asked to save version 5 of digits-1" in str(await uploads[0].details())
        request = checkpoint_pb2.GetRequest(job="digits-1", version=3, name=FILE.name)
        with pytest.raises(aio.AioRpcError, match="is with no job that reads checkpoints of digits-1"):
            [_ async for _ in checkpoint_pb2_grpc.CheckpointStub(channels[0]).Get(request)]
    assert not [path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()]


async def test_a_revoked_worker_is_turned_away_at_once(tmp_path: Path) -> None:
    async with cluster(tmp_path) as known:
        one = await known.passport("one")
        async with known.channel(one) as channel:
            worker = ScriptedWorker(channel)
            await worker.say(hello("one"))
            assert isinstance(await worker.hear(), Welcome)
            await known.revoke("one")
            assert await worker.call.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(UserError, match="was revoked at"):
            await renewed(one, clock=time.time)


async def test_the_port_for_strangers_answers_nothing_but_enrolment(tmp_path: Path) -> None:
    async with cluster(tmp_path) as known:
        channel = open_enrolment_channel(known.admin.enrol_addresses, known.admin.authority)
        async with channel:
            version = jobs_pb2_grpc.JobsStub(channel).Version(jobs_pb2.VersionRequest())
            assert await version.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "no certificate" in str(await version.details())
            made = identity_pb2_grpc.IdentitiesStub(channel).CreateToken(
                identity_pb2.CreateTokenRequest(role="admin", life_s=60, uses=1)
            )
            assert await made.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_clock_that_is_off_is_told_by_how_much(tmp_path: Path) -> None:
    async with cluster(tmp_path) as known:
        line = await known.line()
        with pytest.raises(
            UserError, match=r"clock is (1000|999) s ahead of the coordinator's; set it right"
        ):
            await enrol(line, "a", clock=lambda: time.time() + 1000)
        with pytest.raises(UserError, match=r"clock is (1000|1001) s behind the coordinator's; set it right"):
            await enrol(line, "a", clock=lambda: time.time() - 1000)
        # Neither the line nor the name was used up by that.
        assert (await enrol(line, "a", clock=time.time)).caller.name == "a"


async def test_by_the_command_one_makes_a_line_another_joins_and_is_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    admin = str(tmp_path / FOLDER / ADMIN_FILE)

    async def says(*arguments: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(run, [*arguments])
        return code, *capsys.readouterr()

    async with cluster(tmp_path) as known:
        by_admin = ("--coordinator", known.target, "--identity", admin)
        code, line, told = await says("token", "create", "--role", "viewer", *by_admin)
        assert (code, told.split()[-4:]) == (0, ["once:", "skein", "join", "LINE"])
        (tmp_path / "line").write_text(line)
        elsewhere = known.target.replace("127.0.0.1", "localhost")
        code, told, _ = await says("join", f"@{tmp_path / 'line'}", "--name", "ada", "--at", elsewhere)
        assert code == 0
        assert told.startswith(f"joined {elsewhere},{known.target} as viewer ada of default")
        for named in ((), ("--coordinator", elsewhere)):
            assert (await says("workers", "--json", *named))[0] == 0
        code, _, told = await says("drain", "w1")
        assert (code, "viewer ada may not call Drain" in told) == (1, True)
        code, told, _ = await says("identity", "revoke", "viewer", "ada", *by_admin)
        assert (code, "revoked at" in told) == (0, True)
        code, _, told = await says("workers")
        assert (code, "viewer ada was revoked" in told) == (1, True)
        code, _, told = await says("join", line.strip(), "--name", "eve")
        assert (code, "is used up" in told) == (2, True)
        code, _, told = await says("workers", "--coordinator", known.target)
        assert (code, "viewer ada was revoked" in told) == (1, True)
        (tmp_path / "config" / "skein" / "identity.json").unlink()
        code, _, told = await says("workers", "--coordinator", known.target)
        assert (code, "no certificate here is in force" in told) == (1, True)


async def test_no_name_passes_for_a_connection_without_certificates(tmp_path: Path) -> None:
    async with cluster(tmp_path) as known:
        mine = await known.passport("local", "admin")
        assert mine.caller != LOCAL
        with pytest.raises(UserError, match="use up to 64 letters"):
            await known.passport(LOCAL.name, "admin")
        await known.revoke("local", "admin")
        with pytest.raises(aio.AioRpcError, match="admin local was revoked"):
            await known.version(mine)


async def test_a_certificate_that_counts_does_for_as_long_as_no_next_one_can_be_had(tmp_path: Path) -> None:
    async with cluster(tmp_path) as known:
        mine = await known.passport("w-1")
    assert await renewed_if_due(mine, clock=lambda: mine.renewal_s() + 1) == mine
    with pytest.raises(RemoteError):
        await renewed_if_due(mine, clock=lambda: mine.ends_s + 1)


async def test_a_process_that_slept_past_the_end_of_its_certificate_gets_the_next_one(tmp_path: Path) -> None:
    async with cluster(tmp_path) as known:
        mine = await known.passport("w-1")
        authority = Authority.kept_in(tmp_path / FOLDER, now_s=time.time())
        ended = authority.certify(mine.request(), mine.caller, now_s=time.time() - 2 * LIFE_S)
        wallet = Wallet(replace(mine, certificate=ended))
        dial = partial(open_channel, credentials=Credentials(wallet=wallet))
        await renew_wallet(wallet, dial=dial, at=known.target, clock=time.time)
        assert await known.version(wallet.passport) == 1


def test_the_coordinator_renews_itself_again_after_its_disk_was_full(tmp_path: Path) -> None:
    now_s = time.time()
    office = IdentityOffice(tmp_path, shared_of(tmp_path), clock=lambda: now_s)
    office.lead()
    (tmp_path / ADMIN_FILE).unlink()
    (tmp_path / ADMIN_FILE).mkdir()  # cannot be read, nor replaced
    for _ in range(2):
        before = office.wallet.passport
        now_s = before.renewal_s() + 1
        office.look()
        assert office.wallet.passport != before
    office.close()


@pytest.mark.parametrize("left", [b"", b'{"key": "', b"\xff\xfe" * 300, b"[1, 2]", b"{}"])
async def test_a_damaged_identity_file_is_made_anew_and_refuses_no_start(left: bytes, tmp_path: Path) -> None:
    async with cluster(tmp_path) as known:
        _ = await identity_by(await known.line(), "w-1", "", tmp_path)
    for path in (tmp_path / FOLDER / ADMIN_FILE, tmp_path / "identities" / "w-1.json"):
        path.write_bytes(left)
    async with cluster(tmp_path) as known:
        assert await known.version(known.admin) == 2
        # The name stays with the lost key while that key's certificate counts: a thief of names gets no further.
        with pytest.raises(UserError, match=r"belongs to another key until .*; give another name"):
            await identity_by(await known.line(), "w-1", "", tmp_path)
        other = tmp_path / "identities" / "w-2.json"
        other.touch(mode=0o600)
        other.write_bytes(left)
        again = (await identity_by(await known.line(), "w-2", "", tmp_path)).passport
        assert await known.version(again) == 2


def test_an_identity_that_others_can_read_is_refused_though_it_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "w-1.json"
    path.write_text("")
    path.chmod(0o644)
    with pytest.raises(UserError, match="other users can read it"):
        Passport.load_if_whole(path)


async def test_who_watches_for_longer_than_a_certificate_counts_renews_it(tmp_path: Path) -> None:
    async with cluster(tmp_path) as known:
        mine = await known.passport("ada", "viewer")
        authority = Authority.kept_in(tmp_path / FOLDER, now_s=time.time())
        old = authority.certify(mine.request(), mine.caller, now_s=time.time() - 0.8 * LIFE_S)
        async with AsyncClient(known.target, passport=replace(mine, certificate=old)) as client:
            await client.jobs()
            wallet = client._connection._credentials.wallet
            assert wallet is not None
            assert wallet.passport.renewal_s() > time.time()
            assert await client.jobs() == ()
            await known.revoke("ada", "viewer")
            wallet.take(replace(wallet.passport, certificate=old))
            client._connection._renewed_s = 0.0
            with pytest.raises(UserError, match="was revoked at"):
                await client.jobs()


async def test_a_renewed_passport_knows_of_a_standby_that_came_later(tmp_path: Path) -> None:
    async with cluster(tmp_path) as known:
        mine = await known.passport("w-1")
        shared_of(tmp_path, "b:7411", "b:7413")
        again = await renewed(mine, clock=time.time)
        assert again.addresses == f"{known.target},b:7411"
        assert again.enrol_addresses == f"{mine.enrol_addresses},b:7413"


async def test_an_identity_that_is_kept_goes_where_a_newer_line_leads(tmp_path: Path) -> None:
    async with cluster(tmp_path / "state") as known:
        line = await known.line()
        kept = (await identity_by(line, "w-1", "", tmp_path)).passport
        moved = replace(line, addresses="moved:7411")
        again = (await identity_by(moved, "w-1", "", tmp_path)).passport
        assert again == replace(kept, addresses=f"moved:7411,{known.target}")
        assert (
            await identity_by(line, "w-1", "", tmp_path)
        ).passport.addresses == f"{known.target},moved:7411"


async def test_an_identity_that_is_never_renewed_again_gives_way_to_a_newer_line(tmp_path: Path) -> None:
    async with cluster(tmp_path / "state") as known:
        kept = (await identity_by(await known.line(), "w-1", "", tmp_path)).passport
        await known.revoke("w-1")
        register = Register(tmp_path / "state" / FOLDER)
        authority = Authority.kept_in(tmp_path / "state" / FOLDER, now_s=time.time())
        ended = authority.certify(kept.request(), kept.caller, now_s=time.time() - 2 * LIFE_S)
        replace(kept, certificate=ended).save(tmp_path / "identities" / "w-1.json")
        with register._change() as database:
            database.execute("UPDATE identities SET ends_s = 1 WHERE role = 'worker'")
        anew = (await identity_by(await known.line(), "w-1", "", tmp_path)).passport
        assert anew.key != kept.key
        assert await known.version(anew) == 1


async def test_a_revoked_admin_of_the_state_directory_stays_so_and_another_takes_its_place(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as known:
        stolen, other = known.admin, await known.passport("ada", "admin")
        known.admin = other
        await known.revoke("admin", "admin")
        with pytest.raises(aio.AioRpcError, match="admin admin was revoked"):
            await known.version(stolen)
        second = Passport.load(tmp_path / FOLDER / ADMIN_FILE)
        assert (second.caller.name, await known.version(second)) == ("admin-2", 1)
    async with cluster(tmp_path) as known:
        with pytest.raises(aio.AioRpcError, match="admin admin was revoked"):
            await known.version(stolen)
        with pytest.raises(UserError, match="was revoked at"):
            await renewed(replace(stolen, enrol_addresses=known.admin.enrol_addresses), clock=time.time)
        assert known.admin.key == second.key
        assert await known.version(known.admin) == 2


def test_lines_name_all_coordinators_that_were_seen_of_late(tmp_path: Path) -> None:
    now_s = time.time()
    a, b = (
        SharedAddresses(tmp_path / ADDRESSES_FOLDER, clock=lambda: now_s),
        SharedAddresses(tmp_path / ADDRESSES_FOLDER, clock=lambda: now_s),
    )
    first, second = (IdentityOffice(tmp_path, shared, clock=lambda: now_s) for shared in (a, b))

    def named(office: IdentityOffice) -> tuple[str, str]:
        line, _ = office.new_line(CallerRole.WORKER, "", life_s=60.0, uses=1)
        return line.addresses, line.enrol_addresses

    a.announce(CoordinatorAddress(address="a:7411", enrol_address="a:7413"))
    first.lead()
    b.announce(CoordinatorAddress(address="b:7411", enrol_address="b:7413"))
    assert named(first) == ("a:7411,b:7411", "a:7413,b:7413")
    second.lead()
    assert named(second) == ("b:7411,a:7411", "b:7413,a:7413")
    assert Passport.load(tmp_path / ADMIN_FILE).addresses == "b:7411,a:7411"
    now_s += KEPT_S + 1
    assert named(second) == ("b:7411", "b:7413")
    first.close()
    second.close()


class Stranger:
    """The context of a newcomer's call."""

    def peer(self) -> str:
        return "ipv4:10.0.0.7:4711"


async def test_newcomers_that_crowd_in_hold_up_nothing_else_and_are_refused_beyond_a_number(
    tmp_path: Path,
) -> None:
    office, other = IdentityOffice(tmp_path, shared_of(tmp_path)), Register(tmp_path)
    enrol_, context = Enrol(office), cast(Context, Stranger())
    request = office.wallet.passport.request()
    asked = identity_pb2.EnrolRequest(token="t", secret="s", name="eve", request=request)
    with other._change():  # until then nobody else writes
        calls = [asyncio.ensure_future(enrol_.Enrol(asked, context)) for _ in range(MAX_OF_HOST)]
        await asyncio.to_thread(int)  # begun after the calls, and held up by none
        assert not any(call.done() for call in calls)
        with pytest.raises(BusyError, match="so many come for certificates already"):
            await enrol_.Enrol(asked, context)
    for call in calls:
        with pytest.raises(UserError, match="is not known here"):
            await call
    enrol_.close()
    office.close()
    other.close()


async def test_a_register_that_cannot_be_written_says_so_in_a_line(tmp_path: Path) -> None:
    office = IdentityOffice(tmp_path, shared_of(tmp_path))
    office.register.close()
    with pytest.raises(LocalError, match=r"identities cannot be written \(.*closed"):
        office.new_line(CallerRole.WORKER, "", life_s=60.0, uses=1)


def test_metrics_say_for_how_long_certificates_count(tmp_path: Path) -> None:
    now_s = time.time()
    office = IdentityOffice(tmp_path, shared_of(tmp_path), clock=lambda: now_s)
    metrics = CoordinatorMetrics()
    office.lead()
    for name in ("here", "gone", "revoked"):
        office.register.enter(Caller(name=name, role=CallerRole.WORKER), "k", now_s=now_s)
    office.revoke(CallerRole.WORKER, "revoked")
    now_s += 3600
    office.look()
    metrics.show_certificates(office.left_s({"here", "revoked", "without"}))
    office.close()
    found = [line for line in metrics.render().decode().splitlines() if line.startswith("skein_certificate")]
    left_s = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in found}
    series = 'skein_certificate_left_seconds{name="%s",role="%s"}'
    assert left_s.pop(series % ("skein", "authority")) > 3000 * 86400
    assert left_s == {
        series % ("here", "worker"): LIFE_S - 3600,
        series % ("coordinator", "coordinator"): pytest.approx(LIFE_S - 3600, abs=1.0),
    }
