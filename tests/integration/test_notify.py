"""No NOTIFY by default, so that PREPARE TRANSACTION works; with `poll.listen` it wakes polling, and is always read."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from relay.admin import install
from relay.admin.check import examine
from relay.admin.findings import Severity
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.source import hybrid
from relay.source.outbox import interval
from relay.source.outbox.additions import NOTIFY_TRIGGER
from relay.source.outbox.interval import LISTEN
from relay.source.stream.receiver import Receiver
from tests.outbox import Outbox, event, host, initialise, relaying, wait_until

ADOPTED = """
    create table public.events (id uuid, host_id uuid, event_type text, payload jsonb, c_offset bigint)
"""
INSERT = "insert into {} (id, host_id, event_type, payload) values (gen_random_uuid(), gen_random_uuid(), 'x', '{{}}')"
OWN, OTHER = "public.outbox_message_t", "public.events"


def configured(outbox: Outbox, mode: str = "auto", table: str = OWN, **poll: Any) -> Settings:
    source = {**outbox.config()["source"], "mode": mode, "table": table}
    return outbox.settings(source=source, poll=poll)


def triggers(outbox: Outbox) -> list[str]:
    """The tables that have the trigger."""
    return outbox.column(
        "select tgrelid::regclass::text from pg_trigger where tgname = %s order by 1",
        (NOTIFY_TRIGGER,),
    )


def has_function(outbox: Outbox) -> bool:
    return bool(outbox.value("select to_regprocedure('relay.notify_event()') is not null"))


def notified(outbox: Outbox, table: str) -> int:
    """How many notifications a statement that inserts sends."""
    with psycopg.connect(outbox.relay_dsn, autocommit=True) as conn:
        conn.execute(LISTEN)
        outbox.conn.execute(INSERT.format(table).encode())
        outbox.conn.execute("notify event_channel, 'end'")
        payloads: list[str] = []
        for each in conn.notifies(timeout=10):
            payloads.append(each.payload)
            if each.payload == "end":
                break
        return len(payloads) - 1


@pytest.mark.parametrize("table", [OWN, OTHER])
def test_init_installs_and_removes_the_trigger(outbox: Outbox, table: str) -> None:
    outbox.conn.execute(ADOPTED)
    outbox.give("events")
    assert not triggers(outbox)
    assert not has_function(outbox)
    quiet = configured(outbox, "poll", table)
    listening = configured(outbox, "poll", table, listen=True)
    initialise(quiet)
    assert notified(outbox, table) == 0
    assert initialise(listening) == [f"trigger {NOTIFY_TRIGGER} on {table}"]
    assert notified(outbox, table) == 1
    assert not initialise(listening)
    assert initialise(quiet) == [f"trigger {NOTIFY_TRIGGER} removed from {table}"]
    assert notified(outbox, table) == 0
    assert not triggers(outbox)
    assert not has_function(outbox)
    assert not initialise(quiet)


def test_only_relays_trigger_of_this_outbox_is_removed(outbox: Outbox) -> None:
    outbox.conn.execute(ADOPTED)
    outbox.give("events")
    outbox.conn.execute(
        f"""
        create schema shop;
        create table shop.events (like public.events);
        create function shop.notify_event() returns trigger language plpgsql as 'begin return null; end';
        create trigger {NOTIFY_TRIGGER} after insert on shop.events
            for each statement execute function shop.notify_event()
        """.encode()
    )
    outbox.give("events")
    outbox.give("shop.events")
    for table in (OWN, OTHER):
        initialise(configured(outbox, "poll", table, listen=True))
    initialise(configured(outbox, "poll"))
    initialise(configured(outbox, "poll", "shop.events"))
    assert triggers(outbox) == ["events", "shop.events"]
    assert notified(outbox, OTHER) == 1
    initialise(configured(outbox, "poll", OTHER))
    assert triggers(outbox) == ["shop.events"]
    assert not has_function(outbox)


def test_a_table_in_use_is_not_waited_for_to_remove_the_trigger(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "LOCK_SECONDS", 0.5)
    initialise(configured(outbox, listen=True))
    with psycopg.connect(outbox.publisher_dsn) as publisher:
        publisher.execute(INSERT.format(OWN).encode())
        with pytest.raises(ConfigurationError, match=r"run `relay init` again when it has ended"):
            initialise(configured(outbox))
        # It blocks no other session, and changed nothing.
        publisher.execute(INSERT.format(OWN).encode())
        assert triggers(outbox) == ["outbox_message_t"]
        assert not initialise(configured(outbox, listen=True))
        publisher.commit()
    assert initialise(configured(outbox))


def test_check_compares_the_trigger_with_the_configuration(outbox: Outbox) -> None:
    def found(settings: Settings) -> tuple[Severity, str]:
        (finding,) = (each for each in examine(settings) if each.subject == "notify")
        return finding.level, finding.text

    quiet, listening = configured(outbox), configured(outbox, listen=True)
    assert found(quiet)[0] is Severity.OK
    level, text = found(listening)
    assert level is Severity.WARNING
    assert "has no trigger" in text
    assert "run `relay init`" in text
    initialise(listening)
    assert found(listening)[0] is Severity.OK
    level, text = found(quiet)
    assert level is Severity.WARNING
    assert "still sends a NOTIFY" in text
    assert "run `relay init`" in text
    outbox.conn.execute(f"alter table outbox_message_t disable trigger {NOTIFY_TRIGGER}".encode())
    assert found(listening)[0] is Severity.WARNING
    assert initialise(listening)
    assert found(listening)[0] is Severity.OK


@pytest.mark.parametrize("mode", ["wal", "poll"])
def test_a_publisher_may_prepare_its_transaction(outbox: Outbox, mode: str) -> None:
    settings = configured(outbox, mode)
    with relaying(settings):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        with psycopg.connect(outbox.publisher_dsn) as publisher:
            publisher.execute(
                "select relay.publish(%s, null, %s)", (host(1), Jsonb([event(2), event(3)]))
            )
            publisher.execute(
                "insert into outbox_message_t (host_id, event_type, payload)"
                """ values (%s, 'x', '{"amount": 4}')""",
                (host(2),),
            )
            publisher.execute("prepare transaction 'later'")
    # A relay that starts while it is prepared gets it, too.
    with relaying(settings):
        assert outbox.handled() == 1
        outbox.conn.execute("commit prepared 'later'")
        outbox.publish(host(1), event(5))
        outbox.wait_handled()
    amounts = "select amount::int from projection where host_id = %s order by seq"
    assert outbox.column(amounts, (host(1),)) == [1, 2, 3, 5]
    assert outbox.column(amounts, (host(2),)) == [4]
    outbox.assert_exact()


def listening_sessions(outbox: Outbox) -> int:
    return int(
        outbox.value(
            "select count(*) from pg_stat_activity where datname = current_database() and query = %s",
            (LISTEN,),
        )
    )


def flood(outbox: Outbox) -> None:
    """More notifications than the buffers of a connection hold, 35 MB."""
    outbox.conn.execute(
        "select pg_notify('event_channel', n || repeat('x', 7000)) from generate_series(1, 5000) n"
    )


def queue_is_empty(outbox: Outbox) -> bool:
    return bool(outbox.value("select pg_notification_queue_usage() = 0"))


def test_notifications_are_read_while_polling_is_busy(outbox: Outbox) -> None:
    settings = configured(outbox, "poll", listen=True)
    initialise(settings)
    with relaying(settings), psycopg.connect(outbox.superuser_dsn) as blocker:
        wait_until(lambda: listening_sessions(outbox) == 1)
        blocker.execute("lock table projection")
        outbox.publish(host(1), event(1))
        waiting = (
            "select count(*) from pg_locks where not granted and relation = 'projection'::regclass"
        )
        wait_until(lambda: outbox.value(waiting) > 0)
        flood(outbox)
        assert listening_sessions(outbox) == 1
        wait_until(lambda: queue_is_empty(outbox), 20)
        blocker.rollback()
        outbox.wait_handled()
    outbox.assert_exact()
    assert listening_sessions(outbox) == 0


def test_nobody_listens_while_the_wal_is_read(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: object) -> None:
        raise psycopg.OperationalError("the server ended the stream")

    monkeypatch.setattr(hybrid, "GRACE_SECONDS", 0.3)
    drain = Receiver._drain
    settings = configured(outbox, listen=True)
    initialise(settings)
    with relaying(settings):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        assert listening_sessions(outbox) == 0
        monkeypatch.setattr(Receiver, "_drain", end)
        wait_until(lambda: listening_sessions(outbox) == 1)
        flood(outbox)
        wait_until(lambda: queue_is_empty(outbox))
        outbox.publish(host(1), event(2))
        outbox.wait_handled()
        monkeypatch.setattr(Receiver, "_drain", drain)
        wait_until(lambda: listening_sessions(outbox) == 0)
        flood(outbox)
        assert queue_is_empty(outbox)
        outbox.publish(host(1), event(3))
        outbox.wait_handled()
    outbox.assert_exact()


def test_a_notification_wakes_polling(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interval, "FIRST_SECONDS", 120.0)
    settings = configured(outbox, "poll", listen=True, wait_period_ms=120_000)
    initialise(settings)
    with relaying(settings):
        for number in range(3):
            outbox.publish(host(1), event(number))
            outbox.wait_handled(20)
        listener = "select pg_terminate_backend(pid) from pg_stat_activity where query = %s and datname = %s"
        # relay may find all three before its first wait, which is when it connects.
        wait_until(lambda: outbox.column(listener, (LISTEN, outbox.slot)) == [True])
        # A lost connection is replaced, and what was published meanwhile is found.
        outbox.publish(host(1), event(4))
        outbox.wait_handled(20)
    outbox.assert_exact()


def test_without_notifications_polling_is_quick_after_events(outbox: Outbox) -> None:
    with relaying(configured(outbox, "poll", wait_period_ms=120_000)):
        for number in range(5):
            outbox.publish(host(1), event(number))
            outbox.wait_handled(20)
        assert listening_sessions(outbox) == 0
    outbox.assert_exact()
