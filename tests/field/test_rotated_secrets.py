"""Secrets and certificates change while relay runs: it goes on with the newest, and nothing is dead-lettered.

Public reports: psycopg/psycopg#743, psycopg/psycopg#1042, DataDog/integrations-core#21348, aio-libs/aiomysql#285,
CDCgov/trusted-intermediary#1119, open-metadata/OpenMetadata#28822, brettwooldridge/HikariCP#357, rook/rook#10719,
MagicStack/asyncpg#291, crystaldba/postgres-mcp#169, jordigilh/kubernaut#1055, Adyen/kubectl-rexec#135,
kubernetes-client/python#1768, cozystack/cozystack#3557, linkerd/linkerd2#5888, flant/shell-operator#487.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import trustme
from psycopg import sql
from psycopg.conninfo import make_conninfo

from relay.admin.connections import reach
from relay.config.settings import Settings
from relay.demo.embedded import free_port
from relay.faults import ConfigurationError
from relay.observe.server import listen
from relay.store import refusals
from tests import callables
from tests.observing import ask
from tests.outbox import Outbox, event, host, relaying, relaying_until_it_ends, wait_until
from tests.postgres import EmbeddedServer, Server
from tests.webhook import Answer, Webhook

SHORT_INTERVALS = {"wait": 0.2, "max_wait": 0.4, "jitter": 0.01, "defer_after": 0.1}


class Login:
    """A role that needs its password, with relay's rights, and the file that holds the password."""

    def __init__(self, outbox: Outbox, role: str, file: Path) -> None:
        self.outbox, self.role, self.file = outbox, role, file
        self.dsn = make_conninfo(outbox.dsn, user=role, password="")

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


@pytest.mark.parametrize("mode", ["auto", "poll"])
def test_a_rotated_password_is_read_again(login: Login, mode: str) -> None:
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
        wait_until(lambda: refusals.refusal(settings.source_dsn) is not None)
        login.write("third")
        outbox.publish(host(2), event(5))
        outbox.wait_handled()
        wait_until(lambda: refusals.refusal(settings.source_dsn) is None)
    outbox.assert_exact()
    assert not outbox.column("select 1 from relay.dead_letter_queue")


def test_a_whole_connection_string_is_read_again(login: Login, tmp_path: Path) -> None:
    """Dynamic users: the new password is another role's, and the former role may no longer log in."""
    outbox, file = login.outbox, tmp_path / "dsn"
    file.write_text(make_conninfo(login.dsn, password="p"))
    source = {**outbox.config()["source"], "dsn": {"file": str(file)}}
    with relaying(outbox.settings(source=source)):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        file.write_text(outbox.dsn)
        outbox.conn.execute(f"alter role {login.role} nologin".encode())
        login.cut()
        outbox.publish(host(1), event(2))
        outbox.wait_handled()
    outbox.assert_exact()


def test_relay_ends_if_the_newest_password_is_refused(
    login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "REFUSED_SECONDS", 3.0)
    outbox, port = login.outbox, free_port()
    settings = login.settings(observe={"listen": f"127.0.0.1:{port}"})
    assert settings.observe.listen is not None
    refused = "source.dsn: refuses relay's credentials for 3 s: .*password authentication failed"
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


def test_a_password_that_cannot_be_read_is_told(
    login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "REFUSED_SECONDS", 1.0)
    outbox = login.outbox
    settings = login.settings()
    with relaying_until_it_ends(settings, f"source.dsn: the file {login.file} cannot be read"):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        login.file.unlink()
        login.cut()


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


@pytest.mark.parametrize("status", [401, 403])
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


@pytest.mark.parametrize("replace", [in_place, by_link])
@pytest.mark.parametrize("which", ["cert_file", "ca_file"])
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
