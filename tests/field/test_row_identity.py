"""A row is not its number: c_offset and c_xid of a table that others fill are hostile input.

eventuate-foundation/eventuate-cdc#165 (a column that is not unique is taken for the key), kurrent-io/KurrentDB#1013
(one id, two events), debezium/debezium#2011 (a row that is updated in its own transaction).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from relay.admin import check
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.source import hybrid
from relay.source.outbox.unread import UnreadRows
from tests.outbox import Outbox, host, relaying, wait_until
from tests.webhook import Webhook

COLUMNS = """(id uuid default gen_random_uuid(), host_id uuid not null, event_type text default 'e', payload jsonb,
              transaction_id uuid, part text not null default 'a', c_xid xid8 default pg_current_xact_id(),
              c_offset bigint)"""
INTO_T = "insert into t values (%(id)s, (%(payload)s->>'n')::int)"
LEAST, GREATEST = -(2**63), 2**63 - 1
PLAIN = f"create table own {COLUMNS}"
PARTITIONED = f"""
    {PLAIN} partition by list (part);
    create table own_a partition of own for values in ('a');
    create table own_b partition of own for values in ('b');
"""


@pytest.fixture
def own(database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outbox]:
    """A database with a table `t` for effects; the test creates the outbox `own`."""
    monkeypatch.setattr(hybrid, "AUDIT_SECONDS", 0.1)
    with Outbox(database) as opened:
        opened.conn.execute("create table t (id uuid, n int)")
        yield opened


def settings_of(outbox: Outbox, mode: str = "auto", **more: Any) -> Settings:
    source = {
        "dsn": outbox.relay_dsn,
        "slot": outbox.slot,
        "publication": outbox.slot,
        "table": "public.own",
        "mode": mode,
        **more.pop("source", {}),
    }
    handlers = {"projection": {"type": "sql", "statement": INTO_T}}
    return outbox.settings(source=source, **{"handlers": handlers, **more})


INSERT = b"insert into own (host_id, payload, part, c_offset) values (%s, %s, %s, %s)"


def publish(outbox: Outbox, number: int, part: str = "a", offset: int | None = None) -> None:
    if offset is None:
        outbox.conn.execute(
            "insert into own (host_id, payload, part) values (%s, %s, %s)",
            (host(number % 3), Jsonb({"n": number}), part),
        )
    else:
        outbox.conn.execute(INSERT, (host(number % 3), Jsonb({"n": number}), part, offset))


def applied(outbox: Outbox) -> list[int]:
    return sorted(outbox.column("select n from t"))


def wait_applied(outbox: Outbox, *numbers: int) -> None:
    wait_until(lambda: len(applied(outbox)) >= len(numbers))
    assert applied(outbox) == sorted(numbers)


@pytest.mark.parametrize(
    ("mode", "rows", "business"),
    [("auto", 4, False), ("auto", 60, True), ("poll", 4, False)],
    ids=["one by one", "together", "polled"],
)
def test_rows_of_a_commit_may_share_their_number(
    own: Outbox, mode: str, rows: int, business: bool
) -> None:
    """1 of 4 was dropped without a word."""
    own.conn.execute(PARTITIONED.encode())
    settings = settings_of(own, mode)
    own.install_again(settings)
    with relaying(settings):
        own.conn.execute(
            "insert into own (host_id, payload, part, c_offset, transaction_id)"
            " select %s, jsonb_build_object('n', n), case n %% 2 when 0 then 'a' else 'b' end, n / 2, %s::uuid"
            " from generate_series(0, %s) as n",
            (host(1), host(7) if business else None, rows - 1),
        )
        wait_applied(own, *range(rows))
        if mode == "auto":
            own.wait_drained()
            own.wait_compared()
    assert applied(own) == list(range(rows))


def test_events_of_a_commit_may_share_their_id(own: Outbox) -> None:
    own.conn.execute(PARTITIONED.encode())
    settings = settings_of(own)
    own.install_again(settings)
    with relaying(settings):
        own.conn.execute(
            "insert into own (id, host_id, payload) select %s, %s, jsonb_build_object('n', n)"
            " from generate_series(1, 3) as n",
            (host(9), host(1)),
        )
        wait_applied(own, 1, 2, 3)
        own.wait_drained()
        own.wait_compared()
    assert applied(own) == [1, 2, 3]


@pytest.mark.parametrize("offsets", ["sequence", "gapless"])
def test_a_row_that_its_commit_moves_is_one_event(own: Outbox, offsets: str) -> None:
    """The WAL has it twice; gapless gave the second a number of its own, and the event was applied twice."""
    own.conn.execute(PARTITIONED.encode())
    settings = settings_of(own, source={"offsets": offsets})
    own.install_again(settings)
    with relaying(settings):
        with own.conn.transaction():
            publish(own, 1)
            publish(own, 2)
            own.conn.execute("update own set part = 'b' where payload->>'n' = '1'")
        publish(own, 3)
        wait_applied(own, 1, 2, 3)
        own.wait_drained()
        own.wait_compared()
    assert applied(own) == [1, 2, 3]


@pytest.mark.parametrize("mode", ["auto", "poll", "wal"])
def test_numbers_at_their_limits_are_events_like_others(own: Outbox, mode: str) -> None:
    """-2^63 was never polled; 2^63 - 1 ended relay for everybody, also when the row was deleted."""
    own.conn.execute(PLAIN.encode())
    settings = settings_of(own, mode)
    own.install_again(settings)
    for number, offset in enumerate([LEAST, LEAST, -1, 0, GREATEST, GREATEST], 1):
        publish(own, number, offset=offset)
    with relaying(settings):
        wait_applied(own, 1, 2, 3, 4, 5, 6)
        publish(own, 7)
        wait_applied(own, *range(1, 8))
    publish(own, 8, offset=GREATEST)
    with relaying(settings):
        wait_applied(own, *range(1, 9))
    if mode != "wal":
        UnreadRows(settings).next_offset(own.conn)


def test_a_sink_reads_rows_from_before_relay_whatever_their_numbers_are(own: Outbox) -> None:
    own.conn.execute(PLAIN.encode())
    own.conn.execute("alter table own drop column c_xid")
    for number, offset in enumerate([LEAST, -5, 0, 7, GREATEST - 2**62], 1):
        publish(own, number, offset=offset)
    with Webhook() as endpoint:
        settings = settings_of(
            own,
            handlers={"hook": {"type": "http", "url": endpoint.url, "start": "beginning"}},
            routes=[{"handlers": ["hook"]}],
        )
        own.install_again(settings)
        with relaying(settings):
            wait_until(lambda: len(endpoint.ids()) == 5)


@pytest.mark.parametrize("offsets", ["sequence", "gapless"])
def test_init_does_not_number_after_the_last_number(own: Outbox, offsets: str) -> None:
    """Nobody could publish then."""
    own.conn.execute(PLAIN.encode())
    publish(own, 1, offset=GREATEST)
    with pytest.raises(ConfigurationError, match="too few numbers are left"):
        own.install_again(settings_of(own, source={"offsets": offsets}))
    own.conn.execute("update own set c_offset = 1")
    own.install_again(settings_of(own, source={"offsets": offsets}))
    publish(own, 2)


FORGED = (
    "insert into own (host_id, payload, transaction_id, c_xid) values (%s, %s, %s, %s::text::xid8)"
)


@pytest.mark.parametrize(
    ("table", "xid", "others"),
    [(PLAIN, 4_000_000_000, 0), (PLAIN, 2**64 - 1, 60), (PARTITIONED, 2**32 * 3, 60)],
    ids=["alone", "among others", "partitioned"],
)
def test_a_forged_xid_is_a_dead_letter_and_ends_nobody(
    own: Outbox, table: str, xid: int, others: int
) -> None:
    """It was passed over, and ended the group at its next start."""
    own.conn.execute(table.encode())
    settings = settings_of(own)
    own.install_again(settings)
    dead = "select exception from relay.dead_letter_queue where payload->>'n' = '1000'"
    with relaying(settings):
        publish(own, 1999)
        wait_applied(own, 1999)
        with own.conn.transaction():
            own.conn.execute(
                "insert into own (host_id, payload, transaction_id)"
                " select %s, jsonb_build_object('n', n), %s::uuid from generate_series(1, %s) as n",
                (host(1), host(2), others),
            )
            own.conn.execute(FORGED, (host(1), Jsonb({"n": 1000}), host(3), xid))
        publish(own, 2000)
        wait_applied(own, *range(1, others + 1), 1999, 2000)
        wait_until(lambda: own.column(dead) != [])
        own.wait_drained()
    assert f"its c_xid is {min(xid, GREATEST)}" in own.value(dead)
    check.require(settings)
    with relaying(settings):
        publish(own, 2001)
        wait_applied(own, *range(1, others + 1), 1999, 2000, 2001)


def test_a_forged_xid_that_nobody_has_seen_is_named(own: Outbox) -> None:
    own.conn.execute(PLAIN.encode())
    settings = settings_of(own, "poll")
    own.install_again(settings)
    own.conn.execute(FORGED, (host(1), Jsonb({"n": 1}), host(3), 4_000_000_000))
    with pytest.raises(ConfigurationError, match="such as 4000000000 at c_offset 1"):
        check.require(settings)


def test_a_forged_xid_is_named_while_relay_polls(
    own: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    own.conn.execute(PLAIN.encode())
    settings = settings_of(own, "poll")
    own.install_again(settings)
    with relaying(settings):
        publish(own, 1)
        wait_applied(own, 1)
        own.conn.execute(FORGED, (host(1), Jsonb({"n": 2}), host(3), 4_000_000_000))
        publish(own, 3)
        wait_applied(own, 1, 3)
        wait_until(lambda: "c_xid that the server has not assigned yet" in caplog.text)
