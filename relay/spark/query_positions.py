"""Positions of queries over the outbox: a snapshot, and the witness that names the history that it belongs to.

A checkpoint, and whoever reads in steps, keeps a position elsewhere than in the source. It counts where the server
holds its witness: everything that its snapshot sees is there then. `relay.source.witnesses` says why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from uuid import UUID

from psycopg import sql

from relay.faults import RelayError
from relay.model.snapshots import Snapshot, Witness
from relay.retention.lost_events import lost_after
from relay.source.outbox.differences import Difference, cut
from relay.source.outbox.visibility import TASK_SECONDS
from relay.source.server import SourcePosition, durable_position, is_standby
from relay.source.witnesses import holds, recent
from relay.spark.reading import MappedTable, lost
from relay.store.connections import Connection

log = logging.getLogger(__name__)

STANDSTILL_SECONDS = 60.0
"""How long a replica has rows that no witness sees before a stream says so, and after which it says so again."""
_FIRST_XID = 3
_WITNESS_SECONDS = 0.05
"""How often a new witness is asked for: the server writes five a second at most."""


@dataclass(frozen=True, slots=True)
class QueryPosition:
    """What a query has read: all that `snapshot` sees, in the history of `witness`; None where nobody named it."""

    snapshot: Snapshot
    witness: UUID | None = None

    @classmethod
    def parse(cls, text: str) -> QueryPosition:
        """Parse a snapshot, or a snapshot and its witness with `@` between them. Raises ValueError."""
        snapshot, named, witness = text.partition("@")
        return cls(Snapshot.parse(snapshot), UUID(witness) if named else None)

    @classmethod
    def of(cls, offset: Mapping[str, str]) -> QueryPosition:
        """The position of a stream's offset. Raises ValueError."""
        witness = offset.get("witness")
        return cls(Snapshot.parse(offset["snapshot"]), UUID(witness) if witness else None)

    def __str__(self) -> str:
        return f"{self.snapshot}@{self.witness}" if self.witness else str(self.snapshot)

    @property
    def is_proven(self) -> bool:
        """Whether it names its history, or means the same in all of them, where no transaction is before it."""
        return self.witness is not None or self.snapshot.xmax <= _FIRST_XID


_MAY_KEEP = """
    select current_user, count(*) = 2,
           bool_and(has_schema_privilege(n.oid, 'usage') and has_function_privilege(p.oid, 'execute'))
      from pg_catalog.pg_proc as p join pg_catalog.pg_namespace as n on n.oid = p.pronamespace
     where n.nspname = 'relay' and p.proname in ('recent_witness', 'holds_witness')
"""


def keeping_refusal(conn: Connection) -> str | None:
    """Why this role cannot keep a position, and what lets it; None where it can. Raises psycopg.Error."""
    ((user, exists, allowed),) = conn.execute(_MAY_KEEP)
    if exists and allowed:
        return None
    role = sql.Identifier(user).as_string(conn)
    cure = (
        f"run `grant usage on schema relay to {role}; grant execute on function relay.recent_witness(), "
        f"relay.holds_witness(uuid) to {role}`"
        if exists
        else f"run `relay init`, which brings relay's schema in database {conn.info.dbname} up to date"
    )
    return (
        "a position cannot be kept: without a witness nobody could tell later whether the server still has what was "
        f"read: {cure}"
    )


def newest_witness(conn: Connection) -> Witness:
    """The newest witness that the server has, or a new one. Raises RelayError without any, and psycopg.Error."""
    found = recent(conn)
    if found is None:
        raise RelayError(
            "a position cannot be kept: the server has no witness: run `relay init` for its primary"
        )
    return found


def witness_of(
    conn: Connection, snapshot: Snapshot, suffices: Callable[[Witness], bool] = lambda _: False
) -> Witness:
    """A witness that proves a snapshot, or one that suffices: there is one within 0.2 s. Raises as `newest_witness`."""
    deadline = time.monotonic() + TASK_SECONDS
    while True:
        newest = newest_witness(conn)
        if newest.proves(snapshot) or suffices(newest):
            return newest
        _wait_until(deadline)


def known_here(conn: Connection, snapshot: Snapshot) -> str:
    """A position as somebody writes it who knows that a snapshot is of this server. Raises as `newest_witness`."""
    return str(QueryPosition(snapshot, newest_witness(conn).id))


def require_known(
    conn: Connection,
    table: MappedTable,
    position: QueryPosition,
    fail_on_data_loss: bool,
    elsewhere: bool | None = None,
    earlier: str = "",
) -> None:
    """Judge a position whose witness is gone from a server that is no standby. Raises RelayError, psycopg.Error.

    Where retention has removed events after it, it may have removed the witness with them, and without
    `fail_on_data_loss` the query goes on. The other arguments are those of `lost`.
    """
    try:
        loss = lost_after(conn, ".".join(table.name), position.snapshot)
    except RelayError:
        loss = None
    removed = loss is not None and loss.is_certain
    if fail_on_data_loss or not removed:
        raise lost(str(position), elsewhere, removed, earlier)
    log.warning(
        "the witness of the query's position is gone, as are events after it, and the query goes on without",
        extra={"position": str(position)},
    )


class StreamPositions:
    """Opens the positions of one stream on the server of a session, and finds those at which its micro-batches end."""

    def __init__(self, table: MappedTable, fail_on_data_loss: bool) -> None:
        self._table = table
        self._fails = fail_on_data_loss
        self.keeps = False
        """Whether this role may take witnesses, and compare them."""
        self._witness: Witness | None = None
        self._held: UUID | None = None
        """The witness that was found last in this session: a server does not lose one while it runs."""
        self._unread_since: float | None = None
        self._absent_since: float | None = None
        self._empty: Difference | None = None
        """A difference after the end of the newest micro-batch that has no rows, for ever."""
        self._rowless: Difference | None = None
        """The same, unless retention has removed rows of it."""
        self.target: Snapshot | None = None
        """What the stream reads before it ends; None where it goes on."""

    def begin_session(self, conn: Connection) -> None:
        """Find out whether positions can be kept. Raises RelayError where they must be, and psycopg.Error."""
        self._held = self._witness = None
        refusal = keeping_refusal(conn)
        self.keeps = refusal is None
        if refusal is None:
            return
        if self._fails:
            raise RelayError(f"{refusal}, or set the option failOnDataLoss to false")
        log.warning(
            "this stream does not notice another history of the server", extra={"reason": refusal}
        )

    def now(self, conn: Connection) -> QueryPosition:
        """The position of all that is committed. Raises RelayError, psycopg.Error."""
        position = durable_position(conn)
        seen = position.snapshot
        if not self.keeps:
            return QueryPosition(seen)
        # A standby has to take the newest that there is.
        newest = witness_of(
            conn,
            seen,
            lambda newest: position.at is None and not self._has_rows(conn, newest.snapshot, seen),
        )
        return QueryPosition(newest.snapshot, newest.id)

    def _has(
        self, conn: Connection, position: QueryPosition, seen: SourcePosition, elsewhere: bool
    ) -> bool:
        """Whether the server has all that was read up to a position; False for a replica that lags.

        Raises RelayError where it does not have it, and psycopg.Error.
        """
        before, witness = position.snapshot, position.witness
        if witness is None or not self.keeps:
            require_begun(seen.snapshot, before)
            return True
        if holds(conn, witness):
            self._held, self._absent_since = witness, None
            return True
        if seen.at is None and self._may_come(seen.snapshot.covers(before)):
            return False
        require_known(conn, self._table, position, self._fails, elsewhere)
        self._held = witness
        return True

    def can_prove(self, position: QueryPosition) -> bool:
        """Whether a position names its history, and this role may ask for that."""
        return self.keeps and position.witness is not None

    def shown(
        self, conn: Connection, before: QueryPosition, after: QueryPosition, elsewhere: bool
    ) -> QueryPosition:
        """The end of a micro-batch that begins at `before`, with the witness for which its tasks have to wait.

        Raises RelayError where the server does not have what it sees, and psycopg.Error.
        """
        if not self.keeps or after.witness is None:
            return QueryPosition(after.snapshot)
        if holds(conn, after.witness) or is_standby(conn):
            return after
        is_earlier = before.witness is not None and holds(conn, before.witness)
        earlier = str(before) if is_earlier else ""
        require_known(conn, self._table, after, self._fails, elsewhere, earlier)
        return QueryPosition(after.snapshot)

    def _may_come(self, shows_snapshot: bool) -> bool:
        """Whether a witness that a replica does not have may be in WAL that it has not replayed yet."""
        if not shows_snapshot:
            return True
        now = time.monotonic()
        self._absent_since = self._absent_since or now
        return now - self._absent_since < TASK_SECONDS

    def advance(
        self,
        conn: Connection,
        position: QueryPosition,
        seen: SourcePosition,
        elsewhere: bool,
        most: int | None,
    ) -> tuple[QueryPosition, int]:
        """Where the micro-batch after a position ends, with at most about `most` rows, and how many were counted.

        Without rows, and where a replica has yet to come to the position, it is the position itself. `elsewhere`:
        whether it is of a server with another identifier. Raises RelayError where the server does not have what was
        read up to the position, or has rows that no witness sees and nobody writes one, and psycopg.Error.
        """
        is_known = position.witness is not None and position.witness == self._held
        if not is_known and not self._has(conn, position, seen, elsewhere):
            return position, 0
        end, count = self._after(conn, position, seen, most)
        # Behind a pooler the session may have come to another server.
        if count and not self._has(conn, position, seen, elsewhere):
            return position, 0
        return end, count

    def _after(
        self, conn: Connection, position: QueryPosition, seen: SourcePosition, most: int | None
    ) -> tuple[QueryPosition, int]:
        before, bound = position.snapshot, self.target or seen.snapshot
        # A standby's snapshot may see less than a position that was taken on its primary.
        rowless = Difference(before, bound) if bound.covers(before) else None
        self._rowless = None
        if not self.keeps:
            found = self._cut(conn, position, bound, None, most)
            self._rowless = None if found[1] else rowless
            return found
        if self._witness is not None:
            found = self._up_to(conn, position, self._witness, most)
            if found[1]:
                return found
        follows = seen.at is None and self.target is None
        if not follows and not self._has_rows(conn, before, bound):
            self._rowless = rowless
            return position, 0
        deadline = time.monotonic() + TASK_SECONDS
        while True:
            self._witness = newest_witness(conn)
            found = self._up_to(conn, position, self._witness, most)
            # Without rows, although there were some: retention has removed them.
            if found[1] or self._witness.proves(bound):
                self._unread_since = None
                return found
            if follows:
                self._note_unread(self._has_rows(conn, before, bound))
                return found
            _wait_until(deadline)

    def _up_to(
        self, conn: Connection, position: QueryPosition, witness: Witness, most: int | None
    ) -> tuple[QueryPosition, int]:
        target = self.target
        is_proven = target is not None and witness.proves(target)
        after = target if target is not None and is_proven else witness.snapshot
        if not after.covers(position.snapshot):
            after = witness.snapshot
        return self._cut(conn, position, after, witness.id, most)

    def _cut(
        self,
        conn: Connection,
        position: QueryPosition,
        after: Snapshot,
        witness: UUID | None,
        most: int | None,
    ) -> tuple[QueryPosition, int]:
        """The position at which a reader has about `most` rows, or else all that a snapshot sees."""
        if not after.covers(position.snapshot):
            # A replica has not come to the position.
            return position, 0
        between = Difference(position.snapshot, after)
        if between.is_empty:
            return position, 0
        end, count = cut(conn, self._table.identifier, between, most or 1)
        if not count:
            return position, 0
        return QueryPosition(after if most is None else end, witness), count

    def _has_rows(self, conn: Connection, before: Snapshot, after: Snapshot) -> bool:
        return cut(conn, self._table.identifier, Difference(before, after), 1)[1] > 0

    def _note_unread(self, has_rows: bool) -> None:
        """Say that a replica has rows that its newest witness does not see, once that lasts."""
        now = time.monotonic()
        if not has_rows or self._unread_since is None:
            self._unread_since = now if has_rows else None
        elif now - self._unread_since > STANDSTILL_SECONDS:
            self._unread_since = now
            log.warning(_STANDSTILL)

    def note_kept(self) -> None:
        """Note that retention has removed nothing after the position at which `advance` began.

        What had no rows then never had any: a transaction that is open at the position and has ended is not suspected
        later.
        """
        self._empty = self._rowless or self._empty

    def since(self, position: Snapshot) -> Snapshot:
        """A position at or after the given one, with the same rows after it."""
        empty = self._empty
        return position if empty is None or empty.before != position else empty.after


_STANDSTILL = (
    "the replica has events that its newest witness does not see, so that a stream cannot keep its position after "
    "them: let `relay run` follow the primary, which writes witnesses, run `select relay.recent_witness()` there, or "
    "read the primary"
)


def _wait_until(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise RelayError(_STANDSTILL)
    time.sleep(_WITNESS_SECONDS)


def require_begun(seen: Snapshot, wanted: Snapshot) -> None:
    """Raise RelayError where a snapshot names transactions that the server has not begun."""
    if wanted.xmax > seen.xmax and not wanted.is_beginning:
        raise RelayError(
            f"snapshot {wanted}: this server's next transaction is {seen.xmax}: it is an older backup, another "
            "cluster, or a replica that lags; read the server that the snapshot came from, or begin again with a new "
            "checkpoint"
        )
