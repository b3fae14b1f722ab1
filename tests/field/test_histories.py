"""Positions that are kept outside the source are of one history of it: on another one relay stops.

The kind: a position that is compared as a number alone is wrong on another server, and looks right again by accident as
soon as that server's transaction ids have passed it (debezium/dbz#1230 names LSNs; the same happens to xids).
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import deltalake
import psycopg
import pytest

from relay import Delivery
from relay.admin.offsets import plan_seek, seek
from relay.admin.sinks import seek as seek_sink
from relay.config.settings import Settings
from relay.demo.embedded import Cluster
from relay.faults import ConfigurationError, RelayError, TransientFault
from relay.source.recognition import Recognition
from relay.source.server import current_position
from relay.source.walsender import open_replication
from relay.source.witnesses import cover, holds, recent, take
from relay.spark.session import Session
from relay.store import groups
from relay.store.connections import connect
from tests.clusters import replace_folder, restore, two_clusters
from tests.outbox import (
    PROJECTION,
    Outbox,
    event,
    host,
    initialise,
    relaying,
    run_until_fault,
    wait_until,
)
from tests.postgres import EmbeddedServer, Server, start_server
from tests.roles import prepare

MODES = ["auto", "poll"]
POLL_IS_RARE = ["auto", pytest.param("poll", marks=pytest.mark.rare)]
AUTO_IS_RARE = [pytest.param("auto", marks=pytest.mark.rare), "poll"]


@pytest.fixture
def target(database: str) -> Iterator[Outbox]:
    """A database of another server than the source."""
    with Outbox(database) as made:
        made.conn.execute(PROJECTION)
        yield made


@contextmanager
def embedded() -> Iterator[EmbeddedServer]:
    """A server that a test may put back or copy."""
    with start_server() as server:
        if not isinstance(server, EmbeddedServer) or not server.has("pg_dump"):
            pytest.skip("needs the server's programs")
        yield server


def settings_of(server: Server, target: Outbox, mode: str) -> Settings:
    """A relay that reads `app` of a server as a member of relay, who may replicate only in mode auto."""
    with psycopg.connect(server.dsn(), autocommit=True) as conn, suppress(psycopg.Error):
        conn.execute("create role relay nologin")
    role = "streams" if mode == "auto" else "polls"
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        may = "replication" if mode == "auto" else "noreplication"
        with suppress(psycopg.errors.DuplicateObject):
            conn.execute(f"create role {role} login {may} password 'p' in role relay".encode())
    with Outbox(server.dsn("app")) as app:
        dsn = app.dsn_as(role)
        source = {"dsn": dsn, "slot": "app", "publication": "app", "mode": mode}
        handlers = {
            **app.config()["handlers"],
            "deliver": {"type": "function", "callable": f"{__name__}:deliver"},
            "work": {"type": "queue"},
        }
        return Settings(
            **app.config(
                source=source,
                target={"dsn": target.relay_dsn},
                handlers=handlers,
                routes=[{"handlers": list(handlers)}],
            )
        )


DELIVERED: list[str] = []
"""The ids of the events that the sink has got."""


def deliver(delivery: Delivery) -> None:
    DELIVERED.extend(str(each.id) for each in delivery.events)


def install(server: Server, settings: Settings) -> None:
    """Do the work of `relay init` as an administrator, and declare the queue."""
    initialise(settings, source_dsn=server.dsn("app"))
    with connect(settings.target_dsn) as conn:
        conn.execute("select relay.declare_queue('work')")


def apply_events(server: Server, settings: Settings, target: Outbox, count: int) -> None:
    """Publish events one a commit, and run relay until they are applied and their positions stored."""
    before = target.handled()
    ids = "select id::text from outbox_message_t"
    with Outbox(server.dsn("app")) as app, relaying(settings):
        earlier = app.column(ids)
        for number in range(count):
            app.publish(host(number % 3), event(number + 1))
        wait_until(lambda: target.handled() >= before + count)
        wait_stored(app, target)
        published = set(app.column(ids)).difference(earlier)
        wait_until(lambda: published.issubset(DELIVERED))


def wait_stored(source: Outbox, target: Outbox) -> None:
    """Wait until the group has stored a snapshot that sees all events published so far."""
    newest = source.value("select max(c_xid::text::bigint) from outbox_message_t")
    wait_until(lambda: groups.origin(target.conn, "default").xmax > newest)


@contextmanager
def put_back(server: EmbeddedServer) -> Iterator[None]:
    """Take an image of a server's disk, put it back after the block, and publish more than was lost."""
    replace_folder(server, "data", "image")
    yield
    replace_folder(server, "image", "data")
    with Outbox(server.dsn("app")) as app:
        # More WAL and more ids than were lost.
        app.fill(60)
        app.conn.execute("select pg_switch_wal()")
        app.conn.execute("checkpoint")


@pytest.mark.rare
def test_spark_and_a_fill_take_nothing_of_an_older_image(
    target: Outbox, tmp_path: Path, spark_session: Session
) -> None:
    """The tasks of the target run on Spark, a sink writes a table, and a queue is filled from the log."""
    lake = tmp_path / "lake"

    def ids() -> set[str]:
        table = deltalake.DeltaTable(lake).to_pyarrow_table(columns=["id"])
        return set(table["id"].to_pylist())

    def drain() -> set[str]:
        with Outbox(server.dsn("app")) as app, relaying(settings, spark_session):
            app.fill(3)
            every = set(app.column("select id::text from outbox_message_t"))
            wait_until(lambda: set(target.column("select id::text from projection")) >= every)
            wait_until(
                lambda: deltalake.DeltaTable.is_deltatable(str(lake)) and ids() >= every, 120
            )
            wait_stored(app, target)
            return every

    with embedded() as server:
        server.create_database("app")
        with Outbox(server.dsn("app")) as app:
            settings = app.settings(
                engine="spark",
                source=settings_of(server, target, "auto").source,
                target={"dsn": target.relay_dsn},
                handlers={
                    **app.config()["handlers"],
                    "lake": {"type": "spark", "path": str(lake), "format": "delta", "every": 0.2},
                    "work": {"type": "queue"},
                },
                routes=[{"handlers": ["projection", "lake", "work"]}],
            )
        install(server, settings)
        drain()
        with put_back(server):
            written = drain()
        with connect(settings.target_dsn) as conn:
            conn.execute("select relay.rebuild_queue('work', 'beginning')")
        queued = target.value("select count(*) from relay.queue_messages")
        for _ in range(2):
            assert "does not have the witness" in run_until_fault(settings, spark_session)
        assert ids() == set(target.column("select id::text from projection")) == written
        assert target.value("select count(*) from relay.queue_messages") == queued


@pytest.mark.parametrize("mode", AUTO_IS_RARE)
def test_an_older_image_of_a_server_is_refused_when_its_ids_have_passed(
    target: Outbox, mode: str
) -> None:
    """A disk that was put back goes on on the same timeline: its WAL and its ids pass what was applied."""
    with embedded() as server:
        server.create_database("app")
        settings = settings_of(server, target, mode)
        install(server, settings)
        apply_events(server, settings, target, 3)
        with put_back(server):
            apply_events(server, settings, target, 10)
        applied = target.column("select id from projection order by seq")
        delivered, queued = (
            list(DELIVERED),
            target.value("select count(*) from relay.queue_messages"),
        )
        said = run_until_fault(settings)
        assert "does not have the witness" in said
        assert "restored from an older backup" in said
        assert "the newest that it has is of" in said
        assert target.column("select id from projection order by seq") == applied
        # No consumer has taken anything of the other history, and none says that it has all of it.
        assert delivered == DELIVERED
        assert queued == target.value("select count(*) from relay.queue_messages")
        assert run_until_fault(settings) == said

        # What an operator decides is a new position, of this history.
        seek(settings, plan_seek(settings, "end", None), None)
        apply_events(server, settings, target, 2)
        assert target.handled() == len(applied) + 2


@pytest.mark.parametrize("mode", POLL_IS_RARE)
def test_a_dump_in_another_cluster_is_refused_when_its_ids_have_passed(
    target: Outbox, mode: str
) -> None:
    with two_clusters() as (server, other):
        server.create_database("app")
        settings = settings_of(server, target, mode)
        install(server, settings)
        apply_events(server, settings, target, 10)
        applied = target.column("select id from projection order by seq")
        with psycopg.connect(other.dsn(), autocommit=True) as conn:
            prepare(conn)
        restore(server, other)
        restored = settings_of(other, target, mode)
        install(other, restored)
        with Outbox(other.dsn("app")) as app:
            app.fill(200)
            # Events that came with the dump have ids of the other cluster; without them nothing else tells.
            app.conn.execute("delete from outbox_message_t where c_offset <= 10")
        said = run_until_fault(restored)
        assert "does not have the witness" in said
        assert "another server" in said
        assert target.column("select id from projection order by seq") == applied


@pytest.mark.parametrize("mode", POLL_IS_RARE)
def test_an_upgraded_server_goes_on(target: Outbox, mode: str) -> None:
    """pg_upgrade makes another server, with another identifier, whose transaction ids go on."""
    with embedded() as server:
        server.create_database("app")
        settings = settings_of(server, target, mode)
        install(server, settings)
        apply_events(server, settings, target, 10)
        with Outbox(server.dsn("app")) as app:
            app.publish(host(1), event(1000))
            app.conn.execute("select pg_drop_replication_slot(slot_name) from pg_replication_slots")
        port = server.cluster.port
        server.stop()
        with upgraded(server, port) as newer:
            install(newer, settings)
            apply_events(newer, settings, target, 5)
            wait_until(lambda: target.handled() == 16)
            with Outbox(newer.dsn("app")) as app:
                everything = app.column("select id from outbox_message_t order by 1")
        assert target.column("select id from projection order by 1") == everything


@contextmanager
def upgraded(server: EmbeddedServer, port: int) -> Iterator[EmbeddedServer]:
    """A cluster to which a stopped one was upgraded, at the same port."""
    binaries, account = server.cluster._bin, server.cluster.data.stat()
    with TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        with Cluster(folder / "newer", bin_dir=binaries, port=port) as cluster:
            cluster.stop()
            work = folder / "work"
            work.mkdir()
            shutil.chown(work, account.st_uid, account.st_gid)
            subprocess.run(
                [
                    binaries / "pg_upgrade",
                    *("-b", binaries, "-B", binaries, "-d", server.cluster.data),
                    *("-D", cluster.data, "-U", "postgres", "--no-sync"),
                ],
                check=True,
                capture_output=True,
                cwd=work,
                user=account.st_uid,
                group=account.st_gid,
                env={"HOME": str(work), "PATH": "/usr/bin:/bin"},
            )
            cluster.start()
            yield EmbeddedServer(cluster)


def test_one_database_that_is_restored_into_its_server_goes_on(
    tmp_path: Path,
) -> None:
    """A dump has positions and outbox of one moment, and the ids of its server go on."""
    with embedded() as server:
        server.create_database("app")
        with Outbox(server.dsn("app")) as app:
            app.install()
            settings = app.settings()
            app.fill(3)
            app.drain(settings)
            app.conn.execute("select pg_drop_replication_slot(%s)", (app.slot,))
            binaries = server.cluster._bin
            dump = tmp_path / "app.dump"
            subprocess.run([binaries / "pg_dump", "-Fc", "-f", dump, app.superuser_dsn], check=True)
        server.drop_database("app")
        server.create_database("app")
        subprocess.run([binaries / "pg_restore", "-d", server.dsn("app"), dump], check=True)
        with Outbox(server.dsn("app")) as app:
            initialise(settings)
            app.fill(2)
            app.drain(settings)
            app.assert_exact()
            assert app.handled() == 25


def test_a_source_that_is_restored_into_its_server_is_refused(
    target: Outbox, tmp_path: Path
) -> None:
    """Its transaction ids go on, so that nothing but the witness tells: what came after the dump is gone."""
    with embedded() as server:
        server.create_database("app")
        settings = settings_of(server, target, "poll")
        install(server, settings)
        apply_events(server, settings, target, 3)
        binaries, dump = server.cluster._bin, tmp_path / "app.dump"
        subprocess.run([binaries / "pg_dump", "-Fc", "-f", dump, server.dsn("app")], check=True)
        apply_events(server, settings, target, 3)
        server.drop_database("app")
        server.create_database("app")
        subprocess.run([binaries / "pg_restore", "-d", server.dsn("app"), dump], check=True)
        install(server, settings)
        fault = run_until_fault(settings)
        assert "does not have the witness" in fault
        assert "--to end, which passes over what was published since" in fault


def test_a_source_that_sinks_have_polled_meanwhile_is_followed(outbox: Outbox) -> None:
    """The first start on another server ended where a sink had polled it between two readings of positions and ids."""
    settings = outbox.settings()
    outbox.conn.execute("update relay.groups set system_identifier = '1', timeline = 1")
    outbox.conn.execute(
        "insert into relay.groups (group_id, system_identifier, timeline) values ('default', '1', 1)"
        " on conflict (group_id) do update set system_identifier = '1', timeline = 1"
    )
    outbox.begin_sink("signed")
    recognition = Recognition(settings)
    with open_replication(settings) as stream, connect(settings.source_dsn) as session:
        comparison = recognition.inspect(stream)
        assert comparison.foreign
        outbox.fill(30)
        outbox.set_sinks("pg_current_snapshot()")
        recognition.follow(session, comparison, incomplete=False)
    assert outbox.value("select system_identifier from relay.groups") != "1"


@pytest.mark.parametrize(
    "rewrite", ["vacuum full relay.witnesses", "vacuum freeze relay.witnesses", "cluster"]
)
def test_a_table_of_witnesses_may_be_rewritten(outbox: Outbox, rewrite: str) -> None:
    with connect(outbox.settings().source_dsn) as conn:
        taken = [take(conn) for _ in range(3)]
    if rewrite == "cluster":
        outbox.conn.execute("cluster relay.witnesses using witnesses_pkey")
    else:
        outbox.conn.execute(rewrite.encode())
    assert all(each is not None and holds(outbox.conn, each.id) for each in taken)
    assert outbox.value("select relay.history() is not null")


def test_a_copied_witness_proves_nothing(outbox: Outbox) -> None:
    """Even where the copying transaction has by accident the id of one of them."""
    with connect(outbox.settings().source_dsn) as conn:
        taken = [take(conn) for _ in range(3)]
    ids = [each.id for each in taken if each is not None]
    outbox.conn.execute(
        """
        create temporary table copied as select * from relay.witnesses;
        delete from relay.witnesses;
        insert into relay.witnesses overriding system value select * from copied;
        """
    )
    outbox.conn.execute(
        "update relay.witnesses set c_xid = xmin::text::xid8 where id = %s", (ids[1],)
    )
    outbox.conn.execute(
        """
        create temporary table again as select * from relay.witnesses;
        delete from relay.witnesses;
        """
    )
    with outbox.conn.transaction():
        outbox.conn.execute(
            "insert into relay.witnesses overriding system value"
            " select id, number, snapshot, lsn, case when id = %s then pg_current_xact_id() else c_xid end, kept,"
            " taken_at from again",
            (ids[1],),
        )
    assert outbox.value(
        "select xmin::text = c_xid::text from relay.witnesses where id = %s", (ids[1],)
    )
    assert not any(holds(outbox.conn, each) for each in ids)
    assert outbox.value("select relay.history()") is None


def test_nobody_forges_a_witness(outbox: Outbox) -> None:
    """Who may insert one could insert a snapshot of the future."""
    outbox.conn.execute(
        f"create role {outbox.slot}_publishes login password 'p' in role relay_publisher;"
        f"create role {outbox.slot}_reads login password 'p' in role relay_reader;"
        f"create role {outbox.slot}_looks login password 'p';"
        f"grant select (payload) on outbox_message_t to {outbox.slot}_looks;"
        "select relay.let_keep_positions('outbox_message_t')".encode()
    )
    forged = (
        "insert into relay.witnesses (snapshot, lsn) values ('1:999999:', '0/0')",
        "update relay.witnesses set snapshot = '1:999999:'",
        "delete from relay.witnesses",
        "select relay.take_witness()",
        "select relay.begin_history()",
        "select relay.remove_witnesses()",
    )
    try:
        for name in ("publishes", "reads", "looks"):
            dsn = outbox.dsn_as(f"{outbox.slot}_{name}")
            with psycopg.connect(dsn, autocommit=True) as conn:
                for statement in forged:
                    with pytest.raises(psycopg.errors.InsufficientPrivilege):
                        conn.execute(statement.encode())
        with psycopg.connect(dsn, autocommit=True) as conn:
            taken = recent(conn)
            assert taken is not None
            assert holds(conn, taken.id)
            before = outbox.value("select count(*) from relay.witnesses")
            for _ in range(20):
                recent(conn)
            assert outbox.value("select count(*) from relay.witnesses") <= before + 2
            # In a savepoint it would have the id of a subtransaction.
            outbox.conn.execute("delete from relay.witnesses")
            with (
                pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState),
                conn.transaction(),
                conn.transaction(),
            ):
                conn.execute("select relay.recent_witness()")
    finally:
        for name in ("publishes", "reads", "looks"):
            outbox.conn.execute(
                f"drop owned by {outbox.slot}_{name}; drop role {outbox.slot}_{name}".encode()
            )


@pytest.mark.parametrize("mode", MODES)
def test_an_idle_source_is_not_written_to(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Others' transactions go on; where nothing is published, no witness is taken, and no position stored."""
    monkeypatch.setattr("relay.source.hybrid.AUDIT_SECONDS", 0.1)
    monkeypatch.setattr("relay.source.polling.NOTE_SECONDS", 0.1)
    settings = outbox.settings(source={**outbox.config()["source"], "mode": mode})
    stored = "select (select count(*) from relay.witnesses), (select max(number) from relay.noted_witnesses)"

    def complete() -> object:
        return outbox.value("select complete_before from relay.completeness where reader = ''")

    with relaying(settings):
        outbox.publish(host(1), event(1))
        outbox.wait_handled()
        wait_stored(outbox, outbox)
        wait_until(lambda: complete() is not None)
        before = outbox.conn.execute(stored).fetchone()
        for _ in range(10):
            outbox.conn.execute("select pg_current_xact_id()")
            at = complete()
            wait_until(lambda at=at: complete() != at)  # type: ignore[misc]
        assert outbox.conn.execute(stored).fetchone() == before
    assert groups.origin(outbox.conn, "default").witness is not None


def test_witnesses_go_when_retention_has_passed_them(outbox: Outbox) -> None:
    outbox.conn.execute(
        "select relay.retain('outbox_message_t', 'public.outbox_message_t', 'c_offset')"
    )
    with connect(outbox.settings().source_dsn) as conn:
        ids = []
        for number in range(5):
            taken = take(conn)
            assert taken is not None
            ids.append(taken.id)
            outbox.publish(host(1), event(number))
    xids = outbox.column("select c_xid::text from outbox_message_t order by c_offset")
    # Of the third event on, what the first three do not see is gone.
    outbox.conn.execute(
        "select relay.note_removed('public.outbox_message_t', %s::xid8)", (xids[2],)
    )
    outbox.conn.execute("select relay.remove_witnesses()")
    left = set(outbox.column("select id from relay.witnesses"))
    assert left.issuperset(ids[3:])
    assert left.isdisjoint(ids[:3])
    assert outbox.value("select relay.history() is not null")


def test_witnesses_stay_while_another_outbox_keeps_its_events(outbox: Outbox) -> None:
    """A position in it has lost nothing."""
    outbox.conn.execute(
        "create table kept (payload jsonb, c_xid xid8 default pg_current_xact_id());"
        "select relay.retain('outbox_message_t', 'public.outbox_message_t', 'c_offset')"
    )
    with connect(outbox.settings().source_dsn) as conn:
        taken = [take(conn) for _ in range(4)]
    outbox.publish(host(1), event(1))
    outbox.conn.execute(
        "select relay.note_removed('public.outbox_message_t', (select c_xid from outbox_message_t))"
    )
    assert outbox.value("select relay.remove_witnesses()") == 0
    assert all(each is not None and holds(outbox.conn, each.id) for each in taken)
    outbox.conn.execute("drop table kept")
    assert outbox.value("select relay.remove_witnesses()") > 0


def test_an_installation_from_before_gets_its_first_witness(outbox: Outbox) -> None:
    """It cannot be proven that its positions are of this server, and `relay init` says so."""
    said: list[str] = []
    settings = outbox.settings()
    outbox.fill(1)
    outbox.drain(settings)
    outbox.conn.execute("delete from relay.noted_witnesses")
    initialise(settings, warn=said.append)
    assert any("cannot prove" in each for each in said)
    assert groups.origin(outbox.conn, "default").witness is not None
    said.clear()
    assert not initialise(settings, warn=said.append)
    assert not said


def test_a_witness_is_noted_only_of_a_source_that_holds_the_one_before(
    outbox: Outbox, target: Outbox
) -> None:
    """A sink that polls before relay has compared both histories would make the other one look proven."""
    settings = outbox.settings(target={"dsn": target.relay_dsn})
    initialise(settings)
    seen = current_position(outbox.conn).snapshot
    cover(outbox.conn, target.conn, "default", seen)
    noted = groups.origin(target.conn, "default").witness
    outbox.conn.execute("delete from relay.witnesses")
    outbox.publish(host(1), event(1))
    seen = current_position(outbox.conn).snapshot
    with pytest.raises(TransientFault, match="does not hold the witness"):
        cover(outbox.conn, target.conn, "default", seen)
    assert groups.origin(target.conn, "default").witness == noted


def test_notes_of_groups_that_take_turns_are_deleted_too(outbox: Outbox) -> None:
    """Their numbers come from one sequence, of which each group has every second one."""
    with connect(outbox.settings().source_dsn) as conn:
        taken = take(conn)
    assert taken is not None
    for number in range(450):
        groups.note_witness(outbox.conn, ("one", "other")[number % 2], taken)
    for group in ("one", "other"):
        assert 100 <= len(groups.witnesses(outbox.conn, group)) <= 200


def test_two_instances_note_theirs_in_any_order(outbox: Outbox) -> None:
    with connect(outbox.settings().source_dsn) as conn:
        earlier, later = take(conn), take(conn)
    assert earlier is not None
    assert later is not None
    groups.note_witness(outbox.conn, "default", later)
    groups.note_witness(outbox.conn, "default", earlier)
    assert groups.origin(outbox.conn, "default").witness == later


def test_old_notes_of_witnesses_are_deleted(outbox: Outbox) -> None:
    with connect(outbox.settings().source_dsn) as conn:
        taken = take(conn)
    assert taken is not None
    for _ in range(250):
        groups.note_witness(outbox.conn, "default", taken)
    assert len(groups.witnesses(outbox.conn, "default")) <= 200


def test_another_server_gives_the_same_process_ids(
    outbox: Outbox, target: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session of a promoted standby may have the process id of the former one: in containers they are small."""
    settings = outbox.settings(target={"dsn": target.relay_dsn})
    initialise(settings)
    monkeypatch.setattr(psycopg.ConnectionInfo, "backend_pid", property(lambda _: 73))
    recognition = Recognition(settings)
    with connect(settings.source_dsn) as conn:
        recognition.follow_polled(conn, groups.origin(target.conn, "default"))
    outbox.conn.execute("truncate relay.witnesses")
    with (
        connect(settings.source_dsn) as conn,
        pytest.raises(RelayError, match="does not have the witness"),
    ):
        recognition.follow_polled(conn, groups.origin(target.conn, "default"))


@pytest.mark.parametrize("mode", MODES)
def test_a_server_that_lacks_nothing_but_the_newest_witness_is_read(
    outbox: Outbox, target: Outbox, mode: str
) -> None:
    """On the same timeline, too: relay went on, and stored no position any more."""
    source = {**outbox.config()["source"], "mode": mode}
    settings = outbox.settings(target={"dsn": target.relay_dsn}, source=source)
    initialise(settings)

    def relay_one(number: int) -> None:
        outbox.publish(host(1), event(number))
        with relaying(settings):
            wait_until(lambda: target.handled() >= number)
            wait_stored(outbox, target)

    relay_one(1)
    with connect(settings.source_dsn) as conn:
        taken = take(conn)
    assert taken is not None
    groups.note_witness(target.conn, "default", taken)
    outbox.conn.execute("delete from relay.witnesses where id = %s", (taken.id,))
    relay_one(2)
    noted = groups.origin(target.conn, "default").witness
    assert noted is not None
    assert holds(outbox.conn, noted.id)


def test_a_slot_that_is_joined_again_has_a_witness(outbox: Outbox, target: Outbox) -> None:
    """What relay polls up to the new slot is told from another history as what it polls later is."""
    settings = outbox.settings(target={"dsn": target.relay_dsn})
    initialise(settings)
    outbox.conn.execute("select pg_drop_replication_slot(%s)", (outbox.slot,))
    outbox.publish(host(1), event(1))
    initialise(settings)
    origin = groups.origin(target.conn, "default")
    assert origin.witness is not None
    assert origin.xmax <= origin.witness.snapshot.xmax


@pytest.mark.parametrize("mode", MODES)
def test_a_source_without_relay_is_refused(outbox: Outbox, target: Outbox, mode: str) -> None:
    """As a dump of the outbox alone is, and one where somebody has dropped the schema."""
    source = {**outbox.config()["source"], "mode": mode}
    settings = outbox.settings(target={"dsn": target.relay_dsn}, source=source)
    initialise(settings)
    outbox.publish(host(1), event(1))
    with relaying(settings):
        wait_until(lambda: target.handled() >= 1)
        wait_stored(outbox, target)
    outbox.conn.execute("drop schema relay cascade")
    assert "relay was installed in it again" in run_until_fault(settings)
    initialise(settings)
    assert "relay was installed in it again" in run_until_fault(settings)
    seek(settings, plan_seek(settings, "end", None), None)
    outbox.publish(host(1), event(2))
    with relaying(settings):
        wait_until(lambda: target.handled() >= 2)


@pytest.mark.parametrize("part", ["partition", "sink"])
def test_the_whole_group_is_moved_to_another_history_first(
    outbox: Outbox, target: Outbox, part: str
) -> None:
    """The witness of a part's new position would make the other positions look proven."""
    handlers = {
        **outbox.config()["handlers"],
        "deliver": {"type": "function", "callable": f"{__name__}:deliver"},
    }
    settings = outbox.settings(
        target={"dsn": target.relay_dsn}, handlers=handlers, routes=[{"handlers": list(handlers)}]
    )
    initialise(settings)
    outbox.publish(host(1), event(1))
    with relaying(settings):
        wait_until(lambda: target.handled() >= 1)
        wait_stored(outbox, target)
    outbox.conn.execute("truncate relay.witnesses")
    noted = groups.origin(target.conn, "default").witness

    def move() -> None:
        if part == "partition":
            seek(settings, plan_seek(settings, "1", 0), 0)
        else:
            seek_sink(settings, "deliver", to="1")

    with pytest.raises(ConfigurationError, match="the whole group"):
        move()
    assert groups.origin(target.conn, "default").witness == noted
    assert "does not have the witness" in run_until_fault(settings)
    seek(settings, plan_seek(settings, "end", None), None)
    move()
    with relaying(settings):
        wait_stored(outbox, target)


def test_a_role_that_may_take_no_witness_notes_the_newest_there_is(
    outbox: Outbox, target: Outbox
) -> None:
    """Otherwise its group kept the first one, went on until retention had removed this, and then stood still."""
    name = f"{outbox.slot}_polls"
    initialise(outbox.settings(target={"dsn": target.relay_dsn}))
    outbox.conn.execute(
        f"create role {name} login password 'p'; grant select on outbox_message_t to {name}".encode()
    )
    try:
        dsn = outbox.dsn_as(name)
        with psycopg.connect(dsn, autocommit=True) as conn:
            first = groups.origin(target.conn, "default").witness
            assert first is not None
            with pytest.raises(ConfigurationError, match="relay init"):
                holds(conn, first.id)
            outbox.conn.execute("select relay.let_keep_positions('outbox_message_t')")
            take(outbox.conn)
            cover(conn, target.conn, "default", current_position(outbox.conn).snapshot)
            second = groups.origin(target.conn, "default").witness
            assert second is not None
            assert second != first
            assert holds(conn, second.id)
            # What retention has removed is no reason to stand still.
            outbox.conn.execute("truncate relay.witnesses")
            outbox.publish(host(1), event(1))
            cover(conn, target.conn, "default", current_position(outbox.conn).snapshot)
            assert groups.origin(target.conn, "default").witness == second
    finally:
        outbox.conn.execute(f"drop owned by {name}; drop role {name}".encode())


def test_an_older_copy_of_a_server_is_not_the_one_with_the_positions() -> None:
    """It has the identifier and the database of the server that it was copied from, which still has the positions."""
    with embedded() as server, TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        server.create_database("app")
        with Outbox(server.dsn("app")) as app:
            app.install()
            source = {**app.config()["source"], "mode": "poll"}
            original = app.config(source=source)
            settings = Settings(**original)
            app.fill(3)
            with relaying(settings):
                app.wait_handled()
                wait_stored(app, app)
        server.stop()
        shutil.copytree(server.cluster.data, folder / "image", symlinks=True)
        server.start()
        with Outbox(server.dsn("app")) as app:
            app.fill(3)
            with relaying(settings):
                app.wait_handled()
                wait_stored(app, app)
        with started_copy(server, folder) as copy:
            with Outbox(copy.dsn("app")) as app:
                app.fill(60)
            elsewhere = {**source, "dsn": copy.dsn("app")}
            there = Settings(
                **{**original, "source": elsewhere, "target": {"dsn": server.dsn("app")}}
            )
            assert "decide" in run_until_fault(there)
        with Outbox(server.dsn("app")) as app:
            app.assert_exact()


@contextmanager
def started_copy(server: EmbeddedServer, folder: Path) -> Iterator[EmbeddedServer]:
    """A server with the data that `folder` has as `image`, at another port."""
    owner, own = server.cluster.data.stat(), ("postgresql.conf", "pg_hba.conf")
    with Cluster(folder / "copy", bin_dir=server.cluster._bin) as cluster:
        cluster.stop()
        for each in own:
            shutil.copy(cluster.data / each, folder / "image" / each)
        shutil.rmtree(cluster.data)
        (folder / "image").rename(cluster.data)
        for path in (cluster.data, *cluster.data.rglob("*")):
            shutil.chown(path, owner.st_uid, owner.st_gid)
        cluster.start()
        yield EmbeddedServer(cluster)
