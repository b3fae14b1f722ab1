"""Extra columns of an outbox, end to end: each path that an event may take brings them along."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest

from relay.admin.check import require
from relay.admin.dead_letters import DeadLetters
from relay.admin.retention import partition_new, restore
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.model.events import FIELDS
from relay.spark import register
from relay.spark.session import Session
from relay.store.dead_letters.selection import DeadLetterSelection
from tests.integration.test_restoration import BEGIN, END, archiving, past
from tests.integration.test_retention import KEEP, turn
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.process import relay
from tests.webhook import Answer, Webhook

HEADERS = {"region": "tenant_region", "priority": "priority"}
EXTRA = """
    alter table outbox_message_t add column tenant_region text, add column priority int;
    create function fill_extra() returns trigger language plpgsql as $$
    begin
        new.tenant_region := new.payload ->> 'region';
        new.priority := (new.payload ->> 'priority')::int;
        return new;
    end $$;
    create trigger fill_extra before insert on outbox_message_t for each row execute function fill_extra();
"""
SEEN = ("seen", "batched", "noted")
REGIONS = ("eu", "Côte d'Ivoire \"\\\n", "", None)


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as found:
        yield found


@pytest.fixture
def shop(outbox: Outbox) -> Outbox:
    """An outbox with two extra columns, and tables for what each handler has seen of them."""
    outbox.conn.execute(EXTRA.encode())
    for table in SEEN:
        outbox.conn.execute(
            f"create table {table} (id uuid, region text, priority text check (priority <> '13'))".encode()
        )
    return outbox


def config(shop: Outbox, webhook: Webhook, **source: Any) -> dict[str, Any]:
    """Every kind of handler; what has the priority 0 goes nowhere, by its header."""
    values = "{0}->>'region', {0}->>'priority'"
    handlers = {
        "seen": {
            "type": "sql",
            "statement": f"insert into seen values (%(id)s, {values.format('%(headers)s')})",
        },
        "batched": {
            "type": "sql",
            "each": "batch",
            "statement": f"insert into batched select id, {values.format('headers')} from batch",
        },
        "noted": {"type": "python", "callable": "tests.callables:note_headers"},
        "hook": {
            "type": "http",
            "url": webhook.url,
            "retry": {"wait": 0.05, "max_wait": 0.1, "jitter": 0, "defer_after": 0},
            "circuit_breaker": None,
        },
    }
    return {
        "source": {**shop.config()["source"], "headers": HEADERS, **source},
        "handlers": handlers,
        "routes": [{"match": {"headers.priority": ["[1-9]*"]}, "handlers": list(handlers)}],
        "unrouted": "ignore",
    }


def publish(shop: Outbox, transactions: int, events: int = 1) -> None:
    for number in range(transactions):
        some = [
            event(
                payload={
                    "region": REGIONS[(number + index) % len(REGIONS)],
                    "priority": (number + index) % 12,
                }
            )
            for index in range(events)
        ]
        shop.publish(host(number % 3), *some)


PUBLISHED = (
    "select id, tenant_region, priority::text from outbox_message_t where priority > 0 order by id"
)


def rows(shop: Outbox, table: str) -> list[Any]:
    return shop.conn.execute(f"select * from {table} order by id".encode()).fetchall()


def delivered(webhook: Webhook) -> dict[str, tuple[str | None, str | None]]:
    events = [request.event for request in webhook.accepted]
    return {each["id"]: (each.get("region"), each.get("priority")) for each in events}


def assert_all_seen(shop: Outbox, webhook: Webhook) -> None:
    published = shop.conn.execute(PUBLISHED.encode()).fetchall()
    wait_until(lambda: len(delivered(webhook)) == len(published))
    wait_until(lambda: all(len(rows(shop, table)) == len(published) for table in SEEN))
    for table in SEEN:
        assert rows(shop, table) == published, table
    # What is null or empty is no attribute.
    assert delivered(webhook) == {
        str(id): (region or None, priority) for id, region, priority in published
    }


@pytest.mark.parametrize(
    ("mode", "spool"),
    [
        ("wal", True),
        ("poll", False),
        pytest.param("wal", False, marks=pytest.mark.rare),
        pytest.param("poll", True, marks=pytest.mark.rare),
    ],
)
def test_handlers_and_sinks_get_headers(
    shop: Outbox, webhook: Webhook, mode: str, spool: bool, engine: str, session: Session | None
) -> None:
    if spool and engine == "spark":
        pytest.skip("a spooled commit runs in this process")
    batch = {"max_bytes": 4096} if spool else {}
    settings = shop.settings(engine, **config(shop, webhook, mode=mode), batch=batch)
    require(settings)
    with relaying(settings, session):
        publish(shop, 2 if spool else 60, events=60 if spool else 2)
        assert_all_seen(shop, webhook)


def test_deferred_deliveries_and_a_lagging_sink_keep_headers(
    shop: Outbox, webhook: Webhook
) -> None:
    failing = [503] * 30
    webhook.answers = lambda headers, body: Answer(failing.pop() if failing else 204)
    settings = shop.settings(**config(shop, webhook), sinks={"attach_seconds": 0.1})
    with relaying(settings):
        publish(shop, 30)
        shop.wait_drained()
        assert_all_seen(shop, webhook)


def test_dead_letters_keep_headers(
    shop: Outbox, webhook: Webhook, engine: str, session: Session | None, tmp_path: Path
) -> None:
    settings = shop.settings(engine, **config(shop, webhook))
    with relaying(settings, session):
        for region in REGIONS:
            shop.publish(host(1), event(payload={"region": region, "priority": 13}))
        wait_until(lambda: shop.value("select count(*) from relay.dead_letter_queue") == 4)
        stored = shop.conn.execute(
            "select headers->>'region', headers->>'priority' from relay.dead_letter_queue order by c_offset"
        ).fetchall()
        assert stored == [(region, "13") for region in REGIONS]
        file = shop.config_file(tmp_path / "relay.yaml", **config(shop, webhook))
        exported = relay("dlq", "export", "--config", str(file))
        found = [json.loads(line)["headers"] for line in exported.stdout.splitlines()]
        assert found == [{"region": region, "priority": "13"} for region in REGIONS]
        dead_letter = shop.value("select min(id) from relay.dead_letter_queue")
        shown = relay("dlq", "show", str(dead_letter), "--config", str(file))
        assert '{"region": "eu", "priority": "13"}' in shown.stdout
        for table in SEEN:
            shop.conn.execute(
                f"alter table {table} drop constraint {table}_priority_check".encode()
            )
        dead_letters = DeadLetters(settings, shop.conn)
        dead_letters.replay(dead_letters.find(DeadLetterSelection()), None)
        assert_all_seen(shop, webhook)


def test_columns_that_relay_cannot_read_are_named(shop: Outbox, webhook: Webhook) -> None:
    with pytest.raises(ConfigurationError, match=r"source\.headers\.priority: .* no column"):
        require(shop.settings(**config(shop, webhook, headers={"priority": "nowhere"})))


@pytest.mark.server(15)
def test_columns_that_a_publication_leaves_out_are_named(shop: Outbox, webhook: Webhook) -> None:
    columns = ", ".join(FIELDS)
    shop.conn.execute(
        f"alter publication {shop.slot} set table outbox_message_t ({columns}, c_xid)".encode()
    )
    with pytest.raises(ConfigurationError, match="leaves out the columns tenant_region, priority"):
        require(shop.settings(**config(shop, webhook, mode="wal")))


@pytest.mark.rare
def test_spark_reads_headers_as_a_map(shop: Outbox, spark_session: Session) -> None:
    spark = spark_session.get(timeout=120)
    assert spark is not None
    register(spark)
    publish(shop, 12)
    frame = (
        spark.read.format("outbox").options(dsn=shop.jobs_dsn, headers=json.dumps(HEADERS)).load()
    )
    assert frame.schema["headers"].dataType.simpleString() == "map<string,string>"
    chosen = frame.selectExpr("id", "headers['region'] as region", "headers['priority'] as p")
    everything = PUBLISHED.replace("where priority > 0", "")
    assert sorted(tuple(row) for row in chosen.collect()) == [
        (str(id), *others) for id, *others in shop.conn.execute(everything.encode())
    ]


def test_a_spark_sink_writes_headers_as_a_map(
    shop: Outbox, webhook: Webhook, spark_session: Session, tmp_path: Path
) -> None:
    lake = {"type": "spark", "path": str(tmp_path / "lake"), "every": 0.2}
    given = config(shop, webhook)
    settings: Settings = shop.settings(
        **{
            **given,
            "handlers": {"seen": given["handlers"]["seen"], "lake": lake},
            "routes": [
                {"match": {"headers.priority": 13}, "handlers": ["seen"]},
                {"match": {"headers.priority": ["[1-9]*"]}, "handlers": ["lake"]},
            ],
        }
    )
    with relaying(settings, spark_session):
        wait_until(lambda: shop.value("select count(*) from relay.sinks") == 1)
        publish(shop, 20)
        shop.wait_delivered("lake", 120)
        # A replay goes to the lake through the driver, beside what the executors read.
        shop.conn.execute(
            "insert into relay.dead_letter_queue (group_id, sink, exception, event_id, host_id, event_type, headers)"
            " values ('default', 'lake', 'x', gen_random_uuid(), %s, 'e', %s)",
            (str(host(1)), json.dumps({"region": "replayed", "priority": "1"})),
        )
        dead_letters = DeadLetters(settings, shop.conn)
        dead_letters.replay(dead_letters.find(DeadLetterSelection()), None)
        wait_until(lambda: shop.value("select count(*) from relay.deferred") == 0)
    found = pyarrow.dataset.dataset(tmp_path / "lake", partitioning="hive").to_table().to_pylist()
    written = sorted(
        (each["id"], dict(each["headers"]).get("region"), dict(each["headers"]).get("priority"))
        for each in found
    )
    dead_letter = shop.value("select event_id from relay.dead_letter_queue")
    published = shop.conn.execute(PUBLISHED.encode()).fetchall()
    assert written == sorted(
        [*((str(id), *others) for id, *others in published), (dead_letter, "replayed", "1")]
    )


def test_an_archive_brings_headers_back(database: str, tmp_path: Path) -> None:
    with Outbox(database) as shop:
        shop.install(**KEEP)
        partition_new(shop.settings(**KEEP), "1d", shop.installer_dsn)
        shop.conn.execute(EXTRA.encode())
        # PostgreSQL makes its values itself.
        shop.conn.execute(
            "alter table outbox_message_t add kind text generated always as (event_type) stored"
        )
        past(shop, 4)
        shop.conn.execute("update outbox_message_t set tenant_region = 'eu', priority = 7")
        texts = ", ".join(
            f"{name}::text" if name not in ("event_ts", "deliver_at") else name for name in FIELDS
        )
        stored = shop.conn.execute(
            f"select {texts} from outbox_message_t order by c_offset".encode()
        ).fetchall()
        columns: dict[str, Any] = dict(zip(FIELDS, zip(*stored, strict=True), strict=True))
        kind = pa.map_(pa.string(), pa.string())
        headers = [("region", "eu"), ("priority", "7"), ("kind", "order.placed")]
        columns["headers"] = pa.array([headers] * len(stored), kind)
        path = tmp_path / "lake"
        pyarrow.parquet.write_to_dataset(pa.table(columns), path)
        content = (
            f"select {texts}, tenant_region, priority, kind from outbox_message_t order by c_offset"
        )
        before = shop.conn.execute(content.encode()).fetchall()
        with relaying(shop.settings(**KEEP)):
            shop.wait_drained()
            shop.wait_compared()
        turn(shop.settings(**KEEP), days=30)
        assert shop.value("select count(*) from outbox_message_t") == 0
        more = archiving(shop, path)
        source = {**shop.config()["source"], "headers": {**HEADERS, "kind": "kind"}}
        assert restore(
            shop.settings(**more, source=source), BEGIN, END, shop.installer_dsn
        ).events == len(before)
        assert shop.conn.execute(content.encode()).fetchall() == before
