"""The cursor over a difference: what it reads for a consumer that has read a part, and which connections it has."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import psycopg
import pytest
from psycopg.types.json import Jsonb

from relay.model.batch import Share
from relay.model.snapshots import BEGINNING
from relay.model.transactions import Mask
from relay.pipeline.routing import BatchRouter
from relay.source.outbox.cursor import Cursor
from relay.source.outbox.differences import Difference
from relay.source.outbox.selection import Unread, everywhere, whole
from relay.source.server import current_position
from relay.store.connections import Connection, connect
from tests.outbox import Outbox, event, host

PARTITIONS = 4


class Lender:
    """Lends a connection, and knows how many are lent."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self.lent = 0

    @contextmanager
    def __call__(self) -> Iterator[Connection]:
        self.lent += 1
        try:
            with closing(connect(self._dsn)) as conn:
                yield conn
        finally:
            self.lent -= 1


def _publish(outbox: Outbox, chance: random.Random, transactions: int) -> None:
    """Publish in transactions of several hosts and business transactions; some rows are older than c_xid."""
    with psycopg.connect(outbox.superuser_dsn) as conn:
        for _ in range(transactions):
            for _ in range(chance.randint(1, 3)):
                conn.execute(
                    "select relay.publish(%s, %s, %s)",
                    (host(chance.randint(0, 9)), host(99), Jsonb([event(1)] * 2)),
                )
            conn.rollback() if chance.random() < 0.2 else conn.commit()
        conn.execute("update outbox_message_t set c_xid = null where c_offset <= 12")


def _read(
    outbox: Outbox, cursor: Cursor, between: Difference, unread: Unread, kept: bool
) -> list[int]:
    """The c_offsets of what is read of a difference, in portions."""
    router = BatchRouter(outbox.settings())
    found: list[int] = []
    with closing((cursor.kept_plan if kept else cursor.plan)(between)) as portions:
        for portion in portions:
            for transactions, _ in cursor.read(portion.shares, unread):
                for each in transactions:
                    found += [row.c_offset or 0 for row in router.events(each)]
    return found


@pytest.mark.parametrize("kept", [False, True])
def test_each_row_is_read_once_unless_its_partition_has_read_it(outbox: Outbox, kept: bool) -> None:
    chance = random.Random(7)
    settings = outbox.settings(partitions=PARTITIONS, poll={"batch_size": 5})
    _publish(outbox, chance, 20)
    middle = current_position(outbox.conn).snapshot
    outbox.fill(10, events=2, hosts=10)
    lender = Lender(outbox.relay_dsn)
    cursor = Cursor(settings, lender)
    known: dict[tuple[int, int], bool] = {}

    def unread(share: Share) -> dict[int, Mask]:
        return {
            partition: np.array(
                [
                    known.setdefault((key, partition), chance.random() < 0.5)
                    for key in share.xids.tolist()
                ],
                np.bool_,
            )
            for partition in share.partitions
        }

    rows: list[Any] = outbox.conn.execute(
        "select c_offset, coalesce(c_xid::text::bigint, c_offset),"
        " mod(abs(hashtext(concat(host_id))::bigint), %s)::int, c_xid is null"
        "   or pg_visible_in_snapshot(c_xid, %s::pg_snapshot) from outbox_message_t",
        (PARTITIONS, str(middle)),
    ).fetchall()
    now = current_position(outbox.conn).snapshot
    for between, within in (
        (Difference(BEGINNING, middle), True),
        (Difference(middle, now), False),
    ):
        assert sorted(_read(outbox, cursor, between, whole, kept)) == sorted(
            offset for offset, _, _, is_earlier in rows if is_earlier == within
        )
        found = _read(outbox, cursor, between, unread, kept)
        assert sorted(found) == sorted(
            offset
            for offset, key, partition, is_earlier in rows
            if is_earlier == within and known[key, partition]
        )
    assert lender.lent == 0


def test_a_plan_that_is_kept_has_no_connection_and_goes_on_after_a_position(
    outbox: Outbox,
) -> None:
    outbox.fill(30, events=1)
    lender = Lender(outbox.relay_dsn)
    cursor = Cursor(outbox.settings(poll={"batch_size": 4}), lender)
    between = Difference(BEGINNING, current_position(outbox.conn).snapshot)
    with closing(cursor.plan(between)) as portions:
        first = next(portions)
        assert lender.lent == 1
    assert lender.lent == 0
    with closing(cursor.kept_plan(between, first.upto)) as rest:
        second = next(rest)
        assert lender.lent == 0
        # A read that is given up gives back its connection, though rows of it are still to come.
        found = cursor.read(second.shares, lambda share: everywhere(share, share.xids > 0))
        next(found)
        assert lender.lent == 1
        found.close()
        assert lender.lent == 0
        later = [second, *rest]
    assert sum(share.events for each in (first, *later) for share in each.shares) == 30
