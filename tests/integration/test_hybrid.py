"""From the WAL to polling and back: whatever happens to slot and connection, nothing is lost or repeated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from threading import Event, Thread
from typing import Any

import psycopg
import pytest

from relay.faults import RelayError
from relay.service import Service
from relay.source import hybrid, walsender
from relay.source.hybrid import StreamSource
from relay.source.stream import receiver, replication
from relay.source.stream.receiver import Receiver
from relay.source.stream.slot import has_publication
from tests.outbox import (
    Outbox,
    event,
    host,
    initialise,
    relaying,
    stream_and_crash,
    wait_until,
)
from tests.postgres import Server, start_server
from tests.roles import Role


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(hybrid, "AUDIT_SECONDS", 0.5)


@contextmanager
def publishing(outbox: Outbox) -> Iterator[None]:
    """Somebody publishes all the while."""
    done = Event()

    def run() -> None:
        with Outbox(outbox.superuser_dsn) as writer:
            while not done.wait(0.01):
                writer.publish(host(0), event(1), event(2))

    thread = Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def wait_more(outbox: Outbox, events: int = 20) -> None:
    """Wait until relay has gone on."""
    before = outbox.handled()
    wait_until(lambda: outbox.handled() > before + events, 30)


def terminate_readers(outbox: Outbox) -> None:
    outbox.conn.execute(
        "select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s and active",
        (outbox.slot,),
    )


def drop_slot(outbox: Outbox) -> None:
    """Drop the slot, once there is one: relay may be creating it, and a creation that is terminated drops it."""
    slots = "select count(*) from pg_replication_slots where slot_name = %s"
    while True:
        wait_until(lambda: outbox.value(slots, (outbox.slot,)) > 0)
        terminate_readers(outbox)
        try:
            outbox.conn.execute("select pg_drop_replication_slot(%s)", (outbox.slot,))
        except (psycopg.errors.ObjectInUse, psycopg.errors.UndefinedObject):
            continue
        return


def mode(outbox: Outbox) -> str | None:
    return next(iter(outbox.column("select source_mode from relay.groups")), None)


def test_rows_older_than_the_slot_are_read_first(
    outbox: Outbox, engine: str, request: pytest.FixtureRequest
) -> None:
    session = request.getfixturevalue("spark_session") if engine == "spark" else None
    for number in range(50):
        outbox.publish(host(number % 6), event(number), event(number))
    settings = outbox.settings(
        engine,
        source={**outbox.config()["source"], "slot": f"{outbox.slot}_late"},
        group="late",
        poll={"batch_size": 9},
    )
    done = initialise(settings, start="beginning")
    assert any("from beginning on" in line for line in done)
    outbox.publish(host(1), event(1))
    with relaying(settings, session):
        outbox.wait_handled()
    outbox.assert_exact()
    assert outbox.value("select count(*) from projection where transaction_id is not null") == 101


def test_a_stream_that_has_begun_is_noticed_at_once(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows from before the slot, and the sinks, came only after the wait for a commit."""
    monkeypatch.setattr(StreamSource, "_pause", lambda self: 60.0)
    with relaying(outbox.settings()):
        wait_until(lambda: mode(outbox) == "wal", 20)


def test_rows_older_than_the_slot_come_although_nothing_is_published(outbox: Outbox) -> None:
    outbox.fill(20)
    settings = outbox.settings(
        source={**outbox.config()["source"], "slot": f"{outbox.slot}_late"}, group="late"
    )
    initialise(settings, start="31")
    with relaying(settings):
        wait_until(lambda: outbox.handled() == 70)
    assert outbox.value("select min(c_offset) from projection") == 31


def lose_slot(outbox: Outbox) -> None:
    drop_slot(outbox)


def lose_publication(outbox: Outbox) -> None:
    """Its role owns the outbox, so relay makes it again."""
    outbox.conn.execute(f'grant create on database "{outbox.slot}" to {Role.RELAY}'.encode())
    outbox.conn.execute(f"alter table outbox_message_t owner to {Role.RELAY}".encode())
    drop_publication(outbox)
    wait_until(lambda: has_publication(outbox.conn, outbox.settings().source))


def lose_publication_of_another(outbox: Outbox) -> None:
    drop_publication(outbox)
    wait_until(lambda: mode(outbox) == "poll")
    initialise(outbox.settings())


def drop_publication(outbox: Outbox) -> None:
    outbox.conn.execute(f'drop publication "{outbox.slot}"'.encode())
    wait_more(outbox)


def lose_connection(outbox: Outbox) -> None:
    for _ in range(5):
        terminate_readers(outbox)
        wait_more(outbox, 2)


def leave_to_another(outbox: Outbox) -> None:
    """Another client takes the slot and consumes what comes."""
    while True:
        terminate_readers(outbox)
        try:
            taken = outbox.value(
                "select count(*) from pg_logical_slot_get_binary_changes(%s, null, null,"
                " 'proto_version', '1', 'publication_names', %s)",
                (outbox.slot, outbox.slot),
            )
        except psycopg.errors.ObjectInUse:
            continue
        if taken:
            return


def recreate_by_hand(outbox: Outbox) -> None:
    drop_slot(outbox)
    outbox.publish(host(3), event(3))
    with suppress(psycopg.errors.DuplicateObject):
        outbox.conn.execute(
            "select pg_create_logical_replication_slot(%s, 'pgoutput')", (outbox.slot,)
        )


@pytest.mark.parametrize(
    "mishap",
    [
        lose_slot,
        lose_connection,
        leave_to_another,
        *(
            pytest.param(each, marks=pytest.mark.rare)
            for each in (lose_publication, lose_publication_of_another, recreate_by_hand)
        ),
    ],
    ids=lambda mishap: mishap.__name__,
)
def test_nothing_is_lost_or_repeated(
    outbox: Outbox, mishap: Callable[[Outbox], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrid, "RECONNECT_SECONDS", 1.0)
    outbox.publish(host(0), event(0))
    with relaying(outbox.settings()), publishing(outbox):
        for _ in range(2):
            wait_more(outbox)
            mishap(outbox)
        wait_more(outbox)
    with relaying(outbox.settings()):
        outbox.wait_handled()
        wait_until(lambda: mode(outbox) == "wal")
        outbox.wait_drained()
    outbox.assert_exact()


def test_a_slot_that_is_replaced_between_a_lost_connection_and_the_next_start_is_noticed(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """relay stops in order, but without a stream: what the new slot lacks is polled before what it brings."""
    monkeypatch.setattr(receiver, "RECONNECT_SECONDS", (60.0, 60.0))
    outbox.publish(host(3), event(0))
    with relaying(outbox.settings()):
        outbox.wait_handled()
        wait_until(lambda: mode(outbox) == "wal")
        drop_slot(outbox)
    outbox.publish(host(3), event(1))
    outbox.conn.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (outbox.slot,))
    outbox.publish(host(3), event(2))
    with relaying(outbox.settings()):
        outbox.wait_handled()
    assert outbox.column("select amount from projection order by seq") == [0, 1, 2]


def test_a_slot_that_is_recreated_while_the_stream_opens_is_noticed(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between relay's check of the slot and START_REPLICATION, which begins wherever the slot is."""
    starts = 0
    start = walsender.start_replication

    def recreate_and_start(*args: Any) -> None:
        nonlocal starts
        starts += 1
        if starts == 2:
            recreate_by_hand(outbox)
        start(*args)

    monkeypatch.setattr(replication, "start_replication", recreate_and_start)
    outbox.publish(host(3), event(0))
    with relaying(outbox.settings()):
        outbox.wait_handled()
        terminate_readers(outbox)
        wait_until(lambda: starts >= 2 and mode(outbox) == "wal")
        outbox.publish(host(3), event(4))
        outbox.wait_handled()
    assert starts == 3
    outbox.assert_exact()


@pytest.mark.parametrize("found", ["at the start", "by comparison"])
def test_what_one_partition_has_applied_of_a_commit_is_polled_for_the_other_alone(
    outbox: Outbox, found: str
) -> None:
    settings = outbox.settings()
    outbox.publish(host(3), event(0))
    outbox.drain(settings)
    with outbox.conn.transaction():
        for number in (1, 2):
            outbox.publish(host(number), event(number))
    stream_and_crash(settings, tasks=1)
    assert outbox.value("select count(*) from projection") == 2
    if found == "by comparison":
        # As a relay leaves it that does not end by itself.
        outbox.conn.execute("update relay.groups set confirmed_lsn = null")
    # A walsender frees its slot after it has answered the end of the stream.
    active = "select active from pg_replication_slots where slot_name = %s"
    wait_until(lambda: not outbox.value(active, (outbox.slot,)))
    outbox.conn.execute(
        "select pg_replication_slot_advance(%s, pg_current_wal_lsn())", (outbox.slot,)
    )
    with relaying(settings):
        outbox.publish(host(3), event(3))
        outbox.wait_drained()
        outbox.wait_handled()
        outbox.wait_compared()
    assert sorted(outbox.column("select amount from projection")) == [0, 1, 2, 3]
    outbox.assert_exact()


def test_the_slot_is_not_recreated_for_ever(outbox: Outbox) -> None:
    active = "select count(*) from pg_replication_slots where slot_name = %s and active"
    ended = ExitStack()
    ended.enter_context(relaying(outbox.settings()))
    for number in range(4):
        wait_until(lambda: outbox.value(active, (outbox.slot,)) > 0)
        wait_until(
            lambda number=number: (
                outbox.value(  # type: ignore[misc]
                    "select coalesce(max(cardinality(slot_recreations)), 0) from relay.groups"
                )
                == number
            )
        )
        drop_slot(outbox)
    wait_until(lambda: "relay" not in {thread.name for thread in threading.enumerate()})
    with pytest.raises(RelayError, match="lost 3 times within an hour"):
        ended.close()
    outbox.publish(host(1), event(1))
    # A restart alone does not help within the hour.
    with pytest.raises(RelayError, match="make them again with `relay init`, and start relay"):
        Service(outbox.settings()).run()
    outbox.install_again(outbox.settings())
    with relaying(outbox.settings()):
        outbox.publish(host(1), event(2))
        outbox.wait_handled()
        outbox.wait_drained()
    outbox.assert_exact()


def test_a_role_that_may_not_replicate_polls(outbox: Outbox, server: Server) -> None:
    said = "permission denied" if server.major >= 16 else "must be superuser or replication role"
    role = f"weak_{outbox.slot}"
    outbox.conn.execute(
        f"create role {role} login password 'p'; grant relay to {role};"
        f"grant all on all tables in schema public to {role};"
        f"grant usage on sequence projection_seq_seq to {role}".encode()
    )
    try:
        source = {
            **outbox.config()["source"],
            "dsn": outbox.dsn_as(role),
        }
        with relaying(outbox.settings(source=source)):
            outbox.publish(host(1), event(1))
            outbox.wait_handled()
            assert mode(outbox) == "poll"
            assert said in outbox.value("select source_reason from relay.groups")
            outbox.conn.execute(f"alter role {role} replication".encode())
            wait_until(lambda: mode(outbox) == "wal")
            outbox.publish(host(1), event(1))
            outbox.wait_handled()
        outbox.assert_exact()
    finally:
        outbox.conn.execute(f"drop owned by {role}; drop role {role}".encode())


def test_a_stream_that_ends_whenever_it_begins_is_one_outage(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    drain = Receiver._drain
    ended: list[Receiver] = []

    def end(source: Receiver, *_: object) -> tuple[int, bool]:
        ended.append(source)
        raise psycopg.OperationalError("the server ended the stream")

    monkeypatch.setattr(Receiver, "_drain", end)
    with relaying(outbox.settings()):
        outbox.publish(host(1), event(1))
        wait_until(lambda: outbox.handled() == 1)
        assert mode(outbox) == "poll"
        wait_until(lambda: len(ended) > 2)
        assert mode(outbox) == "poll"
        monkeypatch.setattr(Receiver, "_drain", drain)
        wait_until(lambda: mode(outbox) == "wal")
        outbox.publish(host(1), event(2))
        outbox.wait_drained()
    outbox.assert_exact()


@pytest.mark.rare
def test_no_walsender_is_free_and_the_slot_is_invalidated_and_wal_level_is_lowered() -> None:
    settings = {
        "max_wal_senders": "1",
        "max_slot_wal_keep_size": "1MB",
        "checkpoint_timeout": "30s",
    }
    with start_server(settings) as server, Outbox(server.create_database("source")) as outbox:
        outbox.install()
        thief = psycopg.connect(outbox.superuser_dsn, replication="database", autocommit=True)
        with relaying(outbox.settings()):
            outbox.publish(host(1), event(1))
            outbox.wait_handled()
            assert mode(outbox) == "poll"
            thief.close()
            wait_until(lambda: mode(outbox) == "wal")
            outbox.publish(host(1), event(1))
            outbox.wait_drained()
        outbox.conn.execute("create table noise (filler text)")
        for _ in range(6):
            outbox.conn.execute(
                "insert into noise select repeat('x', 1000) from generate_series(1, 5000)"
            )
            outbox.conn.execute("select pg_switch_wal()")
            outbox.publish(host(1), event(1))
            outbox.conn.execute("checkpoint")
        assert outbox.value("select wal_status from pg_replication_slots") == "lost"
        with relaying(outbox.settings()):
            outbox.wait_handled()
            wait_until(lambda: mode(outbox) == "wal")
            outbox.publish(host(1), event(1))
            outbox.wait_drained()
            outbox.wait_handled()
        outbox.assert_exact()
        drop_slot(outbox)
        outbox.conn.execute("alter system set wal_level = replica")
        outbox.conn.close()
        server.stop()
        _without_setting(server, "wal_level")
        server.start()
        outbox.reconnect()
        with relaying(outbox.settings()):
            outbox.publish(host(1), event(1))
            outbox.wait_handled()
            assert mode(outbox) == "poll"
            assert "wal_level=replica" in outbox.value("select source_reason from relay.groups")
        outbox.assert_exact()


def _without_setting(server: Any, name: str) -> None:
    if hasattr(server, "cluster"):
        server.cluster.settings.pop(name, None)
    else:
        pytest.skip("a container's command line cannot be changed")


def test_a_slot_that_somebody_has_advanced_keeps_the_order_and_is_said(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    settings = outbox.settings()
    outbox.publish(host(1), event(0))
    outbox.drain(settings)
    outbox.publish(host(1), event(1))
    outbox.conn.execute(
        "select pg_replication_slot_advance(%s, pg_current_wal_lsn())", (outbox.slot,)
    )
    outbox.publish(host(1), event(2))
    with relaying(settings):
        outbox.wait_handled()
        outbox.wait_drained()
    assert any(r.getMessage().startswith("another client has advanced") for r in caplog.records)
    assert outbox.column("select amount from projection order by seq") == [0, 1, 2]


def test_rows_that_are_deleted_while_a_killed_relay_is_away_come_from_the_slot(
    outbox: Outbox,
) -> None:
    settings = outbox.settings()
    outbox.publish(host(1), event(0))
    outbox.drain(settings)
    # As a relay leaves it that is killed.
    outbox.conn.execute("update relay.groups set confirmed_lsn = null")
    outbox.publish(host(1), event(1))
    outbox.conn.execute("delete from outbox_message_t")
    with relaying(settings):
        outbox.wait_drained()
    assert outbox.column("select amount from projection order by seq") == [0, 1]


def test_what_a_slot_may_lack_is_polled_although_relay_was_stopped_before(outbox: Outbox) -> None:
    settings = outbox.settings()
    outbox.publish(host(1), event(0))
    outbox.drain(settings)
    outbox.publish(host(1), event(1))
    outbox.conn.execute(
        "select pg_replication_slot_advance(%s, pg_current_wal_lsn())", (outbox.slot,)
    )
    source = StreamSource(settings)
    source.start()
    wait_until(lambda: source.receiver.state.incomplete)
    source.stop()
    source.close()
    outbox.publish(host(1), event(2))
    with relaying(settings):
        outbox.wait_handled()
    assert outbox.column("select amount from projection order by seq") == [0, 1, 2]
