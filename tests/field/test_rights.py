"""What works only as superuser: rights that a role of relay needs and does not have."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime

from relay.retention.schedule import Schedule
from relay.store.connections import connect
from tests.outbox import Outbox


def test_retention_removes_done_messages_as_the_role_relay(outbox: Outbox) -> None:
    """Locking rows needs the right to update them, which the role relay does not have."""
    outbox.conn.execute(
        """
        select relay.declare_queue('mail', null, keep_done => '1 hour');
        select relay.enqueue('mail', '{}', host_id => 'h') from generate_series(1, 3);
        select from relay.take('mail', 3);
        update relay.queue_done set done_at = done_at - interval '2 hours'
         where id <> (select min(id) from relay.queue_done)
        """
    )
    with outbox.limited_role() as (_, dsn), closing(connect(dsn)) as conn:
        retention = Schedule(outbox.settings(), lambda: None, lambda _: datetime.now(UTC))
        retention.retain(conn, conn)
    assert retention.condition.fault is None
    assert outbox.value("select count(*) from relay.queue_done") == 1
