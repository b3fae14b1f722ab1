"""A session that has become the wrong one, such as a read-only one: it is closed, and the next one is right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import product

import psycopg
import pytest

from relay.config.effects import Effects
from relay.faults import FaultAction, action_for
from relay.pipeline.deferral import rekey
from relay.retention import schedule
from relay.retention.schedule import Schedule
from relay.source.walsender import open_replication
from relay.store import presence
from relay.store.connections import connect, open_pool
from relay.store.handler_sessions import HandlerPool
from relay.store.presence import Presence
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.webhook import Webhook

RECOVERS_SECONDS = 15.0


def read_only_faults(caplog: pytest.LogCaptureFixture) -> bool:
    """Whether relay has logged that a session is read-only."""
    faults = [str(getattr(record, "fault", "")) for record in caplog.records]
    return any("read-only transaction" in fault or "25006" in fault for fault in faults)


@contextmanager
def read_only(outbox: Outbox, role: str) -> Iterator[None]:
    """Make new sessions of a role read-only in the block, and end those that it has, at both ends of a failover."""
    outbox.conn.execute(f"alter role {role} set default_transaction_read_only = on".encode())
    try:
        outbox.conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where usename = %s and pid <> pg_backend_pid()",
            (role,),
        )
        yield
    finally:
        outbox.conn.execute(f"alter role {role} reset default_transaction_read_only".encode())


@pytest.mark.parametrize("mode", ["auto", "poll"])
def test_a_read_only_session_of_the_target_is_not_kept(
    outbox: Outbox,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    """goldsky-io/streamling#65, laravel/framework#53404, cloudnative-pg/cloudnative-pg#1254."""
    monkeypatch.setattr(presence, "CHECK_SECONDS", 0.2)
    with ExitStack() as stack:
        role, dsn = stack.enter_context(outbox.limited_role())
        source = {**outbox.config()["source"], "mode": mode}
        settings = outbox.settings(source=source, target={"dsn": dsn}, poll={"wait_period_ms": 20})
        stack.enter_context(relaying(settings))
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        with read_only(outbox, role):
            outbox.publish(host(2), event(2))
            wait_until(lambda: read_only_faults(caplog))
        outbox.wait_handled(RECOVERS_SECONDS)
    outbox.assert_exact()


def test_a_sink_whose_claim_is_read_only_is_claimed_again(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        webhook = stack.enter_context(Webhook())
        role, dsn = stack.enter_context(outbox.limited_role())
        settings = outbox.settings(
            target={"dsn": dsn},
            handlers={"hook": {"type": "http", "url": webhook.url}},
            routes=[{"handlers": ["hook"]}],
        )
        stack.enter_context(relaying(settings))
        outbox.publish(host(1), event(1))
        wait_until(lambda: len(webhook.accepted) == 1)
        with read_only(outbox, role):
            outbox.publish(host(2), event(2))
            wait_until(lambda: read_only_faults(caplog))
        wait_until(lambda: len(webhook.ids()) == 2, RECOVERS_SECONDS)
        outbox.wait_delivered("hook", RECOVERS_SECONDS)


def test_retention_goes_on_after_a_source_was_read_only(
    outbox: Outbox, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes what is due. citusdata/pg_cron#270, brendanlong/lion-reader#1390."""
    caplog.set_level("INFO")
    settings = outbox.settings(retention={"keep": "1d"})
    outbox.install_again(settings)
    outbox.publish(host(1), event(1))
    with relaying(settings):
        outbox.wait_handled()
        # What the group is past may be removed.
        outbox.wait_compared()
    outbox.conn.execute("delete from relay.readers")
    name = outbox.conn.info.dbname
    outbox.conn.execute(f"alter database {name} set default_transaction_read_only = on".encode())
    monkeypatch.setattr(schedule, "NOTE_SECONDS", 0.05)
    later = datetime.now(UTC) + timedelta(days=2)
    retention = Schedule(settings, lambda: None, lambda _: later)
    retention.start()
    try:
        wait_until(lambda: read_only_faults(caplog))
        outbox.conn.execute(f"alter database {name} reset default_transaction_read_only".encode())
        wait_until(lambda: outbox.value("select count(*) from outbox_message_t") == 0)
    finally:
        retention.close()


def test_every_connection_asks_whether_its_server_is_still_there(outbox: Outbox) -> None:
    """timgit/pg-boss#850, sandbox-quantum/switch#415, PostgREST/postgrest#4670: it idled on a host that was gone."""
    with (
        connect(outbox.relay_dsn) as alone,
        open_pool(outbox.relay_dsn, 1) as pool,
        pool.connection() as pooled,
        open_replication(outbox.settings()) as streaming,
    ):
        for conn in (alone, pooled, streaming):
            assert conn.info.get_parameters()["keepalives_idle"] == "30"


def test_a_session_that_waits_is_not_ended_as_idle(outbox: Outbox) -> None:
    """hapostgres/pg_auto_failover#1028: the claims of sinks ended with their sessions."""
    outbox.conn.execute(f"alter database {outbox.slot} set idle_session_timeout = '1s'".encode())
    handlers = HandlerPool(outbox.relay_dsn, 1, lambda _: None, durable=True, code_of=[])
    with (
        closing(handlers),
        connect(outbox.relay_dsn) as alone,
        open_pool(outbox.relay_dsn, 1) as pool,
        pool.connection() as pooled,
        handlers.connection() as handling,
    ):
        for conn in (alone, pooled, handling):
            assert conn.execute("show idle_session_timeout").fetchone() == ("0",)


@pytest.mark.parametrize("attribute", ["sqlstate", "pgcode"])
def test_an_outage_that_another_driver_reports_is_no_fault_of_the_event(attribute: str) -> None:
    """MagicStack/asyncpg#121: a handler's own session, of asyncpg or psycopg2, was read-only or of another client."""

    class ServerError(Exception):
        """An error as those drivers raise it."""

    def judged(state: str) -> FaultAction:
        error = ServerError()
        setattr(error, attribute, state)
        return action_for(error)

    assert {judged(state) for state in ("25006", "26000", "40P01", "57P01")} == {FaultAction.RETRY}
    assert judged("23505") is FaultAction.DEAD_LETTER


def test_an_instance_is_not_shown_to_a_standby_instead_of_the_primary(
    outbox: Outbox, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """timescale/prometheus-postgresql-adapter#91: the lock was held where nobody looks for it, without an end."""
    caplog.set_level("DEBUG")
    monkeypatch.setattr(presence, "CHECK_SECONDS", 0.1)

    def shown() -> bool:
        return bool(presence.instances(outbox.conn, "default"))

    with ExitStack() as stack:
        role, dsn = stack.enter_context(outbox.limited_role())
        settings = outbox.settings(target={"dsn": dsn})
        instance = Presence(
            dsn, "default", Effects.of(settings), False, partial(rekey, settings), lambda: None
        )
        stack.enter_context(closing(instance))
        instance.start()
        wait_until(shown)
        with read_only(outbox, role):
            wait_until(lambda: not shown())
            wait_until(lambda: read_only_faults(caplog))
            assert not shown()
        wait_until(shown)


FAULTS: list[tuple[BaseException, bool]] = [
    (
        psycopg.errors.ReadOnlySqlTransaction("cannot execute INSERT in a read-only transaction"),
        True,
    ),
    (psycopg.errors.InternalError_("cache lookup failed for relation 1"), True),
    (psycopg.errors.InvalidSqlStatementName("prepared statement does not exist"), True),
    (psycopg.errors.FdwUnableToEstablishConnection("could not connect to server"), True),
    (psycopg.errors.DeadlockDetected("deadlock detected"), False),
    (psycopg.errors.QueryCanceled("canceling statement due to statement timeout"), False),
    (psycopg.errors.CheckViolation("new row violates check constraint"), False),
    (ValueError("no amount"), False),
]


def test_a_session_is_replaced_after_a_fault_that_may_be_its_own(
    outbox: Outbox, subtests: pytest.Subtests
) -> None:
    def nothing(_: psycopg.Connection[object]) -> None:
        """No handler to prepare a session for."""

    handlers = HandlerPool(outbox.relay_dsn, 1, nothing, durable=True, code_of=["python"])
    own = open_pool(outbox.relay_dsn, 1)
    lenders = {"of handlers": handlers.transaction, "relay's own": own.connection}
    with closing(handlers), closing(own):
        for (fault, replaced), wrapped, (of, lend) in product(
            FAULTS, [False, True], lenders.items()
        ):
            with subtests.test(f"{fault!r} {of}", wrapped=wrapped):
                pids = []
                for _ in range(2):
                    with suppress(type(fault), RuntimeError), lend() as conn:
                        pids.append(conn.info.backend_pid)
                        if wrapped:
                            raise RuntimeError from fault
                        raise fault
                assert (pids[0] != pids[1]) is replaced
