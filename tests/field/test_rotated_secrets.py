"""Secrets and certificates change while relay runs: it goes on with the newest, and nothing is dead-lettered.

Public reports: psycopg/psycopg#743, psycopg/psycopg#1042, DataDog/integrations-core#21348, aio-libs/aiomysql#285,
CDCgov/trusted-intermediary#1119, open-metadata/OpenMetadata#28822, brettwooldridge/HikariCP#357, rook/rook#10719,
MagicStack/asyncpg#291, crystaldba/postgres-mcp#169, jordigilh/kubernaut#1055, Adyen/kubectl-rexec#135,
kubernetes-client/python#1768, cozystack/cozystack#3557, linkerd/linkerd2#5888, flant/shell-operator#487.
"""

from __future__ import annotations

import shutil
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest
import standardwebhooks
import trustme
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import SecretStr

from relay.admin.connections import reach
from relay.config import secrets
from relay.config.dsn import DatabaseAccess
from relay.config.handlers import HttpHandler, TlsSettings
from relay.config.secrets import CallSecret
from relay.config.settings import Settings
from relay.demo.embedded import free_port
from relay.faults import ConfigurationError, NoCredentials, describe
from relay.observe.server import listen
from relay.sinks.http import Http
from relay.sinks.tls import Certificates
from relay.store import refusals
from relay.store.connections import connect
from tests import callables
from tests.observing import ask
from tests.outbox import Outbox, event, host, relaying, relaying_until_it_ends, wait_until
from tests.pages import DOCS, blocks
from tests.postgres import EmbeddedServer, Server, start_server
from tests.webhook import Answer, Answers, Webhook

SHORT_INTERVALS = {"wait": 0.2, "max_wait": 0.4, "jitter": 0.01, "defer_after": 0.1}


class Login:
    """A role that needs its password, with relay's rights, and the file that holds the password."""

    def __init__(self, outbox: Outbox, role: str, file: Path) -> None:
        self.outbox, self.role, self.file = outbox, role, file
        self.dsn = outbox.dsn_as(role, "")

    def change(self, password: str) -> None:
        """Change the password in the database, and end the role's sessions."""
        self.outbox.conn.execute(
            sql.SQL("alter role {} password {}").format(
                sql.Identifier(self.role), sql.Literal(password)
            )
        )
        self.cut()

    def cut(self) -> None:
        """End the role's sessions."""
        self.outbox.conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where usename = %s",
            (self.role,),
        )

    def write(self, password: str) -> None:
        """Replace the file as kubelet does: by another one."""
        fresh = self.file.with_suffix(".new")
        fresh.write_text(password + "\n")
        fresh.replace(self.file)

    def settings(self, secret: dict[str, str] | None = None, **more: Any) -> Settings:
        source = {
            **self.outbox.config()["source"],
            "dsn": self.dsn,
            "password": secret or {"file": str(self.file)},
        }
        return self.outbox.settings(source=source, **more)


@pytest.fixture
def login(server: Server, outbox: Outbox, tmp_path: Path) -> Iterator[Login]:
    with outbox.limited_role() as (role, _), needing_password(server, role):
        login = Login(outbox, role, tmp_path / "password")
        login.write("p")
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(login.dsn, password="wrong")
        yield login


@contextmanager
def needing_password(server: Server, role: str) -> Iterator[None]:
    """Let the server ask a role for its password: an embedded one trusts everybody."""
    if not isinstance(server, EmbeddedServer):
        yield
        return
    hba = server.cluster.data / "pg_hba.conf"
    before = hba.read_text()
    hba.write_text(f"host all {role} 127.0.0.1/32 scram-sha-256\n{before}")
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        conn.execute("select pg_reload_conf()")
        wait_until(lambda: is_refused(server.dsn(), role))
        yield
        hba.write_text(before)
        conn.execute("select pg_reload_conf()")


def is_refused(dsn: str, role: str) -> bool:
    try:
        psycopg.connect(dsn, user=role, password="no").close()
    except psycopg.OperationalError:
        return True
    return False


@pytest.mark.parametrize("mode", ["auto", pytest.param("poll", marks=pytest.mark.rare)])
def test_a_rotated_password_is_read_again(
    login: Login, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    outbox = login.outbox
    settings = login.settings()
    settings = settings.model_copy(
        update={"source": settings.source.model_copy(update={"mode": mode})}
    )
    outbox.publish(host(1), event(1), event(2))
    with relaying(settings):
        outbox.wait_handled()
        # The file first, then the database, and the other way round.
        login.write("second")
        login.change("second")
        outbox.publish(host(1), event(3))
        outbox.wait_handled()
        login.change("third")
        outbox.publish(host(1), event(4))
        refused = "no connection to a database is opened; relay ends unless that changes"
        wait_until(lambda: refused in caplog.messages)
        login.write("third")
        outbox.publish(host(2), event(5))
        outbox.wait_handled()
        wait_until(lambda: "connections to a database are opened again" in caplog.messages)
    outbox.assert_exact()
    assert not outbox.column("select 1 from relay.dead_letter_queue")


def test_a_server_may_refuse_a_password_for_replication_alone(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """psycopg/psycopg2#1391, PeerDB-io/peerdb#4495: RDS takes IAM's tokens for other sessions, and relay polls."""
    monkeypatch.setattr(refusals, "REFUSED_SECONDS", 0.5)
    connect_to = psycopg.connect

    def connect_as_rds(conninfo: str, **options: Any) -> Any:
        if options.get("replication"):
            options["user"] = "nobody"
        return connect_to(conninfo, **options)

    monkeypatch.setattr(psycopg, "connect", connect_as_rds)
    settings = outbox.settings()
    with relaying(settings) as service:
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        wait_until(lambda: "does not exist" in (service._source.state().reason or ""))
        threading.Event().wait(2)
        outbox.publish(host(1), event(2))
        outbox.wait_handled()
    assert refusals.refusal(settings.source_dsn) is None
    outbox.assert_exact()


def test_a_whole_connection_string_is_read_again(login: Login, tmp_path: Path) -> None:
    """Dynamic users: the new password is another role's, and the former role may no longer log in."""
    outbox, file = login.outbox, tmp_path / "dsn"
    file.write_text(make_conninfo(login.dsn, password="p"))
    source = {**outbox.config()["source"], "dsn": {"file": str(file)}}
    with relaying(outbox.settings(source=source)):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        file.write_text(outbox.relay_dsn)
        outbox.conn.execute(f"alter role {login.role} nologin".encode())
        login.cut()
        outbox.publish(host(1), event(2))
        outbox.wait_handled()
    outbox.assert_exact()


@pytest.mark.rare
def test_relay_ends_if_the_newest_password_is_refused(
    login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "REFUSED_SECONDS", 2.0)
    outbox, port = login.outbox, free_port()
    settings = login.settings(observe={"listen": f"127.0.0.1:{port}"})
    assert settings.observe.listen is not None
    refused = "source.dsn: refuses relay's credentials: .*password authentication failed.*for 2 s"
    server = listen(settings.observe.listen)
    try:
        with relaying_until_it_ends(settings, refused):
            outbox.publish(host(1), event(1))
            outbox.wait_handled()
            wait_until(lambda: ask(port, "/readyz").status == 200)
            login.change("unknown to the file")
            wait_until(lambda: "refuses relay's credentials" in ask(port, "/readyz").text)
            assert ask(port, "/readyz").status == 503
            assert ask(port, "/livez").status == 200
    finally:
        server.close()
    with (
        pytest.raises(ConfigurationError, match="password authentication failed"),
        reach(settings.source_dsn, "source.dsn"),
    ):
        pass


def test_a_password_that_cannot_be_read_is_told(login: Login) -> None:
    access = login.settings().source_dsn
    connect(access).close()
    login.file.unlink()
    said = f"the file {login.file} cannot be read (No such file or directory)"
    with pytest.raises(NoCredentials) as raised:
        connect(access)
    assert describe(raised.value) == f"NoCredentials: source.dsn: {said}"
    found = refusals.refusal(access)
    assert found is not None
    assert found.text == f"has no credentials: {said}"
    login.write("p")
    connect(access).close()
    assert refusals.refusal(access) is None


def test_a_function_makes_a_password_for_each_connection(
    login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = login.outbox
    monkeypatch.setattr(callables, "PASSWORDS", ["p"])
    with relaying(login.settings({"call": "tests.callables:password"})):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        callables.PASSWORDS.append("next")
        login.change("next")
        outbox.publish(host(1), event(2))
        outbox.wait_handled()
    outbox.assert_exact()


def posting(outbox: Outbox, webhook: Webhook, **more: Any) -> Settings:
    handler = {"type": "http", "url": webhook.url, "retry": {**SHORT_INTERVALS, "attempts": 2}}
    breaker = {"failures": 5, "cool_down": 0.5}
    return outbox.settings(
        handlers={"hook": {**handler, "circuit_breaker": breaker, **more}},
        routes=[{"handlers": ["hook"]}],
    )


@pytest.mark.parametrize("status", [401, pytest.param(403, marks=pytest.mark.rare)])
def test_a_rotated_token_costs_no_event(outbox: Outbox, tmp_path: Path, status: int) -> None:
    token = tmp_path / "token"
    token.write_text("Bearer first")
    accepted = ["Bearer first"]

    def answers(headers: dict[str, str], _: bytes) -> Answer:
        return Answer(204 if headers.get("authorization") == accepted[0] else status)

    with Webhook(answers) as webhook:
        headers = {"authorization": {"file": str(token)}}
        with relaying(posting(outbox, webhook, headers=headers)):
            outbox.fill(5, 1)
            outbox.wait_delivered("hook")
            # The receiver first: 401 until the file has changed.
            accepted[0] = "Bearer second"
            outbox.fill(20, 1)
            wait_until(lambda: len(webhook.requests) > 15)
            token.write_text("Bearer second")
            outbox.wait_delivered("hook")
            # The file first, as a rotation that has an overlap.
            token.write_text("Bearer third")
            accepted[0] = "Bearer third"
            outbox.fill(5, 1)
            outbox.wait_delivered("hook")
        assert sum(webhook.ids().values()) == 30
    assert not outbox.column("select 1 from relay.dead_letter_queue")


def test_a_token_that_was_replaced_meanwhile_is_sent_at_once(
    outbox: Outbox, tmp_path: Path
) -> None:
    """A refusal is answered with the newest token, before anything is deferred."""
    token = tmp_path / "token"
    token.write_text("first")

    def answers(headers: dict[str, str], _: bytes) -> Answer:
        if headers["authorization"] == "second":
            return Answer()
        token.write_text("second")
        return Answer(401)

    with Webhook(answers) as webhook:
        headers = {"authorization": {"file": str(token)}}
        with relaying(posting(outbox, webhook, headers=headers)):
            outbox.publish(host(1), event(1))
            wait_until(lambda: len(webhook.accepted) == 1)
        assert len(webhook.requests) == 2


def test_a_function_makes_a_token_again_after_a_refusal(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callables, "PASSWORDS", ["first"])
    monkeypatch.setattr(secrets, "RENEW_SECONDS", 0.0)

    def answers(headers: dict[str, str], _: bytes) -> Answer:
        return Answer(204 if headers["authorization"] == callables.PASSWORDS[-1] else 401)

    with Webhook(answers) as webhook:
        headers = {"authorization": {"call": "tests.callables:token"}}
        with relaying(posting(outbox, webhook, headers=headers)):
            outbox.publish(host(1), event(1))
            wait_until(lambda: len(webhook.accepted) == 1)
            callables.PASSWORDS.append("second")
            outbox.publish(host(1), event(2), event(3))
            wait_until(lambda: len(webhook.accepted) == 3)
        assert len(webhook.requests) == 4


@contextmanager
def needing_certificates(authority: trustme.CA, server: trustme.CA) -> Iterator[Webhook]:
    """An endpoint with a certificate of `server`, for clients with one of `authority`."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.issue_cert("127.0.0.1").configure_cert(tls)
    tls.verify_mode = ssl.CERT_REQUIRED
    authority.configure_trust(tls)
    with Webhook(tls=tls) as webhook:
        yield webhook


def written(folder: Path, name: str, blob: trustme.Blob) -> str:
    path = folder / name
    blob.write_to_path(str(path))
    return str(path)


def in_place(path: Path, fresh: Path) -> None:
    path.write_bytes(fresh.read_bytes())


def by_link(path: Path, fresh: Path) -> None:
    """As kubelet does: the name leads to the file through a folder that is replaced."""
    link = path.with_name("..data_tmp")
    link.symlink_to(fresh)
    link.replace(path)


@pytest.mark.parametrize(
    ("which", "replace"), [("cert_file", by_link), ("ca_file", in_place)], ids=["cert", "ca"]
)
def test_a_renewed_certificate_is_loaded_again(
    outbox: Outbox, tmp_path: Path, which: str, replace: Callable[[Path, Path], None]
) -> None:
    authority, server, stranger = trustme.CA(), trustme.CA(), trustme.CA()
    right = {
        "cert_file": authority.issue_cert("relay").private_key_and_cert_chain_pem,
        "ca_file": server.cert_pem,
    }
    wrong = {
        "cert_file": stranger.issue_cert("relay").private_key_and_cert_chain_pem,
        "ca_file": stranger.cert_pem,
    }
    tls = {name: written(tmp_path, name, blob) for name, blob in right.items()}
    fresh = Path(written(tmp_path, "fresh", right[which]))
    in_place(Path(tls[which]), Path(written(tmp_path, "wrong", wrong[which])))
    with needing_certificates(authority, server) as webhook:
        outbox.fill(10, 1)
        with relaying(posting(outbox, webhook, tls=tls)):
            wait_until(
                lambda: bool(outbox.column("select 1 from relay.sinks where fault is not null"))
            )
            replace(Path(tls[which]), fresh)
            outbox.wait_delivered("hook")
        assert sum(webhook.ids().values()) == 10
    assert not outbox.column("select 1 from relay.dead_letter_queue")


SIGNING_SECRETS = [
    "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
    "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD",
]


def verifying(known: list[str], refusal: int = 401) -> Answers:
    """An endpoint that verifies signatures with the public library, and knows one secret."""

    def answers(headers: dict[str, str], body: bytes) -> Answer:
        try:
            standardwebhooks.Webhook(known[0]).verify(body, headers)
        except standardwebhooks.WebhookVerificationError:
            return Answer(refusal)
        return Answer()

    return answers


def test_a_receiver_may_change_its_signing_secret_before_or_after_relay(outbox: Outbox) -> None:
    """sandbaseai/sandbase-harness#325, liwala/ay-framework#407, kamu-data/kamu-cli#1339, resend/resend-openapi#114."""
    old, new = SIGNING_SECRETS
    known = [old]
    with Webhook(verifying(known, refusal=400)) as webhook:
        with relaying(posting(outbox, webhook, signing_secret=[new, old])):
            outbox.fill(3, 1)
            outbox.wait_delivered("hook")
            known[0] = new
            outbox.fill(3, 1)
            outbox.wait_delivered("hook")
        assert sum(webhook.ids().values()) == 6
        assert all(len(each.headers["webhook-signature"].split()) == 2 for each in webhook.requests)
    assert not outbox.column("select 1 from relay.dead_letter_queue")


def test_a_signing_secret_in_a_file_is_read_again(outbox: Outbox, tmp_path: Path) -> None:
    known, file = [SIGNING_SECRETS[0]], tmp_path / "secret"
    file.write_text(known[0])
    with Webhook(verifying(known)) as webhook:
        with relaying(posting(outbox, webhook, signing_secret={"file": str(file)})):
            outbox.fill(3, 1)
            outbox.wait_delivered("hook")
            known[0] = SIGNING_SECRETS[1]
            outbox.fill(10, 1)
            wait_until(lambda: any(each.status == 401 for each in webhook.requests))
            file.write_text(known[0])
            outbox.wait_delivered("hook")
        assert sum(webhook.ids().values()) == 13
    assert not outbox.column("select 1 from relay.dead_letter_queue")


def test_the_receiver_of_the_guide_verifies_what_relay_signs(outbox: Outbox) -> None:
    names: dict[str, Any] = {}
    (block,) = (each for each in blocks(page("webhook")) if each.file == "verify.py")
    exec(compile(block.text, "docs/how-to/webhook.md", "exec"), names)
    with Webhook() as webhook:
        with relaying(posting(outbox, webhook, signing_secret=SIGNING_SECRETS[0])):
            outbox.publish(host(1), event("7.30", note="Zoë 😀"))
            wait_until(lambda: len(webhook.requests) == 1)
        (request,) = webhook.requests
    assert names["event_of"](request.headers, request.body) == request.event
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        names["event_of"](request.headers, request.body + b" ")


def test_a_signing_secret_that_is_no_base64_is_told_apart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """standard-webhooks/standard-webhooks#235, polarsource/polar#13522."""

    def warnings(secret: str) -> int:
        caplog.clear()
        handler = {"type": "http", "url": "http://h", "signing_secret": secret}
        Http("hook", HttpHandler.model_validate(handler))
        return len([each for each in caplog.messages if "handlers.hook.signing_secret" in each])

    assert [warnings(each) for each in SIGNING_SECRETS] == [0, 0]
    for secret in ("raw characters", SIGNING_SECRETS[0].removeprefix("whsec_"), "v1,whsec_AAAA"):
        assert warnings(secret) == 1


def page(name: str) -> str:
    return (DOCS / "how-to" / f"{name}.md").read_text()


def test_the_guide_s_token_of_rds_is_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """crystaldba/postgres-mcp#169, sequelize/sequelize#12507: a token is valid for 15 minutes, a connection longer."""
    (block,) = (each for each in blocks(page("secrets")) if each.file == "credentials.py")
    (tmp_path / "credentials.py").write_text(block.text)
    monkeypatch.syspath_prepend(tmp_path)
    tokens: list[str] = []

    class Rds:
        def generate_db_auth_token(self, host: str, port: int, user: str) -> str:
            assert (port, user) == (5432, "relay")
            tokens.append(f"{host}:{port}/?Action=connect&DBUser={user}&X-Amz=%2F{len(tokens)}'")
            return tokens[-1]

    boto3: Any = ModuleType("boto3")
    boto3.client = lambda _: Rds()
    monkeypatch.setitem(sys.modules, "boto3", boto3)
    function = CallSecret("credentials:rds_token")
    access = DatabaseAccess("source.dsn", SecretStr("postgresql://relay@h/shop"), function)
    # Each connection has a token of its own, whatever its characters.
    assert conninfo_to_dict(access.conninfo())["password"] == tokens[0]
    assert conninfo_to_dict(access.conninfo())["password"] == tokens[1] != tokens[0]


def test_a_certificate_is_used_once_its_key_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """envoyproxy/envoy#9359: two files are not replaced at once, unless a folder is."""
    authority = trustme.CA()
    former, newer = authority.issue_cert("relay"), authority.issue_cert("relay")
    names = "cert_file", "key_file"
    files = [tmp_path / name for name in names]
    for file, blob in zip(files, (former.cert_chain_pems[0], former.private_key_pem), strict=True):
        blob.write_to_path(str(file))
    tls = TlsSettings.model_validate(dict(zip(names, files, strict=True)))
    certificates = Certificates("hook", tls)
    first = certificates.context()
    newer.cert_chain_pems[0].write_to_path(str(files[0]))
    assert [certificates.context(), certificates.context()] == [first, first]
    assert len([each for each in caplog.messages if "a certificate has changed" in each]) == 1
    newer.private_key_pem.write_to_path(str(files[1]))
    second = certificates.context()
    assert second is not first
    assert certificates.context() is second
    files[0].unlink()
    assert certificates.context() is second


@pytest.mark.rare
def test_certificates_of_postgresql_are_read_for_each_connection(tmp_path: Path) -> None:
    """The server trusts another CA, and the files of `sslcert`, `sslkey` and `sslrootcert` are replaced."""
    authority = trustme.CA()
    with start_server() as server:
        assert isinstance(server, EmbeddedServer)
        trusted = server.cluster.data / "root.crt"

        def issue(authority: trustme.CA) -> None:
            own = authority.issue_cert("127.0.0.1")
            own.cert_chain_pems[0].write_to_path(str(server.cluster.data / "server.crt"))
            own.private_key_pem.write_to_path(str(server.cluster.data / "server.key"))
            authority.cert_pem.write_to_path(str(trusted))
            for name in ("server.crt", "server.key", "root.crt"):
                path = server.cluster.data / name
                shutil.chown(path, *owner(server.cluster.data))
                path.chmod(0o600)
            mine = authority.issue_cert("relay", common_name="relay_client")
            for name, blob in {
                "client.crt": mine.cert_chain_pems[0],
                "client.key": mine.private_key_pem,
                "root.crt": authority.cert_pem,
            }.items():
                blob.write_to_path(str(tmp_path / name))
                (tmp_path / name).chmod(0o600)

        issue(authority)
        dsn = server.create_database("app")
        with Outbox(dsn) as outbox:
            outbox.install()
            outbox.conn.execute(
                "create role relay_client login replication in role relay;"
                "grant insert, select on projection to relay_client;"
                "grant usage on sequence projection_seq_seq to relay_client"
            )
            hba = server.cluster.data / "pg_hba.conf"
            hba.write_text(f"hostssl all relay_client all cert\n{hba.read_text()}")
            try:
                outbox.conn.execute("alter system set ssl = on")
            except psycopg.errors.InvalidParameterValue:
                pytest.skip("this build of the server has no TLS; Debian's has")
            outbox.conn.execute("alter system set ssl_ca_file = 'root.crt'")
            outbox.conn.execute("select pg_reload_conf()")
            access = make_conninfo(
                dsn,
                user="relay_client",
                sslmode="verify-full",
                sslcert=str(tmp_path / "client.crt"),
                sslkey=str(tmp_path / "client.key"),
                sslrootcert=str(tmp_path / "root.crt"),
            )
            source = {**outbox.config()["source"], "dsn": access}
            with relaying(outbox.settings(source=source)):
                outbox.publish(host(1), event(1))
                outbox.wait_handled()
                issue(trustme.CA())
                outbox.conn.execute("select pg_reload_conf()")
                outbox.conn.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where usename = 'relay_client'"
                )
                outbox.publish(host(1), event(2))
                outbox.wait_handled()
            outbox.assert_exact()


def owner(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_uid, found.st_gid
