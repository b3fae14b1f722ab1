"""Outboxes that were not made for relay: ids of any type, dead letters and replays that keep them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from secrets import token_hex
from typing import Any
from uuid import UUID

import pytest

from relay.admin.check import require
from relay.admin.dead_letters import DeadLetters
from relay.config.settings import Settings
from relay.config.source import SourceSettings
from relay.faults import ConfigurationError
from relay.retention.erasure import erase
from relay.spark.session import Session
from relay.store.connections import connect
from relay.store.dead_letters.selection import DeadLetterSelection
from tests.outbox import Outbox, event, initialise, relaying, wait_until
from tests.process import relay
from tests.webhook import Answer, Webhook

IDS = {
    "bigint": {"number": "bigint", "tenant": "bigint", "actor": "bigint", "unit": "bigint"},
    "text": {"number": "text", "tenant": "varchar(3000)", "actor": "text", "unit": "text"},
    "mixed": {"number": "bigint", "tenant": "text", "actor": "integer", "unit": "uuid"},
}
"""The types of the columns that hold ids."""

ID_COLUMNS = {"id": "number", "host_id": "tenant", "user_id": "actor", "transaction_id": "unit"}

COLUMNS = {
    **ID_COLUMNS,
    "event_type": "kind",
    "payload": "body",
    **dict.fromkeys(
        ["aggregate_id", "aggregate_version", "aggregate_type", "event_ts", "metadata"]
    ),
    **dict.fromkeys(["transaction_ordinal", "transaction_count", "deliver_at"]),
}

VALUES: Mapping[str, Any] = {
    "bigint": lambda number: str(9_007_199_254_740_993 + number),
    "integer": str,
    "text": lambda number: f"Nº {number} 'a\\b'",
    "varchar(3000)": lambda number: f"tenant {number} " + "x" * 2_900,
    "uuid": lambda number: f"00000000-0000-4000-8000-{number:012d}",
}


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as found:
        yield found


def declared(kind: str) -> str:
    """The type of `source.types` that a column has."""
    return {"varchar(3000)": "text", "integer": "bigint"}.get(kind, kind)


def shop(outbox: Outbox, ids: str, webhook: Webhook, mode: str, engine: str = "inline") -> Settings:
    """A table with ids of some types, and settings that relay it into `seen`, `batched` and to a webhook."""
    kinds = IDS[ids]
    columns = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
    outbox.conn.execute(
        f"create table shop ({columns}, kind text, body jsonb, primary key (number));"
        f"create table seen (seq bigserial, {columns}, amount int check (amount >= 0));"
        f"create table batched (seq bigserial, {columns}, kinds text[])".encode()
    )
    outbox.give("shop")
    fields = "%(id)s, %(host_id)s, %(user_id)s, %(transaction_id)s"
    types = (
        "array[pg_typeof(id), pg_typeof(host_id), pg_typeof(user_id), pg_typeof(transaction_id)]"
    )
    name = f"{outbox.slot}_shop"
    return outbox.settings(
        engine,
        source={
            **outbox.config()["source"],
            **{"slot": name, "publication": name, "table": "public.shop", "mode": mode},
            "columns": COLUMNS,
            "types": {field: declared(kinds[column]) for field, column in ID_COLUMNS.items()},
        },
        group="shop",
        handlers={
            "seen": {
                "type": "sql",
                "statement": f"insert into seen (number, tenant, actor, unit, amount) "
                f"values ({fields}, (%(payload)s->>'amount')::int)",
            },
            "batched": {
                "type": "sql",
                "each": "batch",
                "statement": "insert into batched (number, tenant, actor, unit, kinds) "
                f"select id, host_id, user_id, transaction_id, {types}::text[] from batch",
            },
            "hook": {"type": "http", "url": webhook.url},
        },
        routes=[{"handlers": ["seen", "batched", "hook"]}],
    )


def insert(outbox: Outbox, ids: str, first: int, amounts: Mapping[int, int]) -> None:
    """One commit for each amount; tenants in turn, two events each."""
    for number, amount in amounts.items():
        with outbox.conn.transaction():
            for index in range(2):
                texts = [
                    VALUES[kind](value)
                    for kind, value in zip(
                        IDS[ids].values(),
                        (first + 2 * number + index, number % 3, 7, first + number),
                        strict=True,
                    )
                ]
                outbox.conn.execute(
                    "insert into shop (number, tenant, actor, unit, kind, body) values (%s, %s, %s, %s, 'e', "
                    "jsonb_build_object('amount', %s::int))",
                    (*texts, amount),
                )


ROWS = "select number::text, tenant::text, actor::text, unit::text from {} order by number::text"


def rows(outbox: Outbox, table: str) -> list[Any]:
    return outbox.conn.execute(ROWS.format(table).encode()).fetchall()


@pytest.mark.parametrize("mode", ["wal", "poll"])
@pytest.mark.parametrize("ids", IDS)
def test_ids_of_any_type_go_end_to_end(
    outbox: Outbox, webhook: Webhook, ids: str, mode: str
) -> None:
    settings = shop(outbox, ids, webhook, mode)
    initialise(settings)
    require(settings)
    with relaying(settings):
        insert(outbox, ids, 100, dict.fromkeys(range(40), 1))
        wait_until(lambda: outbox.value("select count(*) from batched") == 80)
        wait_until(lambda: len(webhook.accepted) == 80)
    assert rows(outbox, "seen") == rows(outbox, "batched") == rows(outbox, "shop")
    kinds = [declared(kind) for kind in IDS[ids].values()]
    assert outbox.column("select distinct kinds from batched") == [kinds]
    sent = [request.event for request in webhook.accepted]
    assert sorted(each["id"] for each in sent) == sorted(row[0] for row in rows(outbox, "shop"))
    assert {(each["hostid"], each["userid"]) for each in sent} == {
        (row[1], row[2]) for row in rows(outbox, "shop")
    }


@pytest.mark.parametrize("ids", IDS)
def test_dead_letters_and_replays_keep_ids_of_any_type(
    outbox: Outbox, webhook: Webhook, ids: str, engine: str, session: Session | None
) -> None:
    webhook.answers = lambda _, body: Answer(400 if b'"amount": 2' in body else 204)
    settings = shop(outbox, ids, webhook, "auto", engine)
    initialise(settings)
    with relaying(settings, session):
        insert(outbox, ids, 100, {0: 1, 1: -1, 2: 2, 3: 1, 4: 1})
        wait_until(lambda: outbox.value("select count(*) from relay.dead_letter_queue") == 4)
        dead = outbox.conn.execute(
            "select event_id, host_id, user_id, transaction_id from relay.dead_letter_queue order by event_id"
        ).fetchall()
        assert dead == [
            row
            for row in rows(outbox, "shop")
            if row[3] in {VALUES[IDS[ids]["unit"]](each) for each in (101, 102)}
        ]
        outbox.conn.execute("alter table seen drop constraint seen_amount_check")
        webhook.answers = lambda _, body: Answer()
        dead_letters = DeadLetters(settings, outbox.conn)
        host = dead[0][1]
        assert dead_letters.find(DeadLetterSelection(host=host)).transactions == 1
        assert len(dead_letters.replay(dead_letters.find(DeadLetterSelection()), None)) == 2
        wait_until(lambda: outbox.value("select count(*) from relay.deferred") == 0)
    assert rows(outbox, "seen") == rows(outbox, "batched") == rows(outbox, "shop")
    assert webhook.ids() == {row[0]: 1 for row in rows(outbox, "shop")}


# Tables of other projects, each as the project defines it, and a row as it inserts it.

PROJECTS = {
    "debezium": (
        """
        create table outbox (
            id uuid not null primary key, aggregatetype varchar(255) not null, aggregateid varchar(255) not null,
            type varchar(255) not null, payload jsonb)
        """,
        """
        insert into outbox (id, aggregatetype, aggregateid, type, payload)
        values (gen_random_uuid(), 'Order', 'o' || %(key)s, 'OrderCreated', jsonb_build_object('n', %(n)s::int))
        """,
        "select id::text, aggregateid, aggregatetype, aggregateid, type, payload from outbox",
    ),
    "pg-transactional-outbox": (
        """
        create table outbox (
            id uuid primary key, aggregate_type text not null, aggregate_id text not null, message_type text not null,
            segment text, concurrency text not null default 'sequential', payload jsonb not null, metadata jsonb,
            locked_until timestamptz not null default to_timestamp(0),
            created_at timestamptz not null default clock_timestamp(), processed_at timestamptz,
            abandoned_at timestamptz, started_attempts smallint not null default 0,
            finished_attempts smallint not null default 0,
            constraint outbox_concurrency_check check (concurrency in ('sequential', 'parallel')))
        """,
        """
        insert into outbox (id, aggregate_type, aggregate_id, message_type, segment, payload, metadata, created_at)
        values (gen_random_uuid(), 'movie', 'm' || %(key)s, 'movie_created', %(key)s,
                jsonb_build_object('n', %(n)s::int), '{"trace": 1}', clock_timestamp())
        """,
        "select id::text, aggregate_id, aggregate_type, aggregate_id, message_type, payload from outbox",
    ),
    "blumchen": (
        """
        create table outbox (
            id bigint primary key generated by default as identity, message_type varchar(250) not null,
            data jsonb not null)
        """,
        """
        insert into outbox (message_type, data)
        values ('urn:message:user-created:' || %(key)s, jsonb_build_object('n', %(n)s::int))
        """,
        "select id::text, message_type, null, null, message_type, data from outbox",
    ),
}


@pytest.mark.parametrize("mode", ["wal", "auto", "poll"])
@pytest.mark.parametrize("profile", PROJECTS)
def test_the_table_of_another_project_is_relayed(outbox: Outbox, profile: str, mode: str) -> None:
    create, publish, published = PROJECTS[profile]
    outbox.conn.execute(create.encode())
    outbox.give("outbox")
    outbox.conn.execute(
        "create table relayed (seq bigserial, id text, host text, aggregate_type text, aggregate_id text, kind text,"
        " payload jsonb)"
    )
    name = f"{outbox.slot}_other"
    settings = outbox.settings(
        source={
            **{"dsn": outbox.relay_dsn, "slot": name, "publication": name},
            **{"profile": profile, "mode": mode},
        },
        group="other",
        handlers={
            "relayed": {
                "type": "sql",
                "each": "batch",
                "statement": "insert into relayed (id, host, aggregate_type, aggregate_id, kind, payload) "
                "select id::text, host_id, aggregate_type, aggregate_id, event_type, payload from batch",
            }
        },
        routes=[{"handlers": ["relayed"]}],
    )
    initialise(settings)
    require(settings)
    with relaying(settings):
        for number in range(60):
            outbox.conn.execute(publish.encode(), {"key": str(number % 4), "n": number})
        wait_until(lambda: outbox.value("select count(*) from relayed") == 60)
    found = "select id, host, aggregate_type, aggregate_id, kind, payload from relayed"
    assert not outbox.column(
        f"(({found}) except all ({published})) union all (({published}) except all ({found}))"
    )
    overtaken = """
        select count(*)
          from (select (payload->>'n')::int < lag((payload->>'n')::int) over (partition by host order by seq) as late
                  from relayed) as followed
         where late
    """
    assert outbox.value(overtaken) == 0


def test_a_row_that_is_deleted_at_once_is_relayed_from_the_wal(outbox: Outbox) -> None:
    create, publish, _ = PROJECTS["debezium"]
    outbox.conn.execute(create.encode())
    outbox.give("outbox")
    outbox.conn.execute("create table relayed (id uuid)")
    name = f"{outbox.slot}_other"
    settings = outbox.settings(
        source={
            **{"dsn": outbox.relay_dsn, "slot": name, "publication": name},
            **{"profile": "debezium", "mode": "wal"},
        },
        group="other",
        handlers={"relayed": {"type": "sql", "statement": "insert into relayed values (%(id)s)"}},
        routes=[{"handlers": ["relayed"]}],
    )
    initialise(settings)
    with relaying(settings):
        for number in range(10):
            with outbox.conn.transaction():
                outbox.conn.execute(publish.encode(), {"key": "1", "n": number})
                outbox.conn.execute("delete from outbox")
        wait_until(lambda: outbox.value("select count(*) from relayed") == 10)


@pytest.mark.parametrize(
    ("kind", "given", "printed"),
    [
        ("uuid", "{ABCDEF01-0000-4000-8000-000000000001}", "abcdef01-0000-4000-8000-000000000001"),
        ("uuid", "7", None),
        ("bigint", "-09223372036854775808", "-9223372036854775808"),
        ("bigint", "9223372036854775808", None),
        ("bigint", "a", None),
        ("text", "A b", "A b"),
    ],
)
def test_a_command_takes_an_id_as_it_is_printed(kind: str, given: str, printed: str | None) -> None:
    source = SourceSettings.model_validate({"types": {"host_id": kind}})
    if printed is not None:
        assert source.printed_id("host_id", given, "--host") == printed
        return
    with pytest.raises(ConfigurationError, match=f"^--host: '{given}' is not of type {kind}$"):
        source.printed_id("host_id", given, "--host")


def test_dead_letters_are_found_by_a_host_however_it_is_written(
    outbox: Outbox, tmp_path: Path
) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml")
    host = UUID("abcdef01-0000-4000-8000-000000000001")
    outbox.publish(host, event(-1))
    outbox.drain(outbox.settings())
    found = relay("dlq", "export", "--config", str(config), "--host", str(host).upper())
    assert json.loads(found.stdout)["host_id"] == str(host)
    refused = relay("dlq", "list", "--config", str(config), "--host", "nobody")
    assert refused.stderr.splitlines() == ["relay: --host: 'nobody' is not of type uuid"]


def test_suspects_of_a_host_are_erased_whatever_its_ids_look_like(
    outbox: Outbox, webhook: Webhook
) -> None:
    settings = shop(outbox, "text", webhook, "poll")
    initialise(settings)
    outbox.conn.execute(
        "insert into shop (number, tenant, unit, kind, body) values ('1', 't', 'a/b', 'e', '{}')"
    )
    outbox.conn.execute(
        "insert into relay.suspects (group_id, suspect) values ('shop', '7/a/b'), ('shop', '8/a')"
    )
    erase(settings, outbox.conn, outbox.conn, "t", force=True)
    assert outbox.column("select suspect from relay.suspects") == ["8/a"]


@pytest.mark.parametrize("after_a_crash", [False, True])
def test_a_transaction_id_too_long_for_a_btree(
    outbox: Outbox, webhook: Webhook, after_a_crash: bool
) -> None:
    settings = shop(outbox, "text", webhook, "auto")
    initialise(settings)
    unit = token_hex(9_000)
    for number, amount in enumerate((-1, 1)):
        outbox.conn.execute(
            "insert into shop (number, tenant, actor, unit, kind, body) values "
            "(%s, 't', 'a', %s, 'e', jsonb_build_object('amount', %s::int))",
            (str(number), unit, amount),
        )
    if after_a_crash:
        outbox.conn.execute(
            "insert into relay.groups (group_id, running, instances) values ('shop', true, '{gone:1}') "
            "on conflict (group_id) do update set running = true, instances = '{gone:1}'"
        )
    with relaying(settings):
        wait_until(lambda: outbox.value("select count(*) from seen") == 1)
    assert outbox.column("select transaction_id from relay.dead_letter_queue") == [unit]
    assert outbox.value("select count(*) from relay.suspects") == 0


def test_keys_that_the_target_cannot_spell_are_held_in_order(
    outbox: Outbox, webhook: Webhook, narrow: str
) -> None:
    failing = True
    webhook.answers = lambda _, body: Answer(503 if failing else 204)
    create, publish, _ = PROJECTS["debezium"]
    outbox.conn.execute(create.encode())
    outbox.give("outbox")
    name = f"{outbox.slot}_other"
    with closing(connect(narrow)) as target:
        target.execute("set search_path to default")
        target.execute("create table relayed (seq bigserial, n int check (n <> 0))")
        hook = {
            **{
                "type": "http",
                "url": webhook.url,
                "order_by": "aggregate",
                "circuit_breaker": None,
            },
            "retry": {"wait": 0.05, "max_wait": 0.1, "jitter": 0, "defer_after": 0},
        }
        relayed = {
            "type": "sql",
            "statement": "insert into relayed (n) values ((%(payload)s->>'n')::int)",
            "on_exhausted": "block_key",
        }
        settings = outbox.settings(
            source={
                "dsn": outbox.relay_dsn,
                "slot": name,
                "publication": name,
                "profile": "debezium",
            },
            target={"dsn": narrow},
            group="other",
            handlers={"relayed": relayed, "hook": hook},
            routes=[{"handlers": ["relayed", "hook"]}],
        )
        initialise(settings)
        with relaying(settings):
            for number in range(3):
                outbox.conn.execute(publish.encode(), {"key": "日本", "n": number})
            deferred = "select sink, count(*) from relay.deferred group by 1 order by 1"
            wait_until(
                lambda: target.execute(deferred).fetchall() == [("", 3), ("hook", 3)],
            )
            failing = False
            target.execute("alter table relayed drop constraint relayed_n_check")
            dead_letters = DeadLetters(settings, target)
            dead_letters.replay(dead_letters.find(DeadLetterSelection()), None)
            wait_until(lambda: target.execute(deferred).fetchall() == [])
        found = target.execute("select n from relayed order by seq").fetchall()
        assert found == [(0,), (1,), (2,)]
    assert [request.event["data"]["n"] for request in webhook.accepted][-3:] == [0, 1, 2]
