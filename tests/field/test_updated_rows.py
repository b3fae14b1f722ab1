"""Rows that are updated after their INSERT, as object-relational mappers do: what is delivered, and who says so."""

from __future__ import annotations

import pytest

from relay.admin.check_source import check_source
from tests.outbox import Outbox, relaying, wait_until

TABLE = """
    create table events (id uuid primary key default gen_random_uuid(), host_id text, event_type text, payload jsonb);
"""
UPDATES = "select n_tup_upd from pg_stat_user_tables where relname = 'events'"
SAVED_TWICE = """
    insert into events (host_id, event_type, payload) values ('a', 'placed', '{"amount": 2}');
    update events set payload = '{"amount": 3}';
"""


@pytest.mark.parametrize(("mode", "delivered"), [("auto", 2), ("poll", 3)])
def test_an_event_that_its_transaction_updates(outbox: Outbox, mode: str, delivered: int) -> None:
    """debezium/debezium#2011, UMC-PRODUCT/umc-product-server#1278. See "Updates of events" in guarantees.md."""
    outbox.conn.execute(TABLE.encode())
    source = {
        **outbox.config()["source"],
        "slot": f"{outbox.slot}_own",
        "publication": f"{outbox.slot}_own",
    }
    settings = outbox.settings(
        group="own",
        source={**source, "table": "public.events", "types": {"host_id": "text"}, "mode": mode},
        poll={"wait_period_ms": 20},
        routes=[{"handlers": ["amounts"]}],
        handlers={
            "amounts": {
                "type": "sql",
                "statement": "insert into projection (amount) values ((%(payload)s->>'amount')::int)",
            }
        },
    )
    outbox.install_again(settings)

    def said() -> list[str]:
        return [
            each.text for each in check_source(outbox.conn, settings) if each.subject == "updates"
        ]

    with relaying(settings):
        outbox.conn.execute(SAVED_TWICE.encode())
        wait_until(lambda: outbox.column("select amount from projection") == [delivered])
    # The server may count a while later.
    wait_until(lambda: outbox.value(UPDATES) == 1)
    expected = ["rows of public.events were updated (1 so far)"] if mode == "auto" else []
    assert [text.partition(":")[0] for text in said()] == expected
