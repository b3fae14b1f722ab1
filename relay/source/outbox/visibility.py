"""Whether a server shows what another connection has seen, and how long one waits for that.

A standby lags, and a commit that waits for a synchronous standby is in the WAL before any snapshot sees it. Who reads a
difference asks once: its caller tries again. Who would be given up instead waits: a task of Spark, which has few
attempts, longer than a sink that joins the stream and holds back WAL meanwhile.
"""

from __future__ import annotations

from relay.faults import NotNow
from relay.model.snapshots import Snapshot, Xids
from relay.source.server import current_position
from relay.store.connections import Connection

TASK_SECONDS = 30.0
"""How long a task, or the planning of tasks, waits for a server to show a snapshot."""
JOIN_SECONDS = 5.0
"""How long who joins the stream waits for commits that were streamed and are not visible yet."""


def require_visible(conn: Connection, *wanted: Snapshot | Xids) -> Snapshot:
    """Return the connection's snapshot. Raises TransientFault unless it shows some snapshots and transactions.

    Those are full xids (int64). Raises psycopg.Error.
    """
    now = current_position(conn).snapshot
    if now.shows(*wanted):
        return now
    raise NotNow(
        "source.dsn: its server does not show yet what is to be read: it lags, or a synchronous standby is absent"
    )
