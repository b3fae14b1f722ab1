"""Which order holds over several hosts, as docs/explanation/guarantees.md says, "Order over several hosts".

Eventuous/eventuous#222, JasperFx/marten#3122: readers lost what committed later. Here it is which order they have.
"""

from __future__ import annotations

import threading

import psycopg

from tests.outbox import Outbox, host, initialise, wait_until

INSERT = "insert into outbox_message_t (host_id, event_type, payload) values (%s, 'e', %s::jsonb)"
WAITS = "select 1 from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"


def publish(conn: psycopg.Connection[tuple[object, ...]], number: int) -> None:
    conn.execute(INSERT, (host(number), str(number)))


def read(outbox: Outbox, name: str) -> list[int]:
    """Read a reader without lanes to the end, in commits of its own."""
    found: list[int] = []
    read = "select position, id, payload from relay.read(%s)"
    while rows := outbox.reader.execute(read, (name,)).fetchall():
        outbox.reader.execute("select relay.advance(%s, %s)", (name, rows[0][0]))
        found += [row[2] for row in rows if row[1]]
    return found


def declare(outbox: Outbox, name: str) -> None:
    outbox.reader.execute("select relay.declare_reader(%s, start => 'beginning')", (name,))


def test_readers_agree_on_what_was_published_after_a_commit(outbox: Outbox) -> None:
    """Where transactions of two hosts overlap, each reader has its own order; what follows a commit is last in all."""
    declare(outbox, "early")
    with psycopg.connect(outbox.publisher_dsn) as first:
        publish(first, 1)
        publish(outbox.publisher, 2)
        assert read(outbox, "early") == [2]
        first.commit()
    publish(outbox.publisher, 3)
    assert read(outbox, "early") == [1, 3]
    declare(outbox, "late")
    assert read(outbox, "late") == [1, 2, 3]


def test_numbers_without_gaps_are_one_order_for_all(outbox: Outbox) -> None:
    """Publishers take turns: c_offset is the order of the commits, and every reader has it."""
    settings = outbox.settings(source={**outbox.config()["source"], "offsets": "gapless"})
    initialise(settings)
    declare(outbox, "early")
    with (
        psycopg.connect(outbox.publisher_dsn) as first,
        psycopg.connect(outbox.publisher_dsn, autocommit=True) as second,
    ):
        publish(first, 1)
        waiting = threading.Thread(target=publish, args=(second, 2))
        waiting.start()
        wait_until(lambda: bool(outbox.column(WAITS, (second.info.backend_pid,))))
        assert read(outbox, "early") == []
        first.commit()
        waiting.join(30)
    publish(outbox.publisher, 3)
    declare(outbox, "late")
    assert read(outbox, "early") == read(outbox, "late") == [1, 2, 3]
    assert outbox.column("select payload from outbox_message_t order by c_offset") == [1, 2, 3]
