"""A value is small as stored and large as read, or a column that nobody thought of is large.

jsonb keeps a number such as 1e131071 in a few bytes, and writes it with 131,072 digits.
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.webhook import Webhook

NUMBER = "1e131071"


def unlimited(outbox: Outbox) -> None:
    """The table takes any row, as the table of another origin does."""
    outbox.conn.execute("alter table outbox_message_t drop constraint relay_max_event_bytes")


def add(outbox: Outbox, numbers: int, number: int = 1) -> None:
    """Insert an event whose payload has many long numbers."""
    outbox.conn.execute(
        """
        insert into outbox_message_t (host_id, event_type, aggregate_type, aggregate_id, payload, transaction_id)
        values (%s, 'order.placed', 'Order', '1', jsonb_build_object('amount', 1, 'long',
               (select jsonb_agg(1e131071::numeric) from generate_series(1, %s))), gen_random_uuid())
        """,
        (host(number), numbers),
    )


LARGE: list[dict[str, str]] = [
    {"payload": "(select jsonb_agg(1e131071::numeric) from generate_series(1, 200))"},
    {"metadata": "(select jsonb_agg(1e131071::numeric) from generate_series(1, 200))"},
    {"event_type": "repeat('x', 20000000)"},
    {"aggregate_id": "repeat('x', 20000000)"},
    {"aggregate_type": "repeat('x', 20000000)"},
]


def test_relays_own_table_limits_what_is_read(outbox: Outbox, subtests: pytest.Subtests) -> None:
    """100 MB of event_type and 400 MB of aggregate_id were accepted, and 26 MB of digits in 2 kB."""
    for columns in LARGE:
        with subtests.test(next(iter(columns))):
            values = {"payload": "'{}'", "event_type": "'a'"} | columns
            with pytest.raises(psycopg.errors.CheckViolation, match="relay_max_event_bytes"):
                outbox.conn.execute(
                    f"insert into outbox_message_t (host_id, {', '.join(values)})"
                    f" values (gen_random_uuid(), {', '.join(values.values())})".encode()
                )


def test_publish_refuses_what_is_long_as_text(outbox: Outbox) -> None:
    payload = "{" + f'"a": [{", ".join([NUMBER] * 200)}]' + "}"
    with pytest.raises(psycopg.errors.CheckViolation, match="relay_max_event_bytes"):
        outbox.conn.execute(
            "select relay.publish(%s, null, jsonb_build_array(%s::jsonb || jsonb_build_object('payload', %s::jsonb)))",
            (host(1), Jsonb(event()), payload),
        )


def test_a_lagging_sink_reads_no_number_that_is_longer_than_the_limit(outbox: Outbox) -> None:
    """3.6 kB as stored, 39 MB as text."""
    unlimited(outbox)
    outbox.publish(host(1), event(1))
    add(outbox, 300, 2)
    outbox.publish(host(3), event(3))
    with Webhook() as receiver:
        settings = outbox.settings(
            source=outbox.config()["source"] | {"mode": "poll"},
            handlers={"hook": {"type": "http", "url": receiver.url, "start": "beginning"}},
            routes=[{"handlers": ["hook"]}],
        )
        with relaying(settings):
            wait_until(lambda: len(receiver.accepted) == 2)
            outbox.wait_delivered("hook")
        assert sum(len(each.body) for each in receiver.accepted) < 10_000
    assert outbox.column("select by_reference from relay.dead_letter_queue") == [True]


@pytest.mark.rare
@pytest.mark.parametrize("mode", ["auto", "poll"])
def test_a_value_that_no_message_can_hold_is_passed(outbox: Outbox, mode: str) -> None:
    """Above 1 GiB as text the walsender fails, and so does each query: the slot was stuck for good."""
    unlimited(outbox)
    source = outbox.config()["source"] | {"mode": mode}
    settings = outbox.settings(source=source, crash_limit=1)
    outbox.publish(host(1), event(1))
    add(outbox, 8_300, 2)
    outbox.publish(host(3), event(3))
    with relaying(settings):
        wait_until(lambda: outbox.value("select count(*) from projection") == 2, 120)
        if mode == "auto":
            outbox.wait_drained(120)
            outbox.publish(host(4), event(4))
            outbox.wait_drained(60)
    found: list[Any] = outbox.conn.execute(
        "select c_offset, payload, by_reference from relay.dead_letter_queue"
    ).fetchall()
    assert found == [(2, None, True)]
    outbox.assert_complete()
