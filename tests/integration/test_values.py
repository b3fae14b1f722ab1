"""Values arrive as the outbox has them: whatever sessions print, whatever its columns, partitions and encoding are."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from relay.admin.check import examine, require
from relay.admin.connections import reach
from relay.admin.dead_letters import DeadLetters
from relay.admin.findings import Severity
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.model.events import NEEDED_FIELDS, SQL_TYPES
from relay.model.snapshots import BEGINNING
from relay.source.decode.translation import CODECS
from relay.source.outbox.columns import PUBLISHES_GENERATED
from relay.source.outbox.differences import Difference
from relay.source.outbox.rows import OutboxRows
from relay.source.outbox.selection import Wanted
from relay.source.server import current_position
from relay.spark.session import Session
from relay.store.dead_letters.selection import DeadLetterSelection
from relay.store.positions.offsets import FIRST
from tests.outbox import Outbox, event, host, initialise, relaying, wait_until
from tests.postgres import Server
from tests.process import relay

SEEN = "insert into seen values (%(id)s, %(event_ts)s, %(payload)s)"


def odd_sessions(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let database, role, connection string and environment each ask for another form of times."""
    name = outbox.slot
    outbox.conn.execute(
        f"alter database \"{name}\" set datestyle = 'SQL, DMY';"
        f"alter database \"{name}\" set timezone = 'America/St_Johns';"
        f"alter role postgres in database \"{name}\" set datestyle = 'German'".encode()
    )
    monkeypatch.setenv("PGDATESTYLE", "SQL, DMY")
    monkeypatch.setenv("PGTZ", "Asia/Kathmandu")
    return make_conninfo(outbox.relay_dsn, options="-c datestyle=SQL,MDY -c timezone=Asia/Tokyo")


@pytest.mark.parametrize("mode", ["poll", "wal"])
def test_no_setting_of_a_session_changes_a_time(
    outbox: Outbox, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox.conn.execute("create table seen (id uuid, event_ts timestamptz, payload jsonb)")
    dsn = odd_sessions(outbox, monkeypatch)
    settings = outbox.settings(
        source={**outbox.config()["source"], "dsn": dsn, "mode": mode},
        handlers={"seen": {"type": "sql", "statement": SEEN}},
        routes=[{"handlers": ["seen"]}],
    )
    moment = "2025-11-12 01:02:03.5+00"
    outbox.publish(host(1), event(1, event_ts=moment, deliver_at=moment))
    with relaying(settings):
        wait_until(lambda: outbox.value("select count(*) from seen") == 1)
    assert outbox.value("select event_ts = %s::timestamptz from seen", (moment,)) is True
    assert outbox.value("select count(*) from relay.deferred") == 0


def test_no_setting_of_a_session_changes_a_dead_letter(
    outbox: Outbox, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dsn = odd_sessions(outbox, monkeypatch)
    overrides: dict[str, Any] = {"source": {**outbox.config()["source"], "dsn": dsn}}
    config = outbox.config_file(tmp_path / "relay.yaml", **overrides)
    moment = "2025-11-12 01:02:03.5+00"
    outbox.publish(host(1), event(-1, event_ts=moment))
    settings = outbox.settings(**overrides)
    outbox.drain(settings)
    shown = relay("dlq", "export", "--config", str(config))
    assert json.loads(shown.stdout)["event_ts"] == "2025-11-12T01:02:03.5+00:00"
    outbox.conn.execute("alter table projection drop constraint projection_amount_check")
    outbox.conn.execute("alter table projection add event_ts timestamptz")
    with reach(dsn, "target.dsn") as conn:
        dead_letters = DeadLetters(settings, conn)
        assert len(dead_letters.replay(dead_letters.find(DeadLetterSelection()), None)) == 1
    statement = "insert into projection (id, event_ts) values (%(id)s, %(event_ts)s)"
    handlers = {"projection": {"type": "sql", "statement": statement}}
    with relaying(outbox.settings(**overrides, handlers=handlers)):
        wait_until(lambda: outbox.value("select count(*) from projection") == 1)
    assert outbox.value("select event_ts = %s::timestamptz from projection", (moment,)) is True


# Types.

ADOPTED = """
    create table adopted (
        id uuid primary key default gen_random_uuid(), host_id uuid not null, user_id uuid, aggregate_id text,
        aggregate_version bigint, aggregate_type text, event_type text not null, event_ts timestamptz, payload jsonb,
        metadata jsonb, c_offset bigint, transaction_id uuid, transaction_ordinal int, transaction_count int,
        deliver_at timestamptz)
"""


def adopted(outbox: Outbox, *changes: str, **source: Any) -> Settings:
    """Settings for an outbox that was there before relay, with another type here and there."""
    outbox.conn.execute(ADOPTED)
    for change in changes:
        outbox.conn.execute(change.encode())
    outbox.give("adopted")
    name = f"{outbox.slot}_adopted"
    names = {"slot": name, "publication": name, "table": "public.adopted"}
    return outbox.settings(source={**outbox.config()["source"], **names, **source}, group="adopted")


def findings(settings: Settings, subject: str) -> list[tuple[Severity, str]]:
    return [
        (found.level, found.text)
        for found in examine(settings)
        if found.subject == subject and found.level is not Severity.OK
    ]


REFUSED = {
    "id": "bigint",
    "host_id": "integer",
    "user_id": "bigint",
    "transaction_id": "bigint",
    "aggregate_id": "bytea",
    "aggregate_version": "text",
    "aggregate_type": "jsonb",
    "event_type": "text[]",
    "event_ts": "date",
    "payload": "bytea",
    "metadata": "xml",
    "c_offset": "numeric",
    "transaction_ordinal": "text",
    "transaction_count": "double precision",
    "deliver_at": "text",
}


def test_types_that_cannot_be_read_are_refused_all_at_once(outbox: Outbox) -> None:
    changes = [
        f"alter table adopted drop column {name}, add column {name} {kind}"
        for name, kind in REFUSED.items()
    ]
    settings = adopted(outbox, *changes)
    found = findings(settings, "columns")
    assert {level for level, _ in found} == {Severity.ERROR}
    for (name, kind), (_, text) in zip(sorted(REFUSED.items()), sorted(found), strict=True):
        assert text.startswith(f"source.columns: {name}: the column '{name}' of public.adopted has")
        assert f"the type {kind}, relay reads {SQL_TYPES[name]}: " in text
        assert f"columns: {{{name}: …}}" in text
        assert (f"columns: {{{name}: null}}" in text) is (name not in NEEDED_FIELDS)
    with pytest.raises(ConfigurationError, match="the type bigint") as refused:
        initialise(settings)
    assert len(str(refused.value).splitlines()) == len(REFUSED)
    for _, text in found:
        if hint := re.search("run `(.*?)`", text):
            outbox.conn.execute(hint[1].encode())
    optional = {name: None for name in REFUSED if name not in NEEDED_FIELDS}
    left = findings(adopted_again(settings, columns=optional), "columns")
    assert [text.split(": ")[1] for _, text in left] == ["id", "host_id", "event_type", "payload"]


def adopted_again(settings: Settings, **source: Any) -> Settings:
    changed = settings.source.model_copy(update=source)
    return settings.model_copy(update={"source": changed})


CONDITIONAL = {
    "id": "text",
    "host_id": "character varying(36)",
    "event_type": "character(20)",
    "event_ts": "timestamp without time zone",
    "payload": "text",
    "c_offset": "integer",
    "deliver_at": "shop_time",
}


def test_types_with_a_condition_are_reported(outbox: Outbox) -> None:
    outbox.conn.execute("create domain shop_time as timestamp(3)")
    changes = [
        f"alter table adopted drop column {name}, add column {name} {kind}"
        for name, kind in CONDITIONAL.items()
    ]
    settings = adopted(outbox, *changes)
    found = findings(settings, "columns")
    assert [level for level, _ in found] == [Severity.WARNING] * len(CONDITIONAL)
    for _, text in found:
        hint = re.search("`(alter .*?)` ensures it", text)
        assert hint is not None
        outbox.conn.execute(hint[1].encode())
    assert findings(settings, "columns") == []


def test_types_as_good_as_relays_own_are_accepted(outbox: Outbox) -> None:
    outbox.conn.execute(
        "create type mood as enum ('x'); create domain positive as int check (value > 0)"
    )
    changes = [
        "alter table adopted alter payload type json, alter metadata type json, alter aggregate_type type mood "
        "using null, alter aggregate_id type bigint using null, alter event_type type varchar(30), "
        "alter aggregate_version type positive, alter transaction_ordinal type smallint, "
        "alter transaction_count type bigint"
    ]
    assert findings(adopted(outbox, *changes), "columns") == []


# Publications.


@pytest.mark.parametrize(
    ("table", "output"),
    [
        ("outbox_message_t", "alter publication {} add table"),
        ("adopted with (publish = 'delete')", "`alter publication {} set (publish = 'insert')`"),
        pytest.param(
            "adopted (id, host_id, event_type)",
            "leaves out the columns user_id, aggregate_id,",
            marks=pytest.mark.server(15),
        ),
    ],
)
def test_a_publication_that_leaves_something_out_is_refused(
    outbox: Outbox, table: str, output: str
) -> None:
    settings = adopted(outbox, mode="wal")
    name = settings.source.publication
    initialise(adopted_again(settings, mode="auto"))
    assert findings(settings, "publication") == []
    outbox.conn.execute(
        f"drop publication {name}; create publication {name} for table {table}".encode()
    )
    ((level, text),) = findings(settings, "publication")
    assert level is Severity.ERROR
    assert output.format(name) in text
    with pytest.raises(ConfigurationError, match=r"source\.publication"):
        initialise(settings)
    with pytest.raises(ConfigurationError, match=r"source\.publication"):
        require(settings)
    for hint in re.findall("`(alter .*?)`", text):
        outbox.conn.execute(hint.encode())
    assert findings(settings, "publication") == []


GENERATED = (
    "alter table adopted drop column aggregate_type, "
    "add column aggregate_type text generated always as (payload ->> 'kind') stored"
)


def published_events(settings: Settings, outbox: Outbox) -> list[Any]:
    """What the stream brings of a row with a generated aggregate_type."""
    outbox.conn.execute(
        "insert into adopted (host_id, event_type, payload) values (%s, 'e', '{\"kind\": \"Order\"}')",
        (host(1),),
    )
    handlers = {
        "seen": {"type": "sql", "statement": "insert into kinds values (%(aggregate_type)s)"}
    }
    outbox.conn.execute("create table if not exists kinds (kind text)")
    before = outbox.value("select count(*) from kinds")
    running = Settings(
        **{**settings.model_dump(), "handlers": handlers, "routes": [{"handlers": ["seen"]}]}
    )
    with relaying(running):
        wait_until(lambda: outbox.value("select count(*) from kinds") > before)
    return outbox.column("select kind from kinds")


@pytest.mark.server(18)
def test_generated_columns_are_published(outbox: Outbox) -> None:
    settings = adopted(outbox, GENERATED, mode="wal", slot=f"{outbox.slot}_adopted")
    name = settings.source.publication
    initialise(adopted_again(settings, mode="auto"))
    assert findings(settings, "publication") == []
    assert published_events(settings, outbox) == ["Order"]
    outbox.conn.execute(f"alter publication {name} set (publish_generated_columns = none)".encode())
    ((_, text),) = findings(settings, "publication")
    assert f"`alter publication {name} set (publish_generated_columns = stored)`" in text
    with pytest.raises(ConfigurationError, match="leaves out the generated columns aggregate_type"):
        initialise(settings)
    # A running relay stops, so that it delivers no nulls; in mode auto it polls until the publication is altered.
    with pytest.raises(ConfigurationError, match="leaves out the generated"), relaying(settings):
        wait_until(lambda: "relay" not in {thread.name for thread in threading.enumerate()})
    auto = adopted_again(settings, mode="auto")
    assert published_events(auto, outbox) == ["Order", "Order"]


def test_a_column_that_no_publication_can_hold_is_refused(outbox: Outbox) -> None:
    kind = "virtual" if outbox.conn.info.server_version >= PUBLISHES_GENERATED else "stored"
    settings = adopted(outbox, GENERATED.replace("stored", kind))
    ((level, text),) = findings(settings, "columns")
    assert level is Severity.ERROR
    assert f"'aggregate_type' of public.adopted is a {kind} generated column" in text
    with pytest.raises(ConfigurationError, match=f"{kind} generated column"):
        initialise(settings)
    assert findings(adopted_again(settings, mode="poll"), "columns") == []
    assert findings(adopted_again(settings, columns={"aggregate_type": None}), "columns") == []


def test_a_publication_of_the_partitions_is_refused(outbox: Outbox) -> None:
    settings = adopted(
        outbox,
        "drop table adopted",
        ADOPTED.replace("primary key", "").replace(
            "deliver_at timestamptz)", "deliver_at timestamptz) partition by hash (id)"
        ),
        "create table leaf partition of adopted for values with (modulus 1, remainder 0)",
        mode="wal",
        slot=f"{outbox.slot}_adopted",
    )
    name = settings.source.publication
    for publication in ("for table adopted", "for table leaf", "for all tables"):
        outbox.conn.execute(f"create publication {name} {publication}".encode())
        with pytest.raises(ConfigurationError, match="publish"):
            initialise(settings)
        while found := findings(settings, "publication"):
            ((level, text),) = found
            assert level is Severity.ERROR
            hint = re.search("`(alter .*?)`", text)
            assert hint is not None
            outbox.conn.execute(hint[1].encode())
        outbox.conn.execute(f"drop publication {name}".encode())
    initialise(settings)
    assert findings(settings, "publication") == []


@pytest.mark.parametrize("mode", ["poll", "wal"])
def test_times_without_a_zone_are_utc(outbox: Outbox, mode: str) -> None:
    """For the server's sessions, for the stream and for polling alike."""
    outbox.conn.execute("create domain shop_time as timestamp")
    settings = adopted(
        outbox,
        "alter table adopted alter event_ts type timestamp, alter deliver_at type shop_time",
        mode=mode,
        slot=f"{outbox.slot}_adopted",
    )
    outbox.conn.execute("create table seen (id uuid, event_ts timestamptz, payload jsonb)")
    outbox.conn.execute(
        f"alter database \"{outbox.slot}\" set timezone = 'America/St_Johns'".encode()
    )
    handlers = {"seen": {"type": "sql", "statement": SEEN}}
    running = Settings(
        **{**settings.model_dump(), "handlers": handlers, "routes": [{"handlers": ["seen"]}]}
    )
    initialise(running)
    outbox.conn.execute(
        """
        insert into adopted (host_id, user_id, event_type, payload, event_ts, deliver_at)
        select %s, gen_random_uuid(), 'e', to_jsonb(n), '2025-11-12 01:02:03.5',
               (now() at time zone 'UTC') + case n when 1 then interval '-1 s' else '1 h' end
          from generate_series(1, 2) n
        """,
        (host(1),),
    )
    with relaying(running):
        wait_until(lambda: outbox.value("select count(*) from seen") == 1)
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 1)
    assert outbox.value("select event_ts from seen") == datetime(
        2025, 11, 12, 1, 2, 3, 500_000, tzinfo=UTC
    )
    assert outbox.value(
        "select retry_at between now() + interval '59 min' and now() + interval '1 h' from relay.deferred"
    )


# Encodings.


@pytest.fixture
def encoded(server: Server, request: pytest.FixtureRequest) -> Iterator[Outbox]:
    """An installed outbox in a database of the encoding that the test is parametrized with."""
    name = f"values_{request.param.lower()}_{os.getpid()}"
    with Outbox(server.create_encoded_database(name, request.param)) as made:
        made.conn.execute("set client_encoding to utf8")
        made.install()
        yield made
    server.drop_database(name)


def test_codecs_convert_as_postgresql_does(outbox: Outbox) -> None:
    outbox.conn.execute(
        """
        create function converted(stored bytea, encoding name) returns text language plpgsql as $$
        begin return convert_from(stored, encoding);
        exception when untranslatable_character or character_not_in_repertoire then return null; end $$
        """
    )
    pairs = [bytes([first, second]) for first in range(0xA1, 0xFF) for second in range(0xA1, 0xFF)]
    for name, codec in CODECS.items():
        if name == "SQL_ASCII":
            continue
        stored = [bytes([number]) for number in range(1, 256)]
        if name == "EUC_CN":
            stored += pairs
        found = outbox.column(
            "select converted(stored, %s) from unnest(%s::bytea[]) with ordinality as t (stored, n) order by n",
            (name, stored),
        )
        assert found == [_decoded(value, codec) for value in stored], name


def _decoded(value: bytes, codec: str) -> str | None:
    try:
        return value.decode(codec)
    except UnicodeDecodeError:
        return None


@pytest.mark.parametrize("mode", ["wal", "poll"])
@pytest.mark.parametrize("encoded", ["WIN1252", "SQL_ASCII"], indirect=True)
def test_only_the_event_with_an_undecodable_byte_is_dead(encoded: Outbox, mode: str) -> None:
    undecodable(encoded, encoded.settings(source={**encoded.config()["source"], "mode": mode}))


@pytest.mark.parametrize("encoded", ["WIN1252"], indirect=True)
def test_no_route_stops_relay_for_what_an_undecodable_byte_has_damaged(encoded: Outbox) -> None:
    """The damaged payload matches no route; that says nothing, also where `unrouted` is `fail`."""
    routes = [{"match": {"payload.note": "é"}, "handlers": ["projection"]}]
    undecodable(encoded, encoded.settings(routes=routes, unrouted="fail"))


@pytest.mark.parametrize("encoded", ["WIN1252"], indirect=True)
def test_only_the_event_with_an_undecodable_byte_is_dead_on_spark(
    encoded: Outbox, spark_session: Session
) -> None:
    undecodable(encoded, encoded.settings("spark"), spark_session)


def undecodable(outbox: Outbox, settings: Settings, session: Session | None = None) -> None:
    """Publish good events around bad ones, also in one commit, and look at what becomes of them."""
    name = outbox.value("select getdatabaseencoding()")
    good, form = (b"\xe9", "WIN1252") if name == "WIN1252" else ("é".encode(), "UTF-8")
    insert = (
        b"insert into outbox_message_t (host_id, transaction_id, aggregate_id, event_type, payload, event_ts) values"
        b" ('00000000-0000-4000-8000-00000000000%d', '00000000-0000-4000-9000-00000000000%d', '%s', 'e',"
        b' \'{"amount": %d, "note": "%s"}\', \'2025-01-02 03:04:05+00\')'
    )
    with psycopg.connect(
        make_conninfo(outbox.publisher_dsn, client_encoding=name), autocommit=True
    ) as writer:
        writer.execute(insert % (1, 1, good, 1, good))
        with writer.transaction():
            writer.execute(insert % (1, 2, b"a\x81", 2, good))
            writer.execute(insert % (1, 2, good, 3, b"\x8d" + good))
            writer.execute(insert % (1, 3, good, 4, good))
        writer.execute(insert % (1, 4, good, 5, good))
    statement = (
        "insert into projection (id, host_id, c_offset, transaction_id, amount) values (%(id)s, %(host_id)s, "
        "%(c_offset)s, %(transaction_id)s, case when %(aggregate_id)s = 'é' and %(payload)s->>'note' = 'é' "
        "then (%(payload)s->>'amount')::int end)"
    )
    handlers = {"projection": {"type": "sql", "statement": statement}}
    configured = Settings(**outbox.config(handlers=handlers))
    settings = settings.model_copy(update={"handlers": configured.handlers})
    with relaying(settings, session):
        outbox.wait_handled()
    assert outbox.column("select amount from projection order by seq") == [1, 4, 5]
    outbox.assert_exact()
    dead = outbox.conn.execute(
        "select aggregate_id, payload, exception, host_id::uuid, event_ts, handler"
        " from relay.dead_letter_queue order by id"
    ).fetchall()
    assert [row[:2] for row in dead] == [
        (r"a\x81", {"amount": 2, "note": "é"}),
        ("é", {"amount": 3, "note": r"\x8dé"}),
    ]
    assert {row[2] for row in dead} == {
        f"Undecodable: event 1: aggregate_id is not {form}: 0x81 at byte 1; "
        f"event 2: payload is not {form}: 0x8d at byte 10"
    }
    moment = datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert {row[3:] for row in dead} == {(host(1), moment, None)}


def test_a_field_that_is_left_out_is_missed_by_nobody(outbox: Outbox) -> None:
    settings = adopted(outbox, columns={"event_ts": None, "user_id": None})
    initialise(settings)
    outbox.conn.execute(
        "insert into adopted (host_id, user_id, event_type, payload, event_ts) values (%s, %s, 'e', '{}', now())",
        (host(1), host(2)),
    )
    rows = OutboxRows(settings)
    assert rows.first_since(outbox.conn, datetime(2020, 1, 1, tzinfo=UTC)) is None
    between = Difference(BEGINNING, current_position(outbox.conn).snapshot)
    (portion,) = rows.plan(outbox.conn, between, FIRST)
    (share,) = portion.shares
    wanted = Wanted(share.xids, share.positions)
    (transactions,) = rows.commits(outbox.conn, wanted)
    assert transactions.columns[:2] == ("id", "host_id")
    assert not {"user_id", "event_ts"} & set(transactions.columns)


# Partitions of the outbox.

PARTITIONED = (
    "drop table adopted",
    ADOPTED.replace("primary key", "").replace(
        "deliver_at timestamptz)",
        "deliver_at timestamptz, state text default 'new') partition by list (state)",
    ),
    "create table fresh partition of adopted for values in ('new')",
    "create table done partition of adopted for values in ('done')",
    "create table kept partition of adopted for values in ('kept')",
)
PUBLISH = """
    insert into adopted (host_id, user_id, event_type, payload, transaction_id)
    select %s, gen_random_uuid(), 'e', jsonb_build_object('amount', n), case n %% 2 when 0 then gen_random_uuid() end
      from generate_series(%s::int, %s::int) n
"""


@pytest.mark.parametrize(
    ("mode", "through_root"),
    [
        ("wal", True),
        pytest.param("auto", True, marks=pytest.mark.rare),
        ("auto", False),
        ("poll", True),
    ],
)
def test_rows_that_are_moved_between_partitions_do_not_arrive_twice(
    outbox: Outbox, mode: str, through_root: bool
) -> None:
    """A move is an insert to the WAL, whether the publication names the partitions or the root."""
    settings = adopted(outbox, *PARTITIONED, mode=mode, slot=f"{outbox.slot}_adopted")
    # With mode wal, the table gets no column that tells.
    initialise(adopted_again(settings, mode="auto") if mode == "wal" else settings)
    if not through_root:
        outbox.conn.execute(
            f"alter publication {outbox.slot}_adopted set (publish_via_partition_root = false)".encode()
        )

    def handled(events: int) -> None:
        wait_until(lambda: outbox.value("select count(distinct id) from projection") == events)

    with relaying(settings):
        outbox.conn.execute(PUBLISH, (host(1), 1, 20))
        handled(20)
        outbox.conn.execute("update adopted set state = 'done' where c_offset <= 10")
        outbox.conn.execute(PUBLISH, (host(2), 21, 25))
        handled(25)
    # A batch with the insert and the move, and a move of what an earlier process has applied.
    outbox.conn.execute(PUBLISH, (host(1), 26, 30))
    outbox.conn.execute("update adopted set state = 'kept'")
    with outbox.conn.transaction():
        outbox.conn.execute(PUBLISH, (host(3), 31, 35))
        outbox.conn.execute("update adopted set state = 'done' where c_offset <= 30")
    with relaying(settings):
        handled(35)
        outbox.conn.execute("update adopted set state = 'new' where c_offset % 2 = 0")
        outbox.conn.execute(PUBLISH, (host(2), 36, 40))
        handled(40)
    assert outbox.value("select count(*) from projection") == 40
    assert outbox.column("select amount from projection order by c_offset") == list(range(1, 41))
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0


def test_rows_that_are_moved_in_the_commit_of_new_ones_do_not_arrive_twice(outbox: Outbox) -> None:
    """Rows of one business transaction, of none, and one that is new itself; at a running relay and after its start."""
    settings = adopted(outbox, *PARTITIONED, mode="auto", slot=f"{outbox.slot}_adopted")
    initialise(settings)
    insert = (
        "insert into adopted (host_id, event_type, payload, transaction_id)"
        " values (%s, 'e', jsonb_build_object('amount', %s::int), %s)"
    )

    def commit(first: int) -> None:
        with outbox.conn.transaction():
            for amount, transaction_id in enumerate((None, host(7), host(8)), first):
                outbox.conn.execute(insert, (host(1), amount, transaction_id))
            outbox.conn.execute("update adopted set state = 'done' where state = 'new'")
            outbox.conn.execute("update adopted set state = 'kept' where state = 'done'")
            outbox.conn.execute("update adopted set state = 'done' where c_offset % 2 = 0")

    def handled(events: int) -> None:
        wait_until(lambda: outbox.value("select count(distinct id) from projection") == events)

    with relaying(settings):
        commit(1)
        handled(3)
        commit(4)
        handled(6)
    commit(7)
    commit(10)
    with relaying(settings):
        handled(12)
    assert outbox.column("select amount from projection order by seq") == list(range(1, 13))


def test_offsets_that_publishers_give_do_not_tell_moves(outbox: Outbox) -> None:
    """A lesser offset than that of the row before may well be new, even in the same commit."""
    settings = adopted(outbox, *PARTITIONED, mode="auto", slot=f"{outbox.slot}_adopted")
    initialise(settings)
    with outbox.conn.transaction():
        for offset in (5, 3, 4, 1):
            outbox.conn.execute(
                "insert into adopted (c_offset, host_id, event_type, payload)"
                " values (%s, %s, 'e', jsonb_build_object('amount', %s::int))",
                (offset, host(1), offset),
            )
        outbox.conn.execute("update adopted set state = 'done'")
    with relaying(settings):
        wait_until(lambda: outbox.value("select count(*) from projection") >= 4)
    assert outbox.column("select amount from projection order by seq") == [5, 3, 4, 1]


@pytest.mark.parametrize("copies", [1, 100])
def test_restored_rows_are_no_new_events(outbox: Outbox, copies: int) -> None:
    """A row keeps the transaction that inserted it when it is deleted and put back."""
    settings = adopted(outbox, mode="auto", slot=f"{outbox.slot}_adopted")
    initialise(settings)
    outbox.conn.execute(PUBLISH, (host(1), 1, copies))
    with relaying(settings):
        wait_until(lambda: outbox.value("select count(*) from projection") == copies)
        with outbox.conn.transaction():
            outbox.conn.execute("create temporary table kept on commit drop as table adopted")
            outbox.conn.execute("delete from adopted")
            outbox.conn.execute("insert into adopted table kept")
            outbox.conn.execute(PUBLISH, (host(1), copies + 1, copies + 1))
        wait_until(lambda: outbox.value("select count(*) from projection") > copies)
    assert outbox.column("select amount from projection order by seq") == list(range(1, copies + 2))


def test_savepoints_and_updates_do_not_split_a_polled_commit(outbox: Outbox) -> None:
    settings = adopted(outbox, mode="poll", slot=f"{outbox.slot}_adopted")
    initialise(settings, start="beginning")
    business = (
        "insert into adopted (host_id, event_type, payload, user_id) values (%s, 'e', %s, %s)"
    )
    with outbox.conn.transaction():
        for amount in (1, 2, -3):
            with outbox.conn.transaction():
                payload = json.dumps({"amount": amount})
                outbox.conn.execute(business, (host(1), payload, host(2)))
    outbox.conn.execute("update adopted set user_id = host_id where c_offset = 2")
    outbox.conn.execute("update adopted set user_id = %s", (host(2),))
    outbox.conn.execute("alter table projection add check (amount > 0)")
    with relaying(settings):
        wait_until(lambda: outbox.value("select count(*) from relay.dead_letter_queue") == 3)
    assert outbox.value("select count(*) from projection") == 0


@pytest.mark.parametrize("mode", ["wal", "poll"])
@pytest.mark.parametrize("encoded", ["SQL_ASCII"], indirect=True)
def test_undecodable_ids_stop_nothing(encoded: Outbox, mode: str) -> None:
    changes = [
        f"alter table adopted alter {name} drop default, alter {name} type text"
        for name in ("id", "host_id", "user_id", "transaction_id")
    ]
    settings = adopted(encoded, *changes, mode=mode, slot=f"{encoded.slot}_adopted")
    initialise(settings)
    rows = [
        (b"%032d", b"%032d", b"%032d"),
        (b"%031d\xff", b"%032d", b"%032d"),
        (b"%032d", b"%031d\xff", b"%032d"),
        (b"%032d", b"%032d", b"%032d"),
        (b"%032d", b"%032d", b"%031d\xff"),
    ]
    with psycopg.connect(
        make_conninfo(encoded.superuser_dsn, client_encoding="SQL_ASCII"), autocommit=True
    ) as writer:
        for number, ids in enumerate(rows):
            first, second, third = (each % number for each in ids)
            writer.execute(
                b"insert into adopted (id, host_id, transaction_id, event_type, payload) values"
                b" ('%s', '%s', '%s', 'e', '{\"amount\": %d}')" % (first, second, third, number)
            )
    with relaying(settings):
        wait_until(lambda: encoded.handled() >= 5)
    assert encoded.column("select amount from projection order by amount") == [0, 3]
    assert encoded.value("select count(*) from relay.dead_letter_queue") == 3
