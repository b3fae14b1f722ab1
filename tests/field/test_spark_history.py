"""A stream of `format("outbox")` knows the history that its checkpoint is of, and goes on in no other.

Reports of other sources: after a failover, a restore, or a topic or table that was made again, the position looks valid
and events are skipped without a word (debezium/debezium#1073 and #3970, airbytehq/airbyte#15077 and #85783,
osmanahmadxai/SYNCLE#75, apache/spark#15102 and #31089, dibbhatt/kafka-spark-consumer#60, confluentinc/librdkafka#3255,
streamnative/kop#530, delta-io/delta#6049, milvus-io/milvus#53581); a replica of the same source is refused
(apache/flink-cdc#469) or looks caught up while it lags (aiven/inkless#774); the error is unclear
(apache/iceberg#6480); a restart asks for what only the query's first position needed (apache/iceberg#18000).
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Timer
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg.types.json import Jsonb
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows

from relay.faults import RelayError, TransientFault
from relay.spark import query_positions, reading
from relay.spark.data_source import DifferenceReader, StreamReader
from relay.spark.data_source_options import parse
from tests.chaos.test_failover import Pair, streaming_pair
from tests.clusters import replace_folder
from tests.outbox import Outbox, event, host, wait_until
from tests.postgres import EmbeddedServer, start_server

pytestmark = [pytest.mark.timeout(300)]

ALL = ReadAllAvailable()
GONE = r"^position \d+:\S*@[-0-9a-f]{36}: this server does not have its witness: "


@dataclass
class Query:
    """A stream as Spark drives it: what it has read, and the offsets of its checkpoint, the last one first."""

    dsn: str
    options: dict[str, str] = field(default_factory=dict)
    offsets: list[dict[str, str]] = field(default_factory=list)
    read: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reader = self._begun()

    def _begun(self) -> StreamReader:
        return StreamReader(parse({"dsn": self.dsn, "partitions": "1", **self.options}, "stream"))

    def restart(self, dsn: str | None = None) -> None:
        self.reader.stop()
        self.dsn = dsn or self.dsn
        self.reader = self._begun()

    @property
    def at(self) -> dict[str, str]:
        if not self.offsets:
            self.offsets.append(self.reader.initialOffset())
        return self.offsets[0]

    @property
    def position(self) -> str:
        """Its position, as its user names it."""
        return f"{self.at['snapshot']}@{self.at['witness']}"

    def trigger(self, limit: ReadLimit = ALL) -> int:
        """One micro-batch; returns how many rows it had."""
        end = self.reader.latestOffset(self.at, limit)
        rows = ids(self.reader, self.reader.partitions(self.at, end))
        self.read += rows
        if end != self.at:
            self.offsets.insert(0, end)
        return len(rows)

    def refusal(self) -> str:
        """What it says at its next trigger."""
        with pytest.raises(RelayError, match=GONE) as raised:
            self.trigger()
        assert "\n" not in str(raised.value)
        return str(raised.value)


def ids(reader: StreamReader | DifferenceReader, parts: Any) -> list[str]:
    return [
        str(each)
        for part in parts
        for batch in reader.read(part)
        for each in batch.column("id").to_pylist()
    ]


def stored(outbox: Outbox) -> list[str]:
    return sorted(outbox.column("select id::text from outbox_message_t"))


def plan(dsn: str, **options: str) -> None:
    """Plan a batch."""
    DifferenceReader(parse({"dsn": dsn, **options}, "batch")).partitions()


@pytest.fixture
def query(outbox: Outbox) -> Iterator[Query]:
    """A query that has read two events."""
    made = Query(outbox.jobs_dsn)
    outbox.fill(2, events=1)
    assert made.trigger() == 2
    yield made
    made.reader.stop()


# Failovers


@dataclass
class Scene:
    """A pair of servers, and a query on whichever of both may be written to."""

    pair: Pair
    query: Query

    def promote(self) -> None:
        """Fail over. The session that the query had ends."""
        self.pair.fail_over()
        wait_until(lambda: not self.pair.copy.value("select pg_is_in_recovery()"))
        self.query.restart()

    def publish(self, count: int) -> None:
        self.pair.copy.fill(count, events=1)

    def rest(self, start: str) -> list[str]:
        """What a new query reads that begins at a position."""
        other = Query(self.pair.either(), {"startingPosition": start})
        while other.trigger():
            pass
        other.reader.stop()
        return other.read


@pytest.fixture
def scene() -> Iterator[Scene]:
    with streaming_pair() as pair:
        pair.source.install()
        query = Query(pair.either())
        pair.source.fill(2, events=1)
        assert query.trigger() == 2
        yield Scene(pair, query)
        query.reader.stop()


def test_a_failover_without_a_loss(scene: Scene) -> None:
    scene.pair.source.fill(3, events=1)
    assert scene.query.trigger() == 3
    scene.pair.replicate()
    scene.promote()
    scene.publish(40)
    # Spark repeats the last micro-batch of a query that ended amid it.
    start, end = scene.query.offsets[1], scene.query.offsets[0]
    assert len(scene.query.reader.partitions(start, end)) == 1
    assert scene.query.trigger() == 40
    assert sorted(scene.query.read) == stored(scene.pair.copy)


def test_a_failover_with_a_loss_of_what_was_read(scene: Scene) -> None:
    """At once, and after the ids have passed the checkpoint: 19 of 40 events were skipped in silence."""
    query = scene.query
    scene.pair.cut()
    scene.pair.source.fill(20, events=1)
    assert query.trigger() == 20
    earlier = query.offsets[1]
    scene.promote()
    assert "failed over with a loss" in query.refusal()
    scene.publish(40)
    query.restart()
    assert "beginning, now or an earlier position of the query" in query.refusal()
    named = f"{earlier['snapshot']}@{earlier['witness']}"
    with pytest.raises(RelayError, match=GONE) as raised:
        query.reader.partitions(earlier, query.at)
    assert f"startingPosition {named} " in str(raised.value)
    for option in ("fromSnapshot", "toSnapshot"):
        with pytest.raises(RelayError, match=GONE):
            plan(scene.pair.either(), **{option: query.position})
    before = set(query.read[:2])
    assert sorted(before.union(scene.rest(named))) == stored(scene.pair.copy)
    assert len(scene.rest(named)) == 40


def test_a_failover_that_loses_only_what_came_after_the_last_witness(scene: Scene) -> None:
    scene.pair.cut()
    scene.pair.source.fill(20, events=1)
    scene.promote()
    scene.publish(30)
    assert scene.query.trigger() == 30
    assert sorted(scene.query.read) == stored(scene.pair.copy)


def test_a_failover_that_loses_nothing_but_the_witness(scene: Scene) -> None:
    """Nobody can tell, so it is refused; from the position before only the last micro-batch comes again."""
    query = scene.query
    scene.pair.source.fill(5, events=1)
    scene.pair.cut()
    assert query.trigger() == 5
    scene.promote()
    query.refusal()
    scene.publish(3)
    query.refusal()
    earlier = f"{query.offsets[1]['snapshot']}@{query.offsets[1]['witness']}"
    again = scene.rest(earlier)
    assert sorted(again[:5]) == sorted(query.read[2:])
    assert sorted(query.read[:2] + again) == stored(scene.pair.copy)
    # Who knows it may say so.
    newest = scene.pair.copy.value("select witness from relay.take_witness()")
    assert len(scene.rest(f"{query.at['snapshot']}@{newest}")) == 3


@pytest.mark.rare
def test_tasks_that_come_to_another_server_than_the_driver(scene: Scene) -> None:
    query = scene.query
    scene.pair.cut()
    scene.pair.source.fill(20, events=1)
    end = query.reader.latestOffset(query.at, ALL)
    parts = query.reader.partitions(query.at, end)
    scene.promote()
    scene.publish(40)
    with pytest.raises(RelayError, match=GONE):
        ids(query.reader, parts)


def test_a_session_that_comes_to_another_server_behind_a_pooler(
    outbox: Outbox, query: Query
) -> None:
    """Nothing tells the reader of it: what it knew of its session is of the former server."""
    assert query.trigger() == 0
    outbox.conn.execute("delete from relay.witnesses where id = %s", (query.at["witness"],))
    outbox.fill(1, events=1)
    query.refusal()


# Replicas


@pytest.fixture
def replica(scene: Scene) -> Iterator[Query]:
    """A query on the standby, which has read two events."""
    scene.pair.replicate()
    made = Query(scene.pair.standby.dsn("app"))
    assert made.trigger() == 2
    yield made
    made.reader.stop()


@pytest.mark.rare
def test_a_replica_goes_on_at_the_newest_witness(scene: Scene, replica: Query) -> None:
    """Beside a transaction that stays open: a standby's own snapshot sees nothing that begins after it."""
    source = scene.pair.source
    with psycopg.connect(source.publisher_dsn) as slow:
        slow.execute("select relay.publish(%s, null, %s)", (host(1), Jsonb([event(1)])))
        source.fill(3, events=1)
        assert scene.query.trigger() == 3
        scene.pair.replicate()
        assert replica.trigger() == 3
        assert replica.at["witness"] == scene.query.at["witness"]
        source.fill(2, events=1)
        scene.pair.replicate()
        # Nobody has written a witness of these yet.
        assert replica.trigger() == 0
    assert scene.query.trigger() == 3
    scene.pair.replicate()
    assert replica.trigger(ReadMaxRows(1)) > 0
    while replica.trigger(ReadMaxRows(1)):
        pass
    assert sorted(replica.read) == sorted(scene.query.read) == stored(source)


def test_a_replica_that_lags_is_waited_for(scene: Scene, replica: Query) -> None:
    """A query of the primary goes on there, after the primary has failed for it."""
    query, copy = scene.query, scene.pair.copy
    copy.conn.execute("select pg_wal_replay_pause()")
    scene.pair.source.fill(3, events=1)
    assert query.trigger() == 3
    start, end = query.offsets[1], query.offsets[0]
    query.restart(scene.pair.standby.dsn("app"))
    assert query.trigger() == 0
    resume = Timer(0.5, copy_resumes, (copy.superuser_dsn,))
    resume.start()
    assert len(ids(query.reader, query.reader.partitions(start, end))) == 3
    resume.join()
    query.restart(scene.pair.source.jobs_dsn)
    scene.pair.source.fill(2, events=1)
    assert query.trigger() == 2
    scene.pair.replicate()
    query.restart(scene.pair.standby.dsn("app"))
    assert query.trigger() == 0
    assert sorted(query.read) == stored(copy)


def copy_resumes(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("select pg_wal_replay_resume()")


@pytest.mark.rare
def test_a_replica_of_another_history_is_refused_once_it_has_had_the_time(
    scene: Scene, replica: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query_positions, "TASK_SECONDS", 0.2)
    replica.offsets[0] = {**replica.at, "witness": "00000000-0000-4000-8000-000000000000"}
    assert replica.trigger() == 0
    with pytest.raises(RelayError, match=GONE):
        wait_until(lambda: replica.trigger() > 0)


@pytest.mark.rare
def test_a_replica_for_which_nobody_writes_witnesses_says_so(
    scene: Scene,
    replica: Query,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(query_positions, "STANDSTILL_SECONDS", 0.0)
    monkeypatch.setattr(query_positions, "TASK_SECONDS", 0.2)
    scene.pair.source.fill(3, events=1)
    scene.pair.replicate()

    def said() -> bool:
        assert replica.trigger() == 0
        report = replica.reader.reportLatestOffset()
        assert report is not None
        assert report["rowsBehind"] == 3
        return "its newest witness does not see" in caplog.text

    wait_until(said)
    replica.reader.prepareForTriggerAvailableNow()
    with pytest.raises(RelayError, match="its newest witness does not see"):
        replica.trigger()
    scene.pair.source.conn.execute("select relay.take_witness()")
    scene.pair.replicate()
    assert replica.trigger() == 3


@pytest.mark.rare
def test_a_query_of_a_replica_that_is_promoted(scene: Scene, replica: Query) -> None:
    """Its session lives on, and what it has read is there."""
    scene.pair.source.fill(3, events=1)
    scene.pair.replicate()
    scene.promote()
    scene.publish(2)
    wait_until(lambda: replica.trigger() > 0)
    assert sorted(replica.read) == stored(scene.pair.copy)


# Restored servers


def test_a_server_that_is_restored_from_a_backup() -> None:
    """Its data folder is one from before, on the same timeline, and its ids pass the checkpoint."""
    with start_server() as server:
        if not isinstance(server, EmbeddedServer):
            pytest.skip("needs the server's data folder")
        with Outbox(server.create_database("app")) as outbox:
            outbox.install()
            query = Query(outbox.jobs_dsn)
            outbox.fill(2, events=1)
            query.trigger()
            replace_folder(server, "data", "backup")
            outbox.reconnect()
            outbox.fill(20, events=1)
            query.restart()
            assert query.trigger() == 20
            replace_folder(server, "backup", "data")
            outbox.reconnect()
            query.restart()
            assert "restored from a backup" in query.refusal()
            outbox.fill(40, events=1)
            assert "restored from a backup" in query.refusal()
            # Where it was when the backup was made, it goes on.
            del query.offsets[0], query.read[2:]
            assert query.trigger() == 40
            assert sorted(query.read) == stored(outbox)
            query.reader.stop()


@pytest.mark.rare
def test_a_dump_in_another_cluster(outbox: Outbox, query: Query) -> None:
    """It has the checkpoint's witness as a row, and its ids pass those of the checkpoint."""
    outbox.fill(4, events=1)
    query.trigger()
    with start_server() as server:
        if not isinstance(server, EmbeddedServer) or not server.has("pg_dump"):
            pytest.skip("needs pg_dump beside the server")
        binaries = server.cluster._bin
        dump = subprocess.run(
            [binaries / "pg_dump", "--no-owner", "--no-acl", "-d", outbox.superuser_dsn],
            check=True,
            capture_output=True,
        ).stdout
        with Outbox(server.create_database(outbox.slot)) as other:
            subprocess.run(
                [binaries / "psql", "-q", "-d", other.superuser_dsn],
                input=dump,
                check=True,
                capture_output=True,
            )
            witnesses = other.column("select id::text from relay.witnesses")
            assert query.at["witness"] in witnesses
            advance(other, int(query.at["snapshot"].split(":")[1]) + 100)
            other.fill(5, events=1)
            # Roles of the first cluster have no rights there.
            query.restart(other.superuser_dsn)
            assert "another one, or one into which a dump was restored" in query.refusal()


def advance(outbox: Outbox, xid: int) -> None:
    """Let a server give transaction ids up to one."""
    outbox.conn.execute(
        f"do $$ begin while pg_snapshot_xmax(pg_current_snapshot())::text::bigint < {xid} loop"
        " perform pg_current_xact_id(); commit; end loop; end $$".encode()
    )


@pytest.mark.parametrize(
    "again",
    [
        pytest.param(
            "truncate relay.witnesses; select relay.begin_history()", id="installed again"
        ),
        pytest.param(
            "create table saved as select * from relay.witnesses; delete from relay.witnesses;"
            "insert into relay.witnesses overriding system value select * from saved",
            id="rows copied",
        ),
    ],
)
def test_witnesses_that_are_not_those_that_were_written(
    outbox: Outbox, query: Query, again: LiteralString
) -> None:
    """As `uninstall` and `init`, a dump restored into its own server, and pg_repack leave them."""
    for statement in again.split(";"):
        outbox.conn.execute(statement)
    outbox.fill(3, events=1)
    query.restart()
    query.refusal()
    assert len(query.read) == 2


# What is the same history


@pytest.mark.parametrize(
    "upkeep",
    [
        "vacuum full relay.witnesses",
        "vacuum (freeze) relay.witnesses",
        "cluster relay.witnesses using witnesses_pkey",
    ],
)
def test_upkeep_of_the_witnesses(outbox: Outbox, query: Query, upkeep: LiteralString) -> None:
    outbox.conn.execute(upkeep)
    outbox.fill(3, events=1)
    query.restart()
    assert query.trigger() == 3
    assert sorted(query.read) == stored(outbox)


def test_a_server_that_pg_upgrade_has_made(outbox: Outbox, query: Query) -> None:
    """It has another identifier, which the checkpoint names from its next offset on."""
    outbox.fill(3, events=1)
    query.offsets[0] = {**query.at, "server": "1"}
    query.restart()
    assert query.trigger() == 3
    assert query.at["server"] != "1"
    assert sorted(query.read) == stored(outbox)


def test_a_checkpoint_of_an_earlier_relay_gets_a_witness(
    outbox: Outbox, query: Query, caplog: pytest.LogCaptureFixture
) -> None:
    former = {name: text for name, text in query.at.items() if name != "witness"}
    query.offsets[0] = {**former, "installed": "1700000000.5"}
    query.restart()
    assert query.trigger() == 0
    assert query.trigger() == 0
    assert caplog.text.count("names no witness") == 1
    outbox.fill(3, events=1)
    assert query.trigger() == 3
    assert query.at["witness"]
    assert sorted(query.read) == stored(outbox)


# Which witnesses are asked for, and when


def test_a_stream_without_new_events_writes_nothing(outbox: Outbox, query: Query) -> None:
    query.restart()
    query.trigger()
    count = "select count(*) from relay.witnesses"
    before = outbox.value(count)
    for _ in range(20):
        assert query.trigger() == 0
        query.reader.prepareForTriggerAvailableNow()
        assert query.trigger() == 0
        query.restart()
    assert outbox.value(count) == before


def test_a_backlog_that_is_cut_needs_one_witness(outbox: Outbox, query: Query) -> None:
    outbox.fill(30, events=1)
    before = outbox.value("select count(*) from relay.witnesses")
    sizes = []
    while size := query.trigger(ReadMaxRows(3)):
        sizes.append(size)
    assert sizes == [3] * 10
    assert outbox.value("select count(*) from relay.witnesses") == before + 1
    assert sorted(query.read) == stored(outbox)


def test_the_query_reads_what_is_committed_when_it_begins(outbox: Outbox, query: Query) -> None:
    """Also what the newest witness, not a second old, does not see; and nothing that comes later."""
    for _ in range(3):
        outbox.conn.execute("select relay.take_witness()")
        outbox.fill(1, events=1)
        query.restart()
        query.reader.prepareForTriggerAvailableNow()
        outbox.fill(1, events=1)
        before = len(query.read)
        while query.trigger():
            pass
        assert len(query.read) == before + 1
        query.restart()
        assert query.trigger() == 1


def test_the_witness_of_a_former_position_is_not_needed(outbox: Outbox, query: Query) -> None:
    outbox.fill(3, events=1)
    query.trigger()
    start, end = query.offsets[1], query.offsets[0]
    outbox.conn.execute("delete from relay.witnesses where id = %s", (start["witness"],))
    query.restart()
    assert len(ids(query.reader, query.reader.partitions(start, end))) == 3
    query.reader.prepareForTriggerAvailableNow()
    assert query.trigger() == 0


def test_a_witness_that_retention_has_removed_together_with_events(
    outbox: Outbox, query: Query
) -> None:
    outbox.fill(3, events=1)
    outbox.conn.execute("delete from relay.witnesses where not kept")
    outbox.conn.execute("delete from outbox_message_t")
    # As the `relay init` that sets retention up.
    outbox.conn.execute("grant select on relay.removed to app_jobs")
    outbox.conn.execute(
        "insert into relay.removed (outbox, newest, snapshot)"
        " values ('public.outbox_message_t', pg_snapshot_xmax(pg_current_snapshot())::text::bigint::text::xid8, "
        "pg_current_snapshot())"
    )
    outbox.conn.execute("select pg_current_xact_id()")
    outbox.fill(2, events=1)
    query.restart()
    assert "or retention has removed it together with events" in query.refusal()
    query.options = {"failOnDataLoss": "false"}
    query.restart()
    assert query.trigger() == 2
    assert query.at["witness"]
    plan(outbox.jobs_dsn, fromSnapshot=query.position)


def test_a_new_query_begins_where_progress_says_that_one_is(outbox: Outbox, query: Query) -> None:
    outbox.fill(6, events=1)
    query.trigger(ReadMaxRows(2))
    report = query.reader.reportLatestOffset()
    assert report is not None
    assert (report["position"], report["rowsBehind"]) == (query.position, 4)
    other = Query(outbox.jobs_dsn, {"startingPosition": report["position"]})
    assert other.trigger() == 4
    other.reader.stop()
    assert sorted(query.read + other.read) == stored(outbox)
    parts = {"fromSnapshot": report["position"], "toSnapshot": other.position}
    batch = DifferenceReader(parse({"dsn": outbox.jobs_dsn, **parts}, "batch"))
    assert sorted(ids(batch, batch.partitions())) == sorted(other.read)


def test_now_sees_what_is_committed_and_nothing_else(outbox: Outbox) -> None:
    for _ in range(3):
        outbox.conn.execute("select relay.take_witness()")
        outbox.fill(1, events=1)
        query = Query(outbox.jobs_dsn, {"startingPosition": "now"})
        assert query.trigger() == 0
        outbox.fill(2, events=1)
        assert query.trigger() == 2
        query.reader.stop()


@pytest.mark.rare
def test_a_batch_of_a_replica_that_lags_for_good_is_a_transient_fault(
    scene: Scene, replica: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading.wait_until_visible.retry, "stop", lambda _: True)
    scene.pair.copy.conn.execute("select pg_wal_replay_pause()")
    scene.pair.source.fill(3, events=1)
    scene.query.trigger()
    with pytest.raises(TransientFault, match="it lags, or follows another"):
        plan(replica.dsn, fromSnapshot=scene.query.position)
    scene.pair.copy.conn.execute("select pg_wal_replay_resume()")
    scene.pair.replicate()
    plan(replica.dsn, fromSnapshot=scene.query.position)


def test_relays_role_keeps_positions(outbox: Outbox) -> None:
    with outbox.limited_role() as (_, dsn):
        query = Query(dsn)
        outbox.fill(2, events=1)
        assert query.trigger() == 2
        query.reader.stop()
