"""A stream that lags behind retention says so, instead of skipping what was removed (Kafka's `failOnDataLoss`).

Reports: mozilla/telemetry-streaming#25, apache/hudi#5400, apache/spark#24932, apache/spark#15820 (SPARK-18373),
apache/spark#22207 (SPARK-25214), delta-io/delta#6395.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from relay.admin.retention import erase, partition_new
from relay.config.source import OWN_OUTBOX
from relay.faults import RelayError
from relay.model.snapshots import Snapshot
from relay.retention.partitions import Upkeep, create_ahead
from relay.spark.data_source import DifferenceReader, StreamReader
from relay.spark.data_source_options import parse
from tests.outbox import Copied, Outbox, event, host, initialise

KEEP: dict[str, Any] = {"retention": {"keep": "7d", "ahead": "3d"}}
DAY = timedelta(days=1)


def install(outbox: Outbox) -> None:
    outbox.install(**KEEP)


@pytest.fixture
def kept(copied: Copied) -> Any:
    """An outbox with retention, and with no reader that holds events."""
    with copied("removed_events", install) as made:
        made.conn.execute("delete from relay.streams; delete from relay.readers")
        yield made


def remove(outbox: Outbox, older_than: datetime | None = None) -> int:
    """Remove rows that are older than a time; without one, all that are committed."""
    moment = older_than or datetime.now(UTC) + DAY
    steps = Upkeep(OWN_OUTBOX).steps(outbox.conn, "drop", moment, timedelta(0), DAY, lambda: False)
    return sum(int(done) for name, done, _ in steps if name == "delete" and done)


def position(outbox: Outbox) -> str:
    taken = "select concat(snapshot, '@', witness) from relay.take_witness()"
    return str(outbox.value(taken))


def checkpoint(outbox: Outbox) -> dict[str, str]:
    """A checkpoint of all that is committed."""
    snapshot, _, witness = position(outbox).partition("@")
    return {"snapshot": snapshot, "witness": witness}


@dataclass
class Query:
    """A stream as Spark drives it: its checkpoint, and the ids that it has read."""

    dsn: str
    at: dict[str, str] | None = None
    options: dict[str, str] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)
    reader: StreamReader | None = None

    def trigger(self, most: int | None = None) -> int:
        """One micro-batch; returns how many rows it had."""
        if self.reader is None:
            options = {"dsn": self.dsn, "partitions": "2"} | self.options
            self.reader = StreamReader(parse(options, "stream"))
        self.at = self.at or self.reader.initialOffset()
        limit = ReadAllAvailable() if most is None else ReadMaxRows(most)
        end = self.reader.latestOffset(self.at, limit)
        rows = [
            str(each)
            for part in self.reader.partitions(self.at, end)
            for batch in self.reader.read(part)
            for each in batch.column("id").to_pylist()
        ]
        self.read += rows
        self.at = end
        return len(rows)

    def stop(self) -> None:
        """Stop the query; the next trigger begins at its checkpoint."""
        if self.reader is not None:
            self.reader.stop()
        self.reader = None

    @property
    def snapshot(self) -> Snapshot:
        """Its position."""
        assert self.at is not None
        return Snapshot.parse(self.at["snapshot"])


def test_a_stream_fails_where_retention_removed_what_it_had_to_read(kept: Outbox) -> None:
    kept.fill(3)
    query = Query(kept.jobs_dsn)
    assert query.trigger() == 15
    remove(kept)
    kept.fill(1, events=2)
    # What it had read was removed, so nothing is lost.
    assert query.trigger() == 2
    kept.fill(1, events=2)
    before = query.snapshot
    remove(kept)
    with pytest.raises(RelayError) as raised:
        query.trigger()
    assert str(raised.value).startswith(
        "option failOnDataLoss: retention has removed events up to transaction "
    )
    assert f"{OWN_OUTBOX}, which come after this query's position {before}: " in str(raised.value)
    query.stop()
    with pytest.raises(RelayError, match="failOnDataLoss"):
        query.trigger()
    query.stop()
    # It goes on where it is told to, and a new one begins with what there is.
    query.options = {"failOnDataLoss": "false"}
    kept.fill(1, events=1)
    assert query.trigger() == 1
    query.stop()
    new = Query(kept.jobs_dsn)
    assert new.trigger() == 1
    new.stop()


def test_a_batch_from_a_snapshot_fails_likewise(kept: Outbox) -> None:
    before = position(kept)
    kept.fill(1)
    remove(kept)
    reader = DifferenceReader(parse({"dsn": kept.jobs_dsn, "fromSnapshot": before}, "batch"))
    with pytest.raises(RelayError, match="failOnDataLoss: retention has removed events up to"):
        reader.partitions()
    for more in ({"failOnDataLoss": "false", "fromSnapshot": before}, {}):
        DifferenceReader(parse({"dsn": kept.jobs_dsn} | more, "batch")).partitions()


def test_rows_that_are_removed_while_a_micro_batch_is_read_fail_its_tasks(kept: Outbox) -> None:
    query = Query(kept.jobs_dsn)
    kept.fill(1)
    query.trigger()
    kept.fill(1)
    reader = query.reader
    assert reader is not None
    assert query.at is not None
    end = reader.latestOffset(query.at, ReadAllAvailable())
    parts = reader.partitions(query.at, end)
    remove(kept)
    for part in parts:
        with pytest.raises(RelayError, match="failOnDataLoss"):
            list(reader.read(part))
    query.stop()


def batch_rows(kept: Outbox, parts: Sequence[Any], **options: str) -> int:
    reader = DifferenceReader(parse({"dsn": kept.jobs_dsn, **options}, "batch"))
    return sum(len(batch) for part in parts for batch in reader.read(part))


def planned(kept: Outbox, dsn: str, **options: str) -> Sequence[Any]:
    given = {"dsn": dsn, "partitions": "2", **options}
    return DifferenceReader(parse(given, "batch")).partitions()


def test_rows_that_are_removed_while_a_batch_is_read_fail_its_tasks(kept: Outbox) -> None:
    """From the beginning too, where what was removed before it began is not missed."""
    kept.fill(1)
    remove(kept)
    kept.fill(2)
    whole = planned(kept, kept.jobs_dsn)
    part = {"fromTime": "2000-01-01T00:00:00+00:00"}
    some = planned(kept, kept.jobs_dsn, **part)
    assert batch_rows(kept, whole) == batch_rows(kept, some, **part) == 10
    remove(kept)
    for each in whole:
        with pytest.raises(RelayError, match="while this query read it: read again"):
            batch_rows(kept, [each])
    assert batch_rows(kept, some, **part) == 0
    assert batch_rows(kept, planned(kept, kept.jobs_dsn)) == 0


def test_a_batch_with_a_name_holds_what_it_has_to_read(kept: Outbox) -> None:
    before = position(kept)
    kept.fill(2)
    parts = planned(kept, kept.relay_dsn, fromSnapshot=before, reader="nightly")
    assert remove(kept) == 0
    assert batch_rows(kept, parts) == 10
    planned(kept, kept.relay_dsn, fromSnapshot=position(kept), reader="nightly")
    assert remove(kept) > 0


def test_told_to_go_on_a_query_reads_what_is_left_once(kept: Outbox) -> None:
    """Kafka's source failed in its tasks all the same (SPARK-18373), and then read records twice (SPARK-25214)."""
    query = Query(kept.jobs_dsn, options={"failOnDataLoss": "false"})
    kept.fill(1)
    query.trigger()
    kept.fill(1)
    assert query.reader is not None
    assert query.at is not None
    end = query.reader.latestOffset(query.at, ReadAllAvailable())
    parts = query.reader.partitions(query.at, end)
    kept.conn.execute(
        "update outbox_message_t set c_ts = now() - interval '2 days' where c_offset % 2 = 0"
    )
    remove(kept, datetime.now(UTC) - DAY)
    kept.fill(1)
    found = [
        each
        for part in parts
        for batch in query.reader.read(part)
        for each in batch.column("id").to_pylist()
    ]
    query.at = end
    query.stop()
    assert query.trigger(most=2) > 0
    while query.trigger(most=2):
        pass
    query.stop()
    read = [*query.read, *map(str, found)]
    assert len(read) == len(set(read))
    assert set(kept.column("select id::text from outbox_message_t")) <= set(read)


def test_a_transaction_that_was_open_then_and_is_older_than_the_newest_removed(
    kept: Outbox,
) -> None:
    """The newest transaction that was removed was read; an older one was open at the position, and has ended since."""
    query = Query(kept.jobs_dsn)
    with (
        psycopg.connect(kept.publisher_dsn) as slow,
        psycopg.connect(kept.publisher_dsn) as aborted,
    ):
        slow.execute("select relay.publish(%s, null, %s)", (host(1), Jsonb([event(1)])))
        aborted.execute("select pg_current_xact_id()")
        kept.fill(1, events=1)
        assert query.trigger() == 1
        assert len(query.snapshot.in_progress) == 2
        remove(kept)
        # Both are open still.
        assert query.trigger() == 0
        aborted.rollback()
        remove(kept)
        assert query.trigger() == 0
        slow.commit()
    xid = min(query.snapshot.in_progress)
    remove(kept)
    with pytest.raises(RelayError, match=f"may have removed events of transaction {xid}, which"):
        query.trigger()
    query.stop()


def test_a_quiet_stream_does_not_suspect_a_transaction_that_published_nothing(
    kept: Outbox,
) -> None:
    query = Query(kept.jobs_dsn)
    with psycopg.connect(kept.publisher_dsn) as slow:
        slow.execute("select pg_current_xact_id()")
        kept.fill(1, events=1)
        assert query.trigger() == 1
        slow.commit()
    assert query.trigger() == 0
    remove(kept)
    assert query.trigger() == 0
    kept.fill(1, events=1)
    assert query.trigger() == 1
    query.stop()


def test_what_was_erased_is_not_missed(kept: Outbox) -> None:
    query = Query(kept.jobs_dsn)
    kept.fill(1, events=1)
    query.trigger()
    kept.publish(host(7), event(1))
    source = {**kept.config()["source"], "mode": "poll"}
    erase(kept.settings(**KEEP, source=source), str(host(7)), True, kept.installer_dsn)
    assert query.trigger() == 0
    query.stop()


def test_a_removal_in_another_cluster_counts_nothing(kept: Outbox) -> None:
    """A dump brought the row."""
    kept.conn.execute(
        "insert into relay.removed (outbox, newest, snapshot) values (%s, '9999999', '9999999:9999999:')",
        (OWN_OUTBOX,),
    )
    query = Query(kept.jobs_dsn)
    kept.fill(1, events=1)
    assert query.trigger() == 1
    remove(kept)
    assert query.trigger() == 0
    query.stop()
    assert kept.value("select count(*) from relay.removed") == 1
    assert kept.value("select newest < '9999999' from relay.removed")


def test_a_removal_in_another_cluster_is_forgotten_before_this_one_comes_so_far(
    kept: Outbox,
) -> None:
    """As above, where nothing is removed until transactions have the ids of the dump's: each stream failed then."""
    newest = 20 + int(kept.value("select pg_current_xact_id()::text::bigint"))
    kept.conn.execute(
        "insert into relay.removed (outbox, newest, snapshot) values (%s, %s::text::xid8, %s::pg_snapshot)",
        (OWN_OUTBOX, newest, f"{newest + 1}:{newest + 1}:"),
    )
    query = Query(kept.jobs_dsn)
    query.trigger()
    initialise(kept.settings(**KEEP))
    for _ in range(40):
        kept.fill(1, events=1)
    assert query.trigger() == 40
    query.stop()


@pytest.fixture
def stranger(kept: Outbox) -> Any:
    """The dsn of a role that may read the outbox, which was made after `relay init`."""
    name = f"s_{kept.slot}"
    kept.conn.execute(f"create role {name} login password 'p'".encode())
    kept.conn.execute(f"grant select on outbox_message_t to {name}".encode())
    yield kept.dsn_as(name)
    kept.conn.execute(f"drop owned by {name}; drop role {name}".encode())


def test_a_role_needs_the_right_to_know_only_where_events_are_removed(
    kept: Outbox, stranger: str, outbox: Outbox
) -> None:
    name = f"s_{kept.slot}"
    kept.fill(1, events=1)
    query = Query(stranger, checkpoint(kept))
    kept.conn.execute("select relay.let_keep_positions('outbox_message_t')")
    grants = rf"read: grant {name} USAGE on schema relay and SELECT on relay\.removed, or set the"
    with pytest.raises(RelayError, match=grants):
        query.trigger()
    query.stop()
    kept.conn.execute(f"grant select on relay.removed to {name}".encode())
    assert query.trigger() == 0
    query.stop()
    kept.conn.execute(f"revoke usage on schema relay from {name}".encode())
    kept.conn.execute(f"revoke select on relay.removed from {name}".encode())
    # `relay init` gives it to those who may read the outbox.
    kept.conn.execute("select relay.retain('outbox_message_t', %s, 'c_offset')", (OWN_OUTBOX,))
    assert query.trigger() == 0
    query.stop()
    # Nothing is removed from the outbox of another database, and nobody needs this right there.
    outbox.conn.execute(f"grant select on outbox_message_t to {name}".encode())
    outbox.conn.execute("select relay.let_keep_positions('outbox_message_t')")
    outbox.fill(1, events=1)
    dsn = outbox.dsn_as(name)
    other = Query(dsn, {"snapshot": "3:3:"})
    assert other.trigger() == 1
    other.stop()
    outbox.conn.execute(f"drop owned by {name}".encode())


def test_a_role_with_rights_to_some_columns_may_know_it_too(kept: Outbox) -> None:
    name = f"c_{kept.slot}"
    kept.conn.execute(f"create role {name} login password 'p'".encode())
    kept.conn.execute(f"grant select (id, c_xid) on outbox_message_t to {name}".encode())
    kept.conn.execute("select relay.retain('outbox_message_t', %s, 'c_offset')", (OWN_OUTBOX,))
    kept.conn.execute("select relay.let_keep_positions('outbox_message_t')")
    before = position(kept)
    kept.fill(1, events=1)
    dsn = kept.dsn_as(name)
    options = parse({"dsn": dsn, "fromSnapshot": before, "ordered": "false"}, "batch")
    reader = DifferenceReader(options, ["id"])
    assert sum(len(rows) for each in reader.partitions() for rows in reader.read(each)) == 1
    kept.conn.execute(f"drop owned by {name}; drop role {name}".encode())


def test_a_former_schema_is_refused(kept: Outbox) -> None:
    kept.conn.execute("drop table relay.removed")
    query = Query(kept.jobs_dsn, checkpoint(kept))
    with pytest.raises(RelayError, match="cannot be read: run `relay init`"):
        query.trigger()
    query.stop()


def test_dead_rows_of_the_table_do_not_grow_with_portions(kept: Outbox) -> None:
    for _ in range(5):
        kept.fill(1, events=1)
        remove(kept)
    assert kept.value("select count(*) from relay.removed") == 1
    assert initialise(kept.settings(**KEEP)) == []


SKEW = """
    create table skew (by interval);
    insert into skew values ('0');
    create function skew() returns interval language sql stable security definer as 'select by from public.skew';
    alter table outbox_message_t alter c_ts set default now() + public.skew();
"""


@dataclass
class History:
    """A random history of an outbox: transactions, removals, queries that lag, stop and go on."""

    outbox: Outbox
    dice: random.Random
    committed: dict[str, int] = field(default_factory=dict)
    """The transaction of each committed event, by id."""
    removed: set[str] = field(default_factory=set)
    open: list[tuple[psycopg.Connection[Any], int, list[str]]] = field(default_factory=list)
    queries: list[Query] = field(default_factory=list)
    ended_empty: set[int] = field(default_factory=set)
    """Transactions that committed without an event."""
    day: float = 0.0
    alarms: int = 0
    doubts: int = 0

    def run(self, steps: int) -> None:
        outbox = self.outbox
        outbox.conn.execute(SKEW)
        actions = [self.begin] * 5 + [self.end] * 4 + [self.remove, self.pass_time, self.read]
        self.queries = [
            Query(outbox.jobs_dsn, options={"startingPosition": "now"}) for _ in range(4)
        ]
        for query in self.queries:
            query.trigger()
        for _ in range(steps):
            self.dice.choice(actions)()
        while self.open:
            self.end()
        for query in self.queries:
            query.stop()

    def begin(self) -> None:
        """Begin a transaction that publishes nothing, an event, or some, and perhaps stays open.

        Of a superuser, who sees there what it has published.
        """
        conn = psycopg.connect(self.outbox.superuser_dsn)
        (xid,) = conn.execute("select pg_current_xact_id()::text::bigint").fetchall()[0]
        for _ in range(self.dice.choice([0, 1, 1, 3])):
            conn.execute(
                "select relay.publish(%s, null, %s)",
                (host(self.dice.randrange(9)), Jsonb([event(1)])),
            )
        rows = conn.execute(
            "select id::text from outbox_message_t where c_xid = %s::text::xid8", (xid,)
        ).fetchall()
        self.open.append((conn, xid, [each for (each,) in rows]))
        if self.dice.random() < 0.6 or len(self.open) > 5:
            self.end()

    def end(self) -> None:
        """End one of the open transactions."""
        if not self.open:
            return
        conn, xid, ids = self.open.pop(self.dice.randrange(len(self.open)))
        with conn:
            if self.dice.random() < 0.2:
                conn.rollback()
            elif ids:
                conn.commit()
                self.committed |= dict.fromkeys(ids, xid)
            else:
                conn.commit()
                self.ended_empty.add(xid)

    def pass_time(self) -> None:
        self.day += self.dice.choice([0.2, 0.5, 1.0])
        self.outbox.conn.execute(
            "update skew set by = make_interval(secs => %s)", (self.day * 86_400,)
        )

    @property
    def now(self) -> datetime:
        return datetime.now(UTC) + timedelta(days=self.day)

    def remove(self) -> None:
        """Remove what is older than some time in the last two days."""
        with suppress(psycopg.errors.LockNotAvailable):
            remove(self.outbox, self.now - timedelta(days=self.dice.choice([0.0, 0.3, 1.0])))
        left = set(self.outbox.column("select id::text from outbox_message_t"))
        self.removed = set(self.committed) - left

    def read(self) -> None:
        """A micro-batch of a query, which may have been stopped; it fails if and only if it has lost events."""
        query = self.dice.choice(self.queries)
        if self.dice.random() < 0.5:
            query.stop()
        before = query.snapshot
        at = query.at
        read = len(query.read)
        lost = self.unread(before, self.removed)
        try:
            query.trigger(self.dice.choice([None, None, 1, 3]))
        except RelayError as error:
            self.alarms += 1
            if "has removed" in str(error):
                assert lost
            elif not lost:
                self.doubts += 1
                self.require_documented(before, str(error))
            query.stop()
            # The operator lets it go on at the present.
            query.at = None
            query.trigger()
        else:
            assert not lost, (before, lost)
            expected = set(self.committed) - self.unread(query.snapshot, set(self.committed))
            assert set(query.read[read:]) == expected & self.unread(before, set(self.committed)), at

    def unread(self, at: Snapshot, ids: set[str]) -> set[str]:
        return {
            each
            for each in ids
            if self.committed[each] >= at.xmax or self.committed[each] in at.in_progress
        }

    def require_documented(self, before: Snapshot, text: str) -> None:
        """A false alarm is of a transaction that was open, is older than a removed one, and published nothing."""
        xid = int(text.partition("transaction ")[2].partition(",")[0])
        assert xid in before.in_progress
        assert xid in self.ended_empty
        assert xid < max(self.committed[each] for each in self.removed)


def run_history(outbox: Outbox, seed: int, partitioned: bool, steps: int) -> History:
    if partitioned:
        partition_new(outbox.settings(**KEEP), "6h", outbox.installer_dsn)
        create_ahead(outbox.conn, OWN_OUTBOX, datetime.now(UTC), 30 * DAY)
    history = History(outbox, random.Random(seed))
    history.run(steps)
    return history


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition that is in use is not waited for."""
    monkeypatch.setattr("relay.retention.partitions.PAUSE_SECONDS", 0.001)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("partitioned", [False, True], ids=["rows", "partitions"])
def test_a_random_history_is_told_if_and_only_if_events_are_lost(
    kept: Outbox, partitioned: bool
) -> None:
    history = run_history(kept, 7, partitioned, 100)
    assert history.alarms > history.doubts


@pytest.mark.rare
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("partitioned", [False, True], ids=["rows", "partitions"])
@pytest.mark.parametrize("seed", range(4))
def test_random_histories(kept: Outbox, partitioned: bool, seed: int) -> None:
    history = run_history(kept, seed, partitioned, 200)
    assert history.removed
