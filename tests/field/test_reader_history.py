"""Readers of the log whose database is another one than it was: no event is skipped since its number is a former one's.

Reports: sliceworkz/eventstore#143 (a dump in a younger cluster, whose transaction ids are those of events that were
read: history is absent, and new events sort before it), ThreeDotsLabs/watermill#576 (after an import nothing is ever
read), dpkp/kafka-python#972, tulios/kafkajs#1119 and tulios/kafkajs#1777 (a stored offset that is no longer one: the
consumer goes on elsewhere, and nothing tells that from its work), Aiven-Open/tiered-storage-for-apache-kafka#663 (its
lag is 0 from then on), noctarius/timescaledb-event-streamer#316 and Nextdoor/pg-bifrost#63 (to go on at the present end
or to say so), kurrent-io/KurrentDB#1301 (a failover reads a checkpoint past what was never handled),
debezium/debezium#3620, apache/flink-cdc#1893 and risingwavelabs/risingwave#14060 (after a restart everything up to a
number is skipped, and the position goes on), debezium/debezium#3970 (a silent loss where what keeps the position was
made again), PostHog/posthog#85687 and toluaina/pgsync#126 (an xmin has no epoch, and a frozen row keeps it).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from relay.admin.check import examine
from relay.client.reader import ReaderError, subscribe
from tests.chaos.test_failover import Pair, streaming_pair
from tests.clusters import lead, next_id, pass_ids, restore, two_clusters
from tests.outbox import Outbox, event, host, initialise, wait_until
from tests.postgres import EmbeddedServer, start_server
from tests.process import relay

pytestmark = pytest.mark.timeout(300)

_ANOTHER = "of another history of this database"


def _publish(outbox: Outbox, *numbers: int) -> None:
    for number in numbers:
        outbox.publish(host(number), event(number))


class Reader:
    """A reader of one kind: `take` returns the numbers of its next events, of which all are done then."""

    declared = "select relay.declare_reader('r', start => 'beginning')"

    def take(self, dsn: str, count: int) -> list[int]:
        raise NotImplementedError


class InSql(Reader):
    def take(self, dsn: str, count: int) -> list[int]:
        found: list[int] = []
        with psycopg.connect(dsn) as conn:
            while len(found) < count:
                rows = conn.execute("select position, payload from relay.read('r', 3)").fetchall()
                assert rows, f"nothing is new after {found}"
                found += [int(payload["amount"]) for _, payload in rows if payload]
                conn.execute("select relay.advance('r', %s)", (rows[0][0],))
                conn.commit()
        return found


class InPython(Reader):
    options: dict[str, Any] = {}  # noqa: RUF012

    def take(self, dsn: str, count: int) -> list[int]:
        found: list[int] = []
        reader = subscribe(dsn, "r", start=None, poll=0.05, page=3, **self.options)
        with closing(iter(reader)) as transactions:  # type: ignore[type-var]
            while len(found) < count:
                transaction = next(transactions)
                found += [int(each.payload["amount"]) for each in transaction.events]
                transaction.done()
        return found


class Lanes(InPython):
    declared = "select relay.declare_reader('r', start => 'beginning', lanes => 3)"
    options = {"lanes": 3}  # noqa: RUF012


KINDS = [pytest.param(kind(), id=kind.__name__) for kind in (InSql, InPython, Lanes)]
_REFUSED = (psycopg.errors.ObjectNotInPrerequisiteState, ReaderError)


@pytest.fixture(scope="module")
def clusters() -> Iterator[Any]:
    with two_clusters() as both:
        yield both


@pytest.mark.parametrize("reader", KINDS)
def test_a_dump_in_another_cluster_is_refused_until_a_seek(
    clusters: Any, reader: Reader, tmp_path: Path
) -> None:
    """At once, and when the new cluster's ids have passed the position; then it begins where it is told to."""
    old, new = clusters
    lead(old, new)
    name = f"app_{type(reader).__name__.lower()}"
    with Outbox(old.create_database(name)) as before:
        before.install()
        before.reader.execute(reader.declared.encode())
        _publish(before, *range(8))
        assert sorted(reader.take(before.reader_dsn, 8)) == list(range(8))
        _publish(before, 8, 9)
        passed = next_id(before)
        with Outbox(restore(old, new, name)) as after:
            assert next_id(after) < passed
            settings = after.settings()
            with pytest.raises(_REFUSED, match="Run `relay init`"):
                reader.take(after.reader_dsn, 1)
            with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="`relay init`"):
                after.reader.execute("select relay.seek('r', 'now')")
            with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="`relay init`"):
                after.reader.execute("select relay.declare_reader('other')")
            initialise(settings, after.superuser_dsn)
            _publish(after, 10, 11)
            with pytest.raises(_REFUSED, match=_ANOTHER):
                reader.take(after.reader_dsn, 1)
            pass_ids(after, passed)
            _publish(after, 12)
            with pytest.raises(_REFUSED, match=_ANOTHER) as raised:
                reader.take(after.reader_dsn, 1)
            assert "relay.seek" in str(raised.value)
            told = [each.text for each in examine(settings)]
            assert any("the reader 'r' stands still" in each for each in told), told
            config = str(after.config_file(tmp_path / "relay.yaml"))
            alive = relay("status", "--check", "-c", config)
            assert "the reader 'r' stands still" in alive.stderr
            assert "relay reader seek r" in alive.stderr
            (listed, *_) = json.loads(relay("reader", "list", "-c", config, "--json").stdout)
            assert (listed["other_history"], listed["lag_seconds"] > 0) == (True, True)
            assert "another: seek" in relay("reader", "list", "-c", config).stdout
            done = relay("reader", "seek", "r", "--to", "beginning", "--yes", "-c", config)
            assert done.returncode == 0, done.stderr
            assert sorted(reader.take(after.reader_dsn, 13)) == list(range(13))
            _publish(after, 13)
            assert reader.take(after.reader_dsn, 1) == [13]
            assert not any("stands still" in each.text for each in examine(settings))


def test_what_was_noted_in_another_cluster_says_nothing_in_this_one(clusters: Any) -> None:
    """What retention removed there took the witnesses of this one; what readers had read there was removed unread."""
    old, new = clusters
    lead(old, new)
    outbox = "public.outbox_message_t"
    with Outbox(old.create_database("noted")) as before:
        before.install(retention={"keep": "1d"})
        before.reader.execute("select relay.declare_reader('r')")
        before.conn.execute(
            "insert into relay.removed (outbox, newest, snapshot)"
            " values (%s, pg_current_xact_id(), pg_current_snapshot())",
            (outbox,),
        )
        floor = "select relay.retention_floor(%s)::text"
        assert not before.value(floor, (outbox,)).startswith("(1,t")
        with Outbox(restore(old, new, "noted")) as after:
            initialise(after.settings(retention={"keep": "1d"}), after.superuser_dsn)
            assert after.column("select newest from relay.removed") == []
            assert after.value(floor, (outbox,)).startswith("(1,t")
            pass_ids(after, next_id(before))
            for _ in range(5):
                after.conn.execute("select relay.take_witness()")
            of_here = "select count(*) from relay.witnesses where relay.holds_witness(id)"
            held = after.value(of_here)
            after.conn.execute("select relay.remove_witnesses()")
            assert after.value(of_here) == held
            after.reader.execute("select relay.seek('r', 'now')")
            snapshots = after.column(
                "select snapshot::text from relay.readers where target = 'relay.declare_reader'"
            )
            assert snapshots != ["1:1:"]


@pytest.mark.parametrize("reader", KINDS)
def test_a_dump_of_the_same_cluster_goes_on(clusters: Any, reader: Reader) -> None:
    """Its transaction ids go on, and the position and the events are of one moment."""
    server, _ = clusters
    name = f"own_{type(reader).__name__.lower()}"
    with Outbox(server.create_database(name)) as before:
        before.install()
        before.reader.execute(reader.declared.encode())
        _publish(before, *range(8))
        assert sorted(reader.take(before.reader_dsn, 8)) == list(range(8))
        _publish(before, 8, 9)
        with Outbox(restore(server, server, name, f"{name}_again")) as after:
            # To move the reader, as to now, would skip what it has not read.
            with pytest.raises(_REFUSED, match="Where the reader is refused after it"):
                reader.take(after.reader_dsn, 1)
            told = [each.text for each in examine(after.settings()) if "stands still" in each.text]
            assert told
            assert all(
                "run `relay init`, and if it stands still after that" in each for each in told
            )
            warned: list[str] = []
            initialise(after.settings(), warn=warned.append)
            assert [each for each in warned if "of a dump of this server" in each]
            _publish(after, 10)
            assert sorted(reader.take(after.reader_dsn, 3)) == [8, 9, 10]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with streaming_pair() as made:
        made.source.install()
        yield made


def _promote(pair: Pair) -> None:
    pair.fail_over()
    wait_until(lambda: not pair.copy.value("select pg_is_in_recovery()"))


@pytest.mark.chaos
@pytest.mark.rare
@pytest.mark.parametrize("reader", KINDS)
def test_a_failover_without_loss_stops_no_reader(pair: Pair, reader: Reader) -> None:
    pair.source.reader.execute(reader.declared.encode())
    _publish(pair.source, *range(4))
    assert sorted(reader.take(pair.source.reader_dsn, 4)) == list(range(4))
    pair.replicate()
    _promote(pair)
    _publish(pair.copy, 4, 5)
    assert sorted(reader.take(pair.copy.reader_dsn, 2)) == [4, 5]
    assert (
        initialise(pair.copy.settings(source={"dsn": pair.copy.superuser_dsn, "mode": "poll"}))
        == []
    )
    _publish(pair.copy, 6)
    assert reader.take(pair.copy.reader_dsn, 1) == [6]


@pytest.mark.chaos
@pytest.mark.rare
@pytest.mark.parametrize("passes", [False, True], ids=["at once", "ids passed"])
@pytest.mark.parametrize("reader", KINDS)
def test_a_failover_with_a_loss_takes_the_position_with_it(
    pair: Pair, reader: Reader, passes: bool
) -> None:
    """The position is lost together with what it saw: the reader goes on from what the promoted server has."""
    source, copy = pair.source, pair.copy
    source.reader.execute(reader.declared.encode())
    _publish(source, *range(4))
    assert sorted(reader.take(source.reader_dsn, 4)) == list(range(4))
    pair.cut()
    _publish(source, *range(4, 20))
    assert sorted(reader.take(source.reader_dsn, 16)) == list(range(4, 20))
    lost = next_id(source)
    _promote(pair)
    if passes:
        pass_ids(copy, lost)
    _publish(copy, *range(100, 110))
    assert sorted(reader.take(copy.reader_dsn, 10)) == list(range(100, 110))


@pytest.mark.chaos
@pytest.mark.rare
def test_a_position_in_hand_of_what_a_failover_has_lost_is_refused(pair: Pair) -> None:
    """A program reads, the server is replaced, and the program advances: the number of the position is the same."""
    source, copy = pair.source, pair.copy
    source.reader.execute("select relay.declare_reader('r', start => 'beginning')")
    _publish(source, 0)
    pair.cut()
    _publish(source, *range(1, 20))
    (held,) = {row[0] for row in source.reader.execute("select position from relay.read('r')")}
    _promote(pair)
    pass_ids(copy, next_id(copy) + 100)
    _publish(copy, *range(100, 105))
    number = copy.reader.value("select position from relay.read('r') limit 1").split("/")[0]
    assert held.split("/")[0] == number
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="has been replaced"):
        copy.reader.execute("select relay.advance('r', %s)", (held,))
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="Read again"):
        copy.reader.execute("select relay.read('r', 10, %s)", (held,))
    for statement in (
        "select relay.seek('r', %s)",
        "select relay.declare_reader('s', start => %s)",
    ):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="of another server"):
            copy.conn.execute(statement.encode(), (held,))
    assert InSql().take(copy.reader_dsn, 6) == [0, *range(100, 105)]


@pytest.mark.chaos
@pytest.mark.rare
def test_a_running_reader_is_told_that_its_database_is_a_dump(clusters: Any) -> None:
    """Its address leads to the new cluster, and its position has the same number there."""
    old, new = clusters
    lead(old, new)
    with Outbox(old.create_database("moved")) as before:
        before.install()
        before.reader.execute("select relay.declare_reader('r', start => 'beginning')")
        _publish(before, *range(6))
        with Outbox(restore(old, new, "moved")) as after:
            initialise(after.settings(), after.superuser_dsn)
            pass_ids(after, next_id(before))
            either = make_conninfo(
                before.superuser_dsn,
                host="127.0.0.1,127.0.0.1",
                port=f"{old.cluster.port},{new.cluster.port}",
            )
            with closing(iter(subscribe(either, "r", start=None, poll=0.05))) as reader:  # type: ignore[type-var]
                first = next(reader)
                before.conn.close()
                with psycopg.connect(old.dsn(), autocommit=True) as conn:
                    conn.execute("alter database moved allow_connections false")
                    conn.execute(
                        "select pg_terminate_backend(pid) from pg_stat_activity where datname = 'moved'"
                    )
                # It goes to the next address where it is refused.
                with pytest.raises(ReaderError, match=_ANOTHER):
                    first.done()
            assert after.value("select count(*) from relay.log_positions") == 1


REWRITES: dict[str, str] = {
    "vacuum full": "vacuum full relay.witnesses",
    "cluster": "cluster relay.witnesses using witnesses_pkey",
    "freeze": "vacuum freeze relay.witnesses",
    "another column": "alter table relay.witnesses add column more int; vacuum relay.witnesses",
}


@pytest.mark.parametrize("rewrite", REWRITES.values(), ids=REWRITES)
@pytest.mark.parametrize("reader", KINDS)
def test_upkeep_of_the_witnesses_stops_no_reader(
    outbox: Outbox, reader: Reader, rewrite: str
) -> None:
    outbox.reader.execute(reader.declared.encode())
    _publish(outbox, 0, 1)
    assert sorted(reader.take(outbox.reader_dsn, 2)) == [0, 1]
    for each in rewrite.split("; "):
        outbox.conn.execute(each.encode())
    _publish(outbox, 2)
    assert reader.take(outbox.reader_dsn, 1) == [2]


def test_a_wrapped_transaction_id_is_the_same_history() -> None:
    """An xmin is modulo 2^32, and the transaction ids of a later epoch are greater than all before."""
    with start_server() as server:
        if not isinstance(server, EmbeddedServer) or not server.has("pg_resetwal"):
            pytest.skip("needs pg_resetwal beside the server")
        with Outbox(server.create_database("app")) as outbox:
            outbox.install()
            outbox.reader.execute("select relay.declare_reader('r', start => 'beginning')")
            _publish(outbox, 0, 1)
            assert InSql().take(outbox.reader_dsn, 2) == [0, 1]
            for epoch in (1, 2):
                server.stop()
                subprocess.run(
                    [server.cluster._bin / "pg_resetwal", "-e", str(epoch), server.cluster.data],
                    check=True,
                    capture_output=True,
                    **server.cluster._process_options(),
                )
                server.start()
                outbox.reconnect()
                assert next_id(outbox) > epoch << 32
                _publish(outbox, 2, 3)
                assert InSql().take(outbox.reader_dsn, 2) == [2, 3]
                outbox.conn.execute("select relay.take_witness()")
                assert outbox.value("select bool_and(relay.holds_witness(id)) from relay.witnesses")


def test_retention_of_witnesses_keeps_the_history(outbox: Outbox) -> None:
    outbox.reader.execute("select relay.declare_reader('r', start => 'beginning')")
    for _ in range(5):
        outbox.conn.execute("select relay.take_witness()")
    outbox.conn.execute(
        """
        insert into relay.retained (outbox, offset_column) values ('public.outbox_message_t', 'c_offset');
        insert into relay.removed (outbox, newest, snapshot)
        values ('public.outbox_message_t', pg_current_xact_id(), pg_current_snapshot())
        """
    )
    assert outbox.value("select relay.remove_witnesses()") > 0
    _publish(outbox, 0)
    assert InSql().take(outbox.reader_dsn, 1) == [0]


def test_nobody_forges_a_history(outbox: Outbox) -> None:
    """Not who publishes, nor who reads: neither a witness, nor which one a reader refers to."""
    role = f"{outbox.slot}_forges"
    outbox.conn.execute(
        f"create role {role} login password 'p' in role relay_reader, relay_publisher".encode()
    )
    try:
        with psycopg.connect(outbox.dsn_as(role), autocommit=True) as conn:
            conn.execute("select relay.declare_reader('r', start => 'beginning')")
            for statement in (
                "select relay.take_witness()",
                "do $$ begin perform relay.take_witness(); exception when check_violation then null; end $$",
                "select relay.begin_history()",
                "insert into relay.witnesses (snapshot, lsn) values ('1:9000:', '0/1')",
                "update relay.witnesses set kept = true",
                "delete from relay.witnesses",
                "select * from relay.witnesses",
                "update relay.log_readers set history = null",
                "select relay.move_reader('r', relay.this_call(), null, '3:3:')",
                "select relay.log_start('now', gen_random_uuid())",
                "select relay.present_history()",
            ):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    conn.execute(statement.encode())
            # A position that says of itself that it is of here moves the reader of who says so, and no other.
            _publish(outbox, 0)
            assert InSql().take(outbox.dsn_as(role), 1) == [0]
    finally:
        outbox.conn.execute(f"drop role {role}".encode())


def test_a_reader_that_waits_writes_nothing(outbox: Outbox) -> None:
    outbox.reader.execute("select relay.declare_reader('r', start => 'beginning')")
    _publish(outbox, 0)
    assert InSql().take(outbox.reader_dsn, 1) == [0]
    before = next_id(outbox), outbox.value("select count(*) from relay.witnesses")
    own = "select xact_commit from pg_stat_database where datname = current_database()"
    for _ in range(20):
        assert not outbox.reader.column("select position from relay.read('r')")
    assert outbox.value(own) >= 0
    assert outbox.value("select count(*) from relay.witnesses") == before[1]
    assert outbox.value("select pg_current_xact_id_if_assigned() is null")


def test_rows_that_were_written_again_are_no_history(outbox: Outbox) -> None:
    """As pg_repack leaves them: `relay init` begins another one, and the server is the same."""
    outbox.reader.execute("select relay.declare_reader('r', start => 'beginning')")
    outbox.conn.execute(
        """
        create temporary table saved as select * from relay.witnesses;
        delete from relay.witnesses;
        insert into relay.witnesses overriding system value select * from saved
        """
    )
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match=_ANOTHER):
        outbox.reader.execute("select relay.read('r')")
    initialise(outbox.settings())
    _publish(outbox, 0)
    assert InSql().take(outbox.reader_dsn, 1) == [0]


def test_positions_of_a_former_schema_get_the_present_history(outbox: Outbox) -> None:
    """Where they are not ahead of the server; `relay init` says that it could not prove them."""
    for name in ("r", "ahead"):
        outbox.reader.execute("select relay.declare_reader(%s, start => 'beginning')", (name,))
    _publish(outbox, 0)
    (held,) = outbox.reader.column("select position from relay.read('r')")
    outbox.conn.execute(
        """
        alter table relay.log_readers drop column history cascade;
        update relay.log_positions set snapshot = '9000000000:9000000000:'
         where reader = (select id from relay.log_readers where name = 'ahead');
        update relay.migrations set digest = '482df0493cde99c8bad6f5900aaf2fca317222ce0a31f25bf174097187505ea3'
         where name = 'outbox/003_readers.sql'
        """
    )
    warned: list[str] = []
    initialise(outbox.settings(), warn=warned.append)
    assert [each for each in warned if "of this server: 1:" in each and "cannot prove" in each]
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="does not say which history"):
        outbox.reader.execute("select relay.advance('r', %s)", (held.split("@")[0],))
    assert InSql().take(outbox.reader_dsn, 1) == [0]
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match=_ANOTHER):
        outbox.reader.execute("select relay.read('ahead')")
    warned.clear()
    initialise(outbox.settings(), warn=warned.append)
    assert not [each for each in warned if "cannot prove" in each]
