"""The configuration: what is read from where, and one clear line for each fault."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from relay.config.dsn import administrator_dsn
from relay.config.loading import load
from relay.config.secrets import read_secret_file
from relay.config.settings import Settings, SparkSettings
from relay.faults import ConfigurationError
from relay.sinks import build_sinks
from relay.spark.jvm import as_properties
from relay.spark.session import _classic_conf

SECRET = "s3cret"

Load = Callable[[str], Settings]


@pytest.fixture(autouse=True)
def _nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No file, and none of the environment that the tests themselves were started with."""
    for name in list(os.environ):
        if name.upper().startswith("RELAY_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def read() -> Load:
    """Load a text as the configuration file `shop.yaml`."""

    def read(text: str) -> Settings:
        Path("shop.yaml").write_text(text)
        return load(Path("shop.yaml"))

    return read


def refused(text: str) -> list[str]:
    """The lines with which a file is refused."""
    Path("shop.yaml").write_text(text)
    with pytest.raises(ConfigurationError) as raised:
        load(Path("shop.yaml"))
    assert raised.value.exit_status == 2
    return str(raised.value).splitlines()


def refused_environment() -> list[str]:
    with pytest.raises(ConfigurationError) as raised:
        load(None)
    return str(raised.value).splitlines()


# What is right.


def test_what_is_not_set_has_a_default(read: Load) -> None:
    settings = read("group: default")
    assert settings.source.table_name == ("public", "outbox_message_t")
    assert (settings.group, settings.partitions, settings.unrouted) == ("default", 8, "dead_letter")
    assert (settings.inline_max_events, settings.needs_spark) == (1000, True)
    assert settings.one_database


def test_the_contract_of_the_design_is_accepted_whole(read: Load) -> None:
    settings = read(
        """
source:
  dsn: postgresql://relay@localhost:5432/app
  table: public.outbox_message_t
  slot: relay
  publication: relay
  mode: auto
target:
  dsn: null
group: default
partitions: 8
batch: {max_events: 10000, max_bytes: 16777216, inline_max_events: 1000}
poll: {wait_period_ms: 1000, batch_size: 1000}
spark: {master: "local[*]", remote: null, conf: {}}
handlers:
  orders:   {type: sql, each: event, statement: "insert into t values (%(id)s, %(payload)s)"}
  totals:   {type: sql, each: batch, statement: "insert into t select id from batch"}
  audit:    {type: python, callable: "shop.audit:on_transaction"}
routes:
  - {match: {event_type: "order.*"}, handlers: [orders, totals]}
  - {match: {aggregate_type: Payment}, handlers: [audit]}
unrouted: dead_letter
"""
    )
    assert list(settings.handlers) == ["orders", "totals", "audit"]
    assert [route.handlers for route in settings.routes] == [["orders", "totals"], ["audit"]]
    assert [route.match for route in settings.routes] == [
        {"event_type": ["order.*"]},
        {"aggregate_type": ["Payment"]},
    ]
    assert settings.target_dsn == settings.source_dsn
    assert settings.source_dsn.conninfo() == "postgresql://relay@localhost:5432/app"


def test_a_target_of_its_own_is_another_database(read: Load) -> None:
    settings = read("{source: {dsn: 'host=a'}, target: {dsn: 'host=b'}}")
    found = (settings.source_dsn, settings.target_dsn)
    assert [each.conninfo() for each in found] == ["host=a", "host=b"]
    assert not settings.one_database


def test_columns_rename_some_fields_and_leave_the_others(read: Load) -> None:
    mapping = read("source: {columns: {host_id: tenant}}").source.mapping
    assert mapping["host_id"] == "tenant"
    assert mapping["payload"] == "payload"


def test_spark_s_own_settings_become_the_texts_that_spark_reads(read: Load) -> None:
    conf = read("spark: {conf: {a: true, b: 1, c: 1.5, d: x}}").spark.plain_conf
    assert conf == {"a": "true", "b": "1", "c": "1.5", "d": "x"}


def test_settings_travel_to_spark_s_workers(read: Load) -> None:
    settings = read(
        "handlers: {h: {type: sql, statement: select 1}}\nroutes: [{handlers: [h], continue: true}]"
    )
    again = pickle.loads(pickle.dumps(settings))
    assert again == settings
    assert again.routes[0].continue_ is True


def test_an_empty_file_is_the_defaults(read: Load) -> None:
    assert read("# nothing yet\n") == Settings()


# Which file.


def test_the_given_file_comes_before_relay_config_and_that_before_relay_yaml(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("given", "named", "relay"):
        Path(f"{name}.yaml").write_text(f"group: {name}")
    assert load(None).group == "relay"
    monkeypatch.setenv("RELAY_CONFIG", "named.yaml")
    assert load(None).group == "named"
    assert load(Path("given.yaml")).group == "given"


def test_neither_a_file_nor_a_setting_is_no_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PGHOST", "somewhere")
    (line,) = refused_environment()
    assert line.startswith(f"there is no configuration: {Path.cwd()}/relay.yaml does not exist")
    assert "set RELAY_SOURCE__DSN" in line
    monkeypatch.setenv("RELAY_SOURCE__SLOT", "one")
    assert load(None).source.slot == "one"


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_a_missing_file_is_named(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAY_CONFIG", "missing.yaml")
    with pytest.raises(
        ConfigurationError, match=r"^missing\.yaml: cannot be read .*--config FILE$"
    ):
        load(Path("missing.yaml") if how == "argument" else None)


def test_a_folder_is_no_file() -> None:
    with pytest.raises(ConfigurationError, match=r"^\.: cannot be read \(Is a directory\)"):
        load(Path())


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("group: a\nroutes: [\n", "shop.yaml:3: is not valid YAML: "),
        ("group: a\nsource: b: c\n", "shop.yaml:2: is not valid YAML: "),
        ("\tgroup: a", "shop.yaml:1: is not valid YAML: "),
        ("group: *nowhere", "shop.yaml:1: is not valid YAML: "),
        ("group: !!python/name:os.system x", "shop.yaml:1: is not valid YAML: "),
        ("group: \x00", "shop.yaml: is not valid YAML"),
        # Looks like a date to YAML, but is none.
        ("group: 2026-99-99", "shop.yaml"),
        ("partitions: !!int many", "shop.yaml"),
        ("- a\n- b", "shop.yaml: must be a mapping"),
        ("just text", "shop.yaml: must be a mapping"),
        ("5: a", "shop.yaml: must be a mapping"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_is_no_mapping_in_yaml_is_one_line_with_its_location(text: str, line: str) -> None:
    (found,) = refused(text)
    assert found.startswith(line)


def test_a_file_that_is_not_utf8_is_one_line() -> None:
    Path("shop.yaml").write_bytes("group: Zoë".encode("latin-1"))
    with pytest.raises(ConfigurationError, match=r"^shop\.yaml: is not UTF-8 text$"):
        load(Path("shop.yaml"))


# What is wrong in a file.

HANDLER = "handlers: {h: {type: sql, statement: select 1}}\n"


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("grou: a", "grou: unknown key"),
        ("source: {dns: x}", "source.dns: unknown key"),
        ("batch: {poll: {}}", "batch.poll: unknown key"),
        ("self: 1", "self: unknown key"),
        ("_env_file: x", "_env_file: unknown key"),
        ("handlers: {h: {type: sql, statement: x, foo: 1}}", "handlers.h.foo: unknown key"),
        # A handler may be called like its type.
        ("handlers: {sql: {type: sql, statement: x, foo: 1}}", "handlers.sql.foo: unknown key"),
        (HANDLER + "routes: [{handlers: [h], match: {}, cont: 1}]", "routes.0.cont: unknown key"),
        (HANDLER + "routes: [{handlers: [h], continue_: 1}]", "routes.0.continue_: unknown key"),
    ],
)
def test_an_unknown_key_is_named(text: str, start: str) -> None:
    (line,) = refused(text)
    assert line.startswith(f"shop.yaml: {start}")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("queues: {mail: {matc: {}}}", "queues.mail.matc: unknown key; did you mean match?"),
        ("queues: {mail: {match: {event_typ: a}}}", "queues.mail.match: 'event_typ' is neither"),
        ("queues: {mail: {match: {event_type: []}}}", "queues.mail.match.event_type: must be a"),
        ("queues: {mail: {match: {headers.x: a}}}", "queues.mail.match: 'headers.x': queues match"),
        ("queues: {mail: {key: tenant}}", "queues.mail.key: 'tenant' is neither none, host, user"),
        ("queues: {mail: {key: payload}}", "queues.mail.key: 'payload' is neither none, host,"),
        ("queues: {mail: {attempts: 0}}", "queues.mail.attempts: "),
        ("queues: {mail: {backoff: 9, max_backoff: 8}}", "queues.mail: max_backoff: is shorter"),
        ("queues: {mail: {where: '$.a', match: null}}", "queues.mail: where: without match"),
        ("queues: {mail: {keep_done: 1y}}", "queues.mail.keep_done: must be a number of minutes"),
        ("queues: {mail: {params: []}}", "queues.mail.params: must be a mapping"),
        (
            "queues: {mail: {start: now}}",
            "queues.mail.start: 'now' is neither beginning, a c_offset",
        ),
        ("queues: {mail: {start: -1}}", "queues.mail.start: '-1' is neither beginning, a c_offset"),
        (
            "{source: {mode: wal}, queues: {mail: {start: beginning}}}",
            "queues.mail.start: source.mode: wal reads nothing older than the slot",
        ),
        ("queues: {mail: null}", "queues.mail: must be a mapping"),
        ("queues: {'': {}}", "queues: '' is no name of a queue"),
        ("queues: [mail]", "queues: must be a mapping"),
    ],
)
def test_what_is_wrong_in_a_queue_is_one_line_with_its_key(text: str, line: str) -> None:
    (found,) = refused(text)
    assert found.startswith(f"shop.yaml: {line}")


def test_an_unknown_key_suggests_only_a_similar_one() -> None:
    assert "did you mean" not in "\n".join(refused("source: {xyzzy: x}"))


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("grou: a", "group"),
        ("source: {dns: x}", "dsn"),
        ("batch: {max_event: 1}", "max_events"),
        ("handlers: {h: {type: sql, statment: x}}", "statement"),
        ("handlers: {h: {type: http, url: 'http://h', retry: {atempts: 3}}}", "attempts"),
        ("handlers: {h: {type: nats, topic: t, servers: ['tls://h'], tls: {veryfy: x}}}", "verify"),
        (HANDLER + "routes: [{handlers: [h], continue_: 1}]", "continue"),
        (HANDLER + "routes: [{handlers: [h], Match: {}}]", "match"),
        ("intake: {i: {type: kafka, topic: t}}", "topics"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(text: str, meant: str) -> None:
    assert f"unknown key; did you mean {meant}?" in "\n".join(refused(text))


def test_a_key_of_an_intake_of_another_type_is_not_suggested() -> None:
    given = "intake: {i: {type: nats, servers: ['nats://h'], stream: s, consumer: c, queue: q}}"
    (line,) = refused(given)
    assert line.startswith("shop.yaml: intake.i.queue: unknown key; see ")


def test_an_unknown_key_that_is_like_no_other_suggests_nothing() -> None:
    (line,) = refused("source: {zzz: 1}")
    assert line == (
        "shop.yaml: source.zzz: unknown key; see docs/reference/settings.md for all keys"
    )


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("source: text", "source: must be a mapping of keys"),
        ("source: null", "source: must be a mapping of keys"),
        ("sinks: [shop]", "sinks: must be a mapping of keys"),
        ("api: {listen: 'h:1', origins: 'https://a'}", "api.origins: must be a list"),
        ("sinks: {attach_seconds: .inf}", "sinks.attach_seconds: input should be less than"),
        ("shutdown_timeout: .inf", "shutdown_timeout: input should be less than"),
        ("handlers: {h: null}", "handlers.h: must be a mapping of keys"),
        (
            "handlers: {'': {type: sql, statement: x}}",
            "handlers: a handler has the name '';",
        ),
        (
            "handlers: {h: {type: http, url: 'http://h', retry: {wait: .inf}}}",
            "handlers.h.retry.wait: input should be less than",
        ),
        (
            "handlers: {h: {type: http, url: 'http://h', circuit_breaker: false}}",
            "handlers.h.circuit_breaker: must be a mapping of keys",
        ),
        ("source: {dsn: 5}", "source.dsn: "),
        ("source: {dsn: {host: h}}", "source.dsn: "),
        ("source: {table: outbox}", "source.table: must be schema.table"),
        ("source: {table: a.b.c}", "source.table: must be schema.table"),
        ("source: {table: .t}", "source.table: must be schema.table"),
        ("source: {slot: Relay-1}", "source.slot: "),
        (f"source: {{slot: {'s' * 64}}}", "source.slot: "),
        (
            "schedules: {a: {every: 1m, publish: {event_type: a, host_id: 1}}}",
            "schedules.a.publish.host_id: UUID input should be a string",
        ),
        (
            "schedules: {a: {every: 1m, timezone: Europe/Paris, publish: {event_type: a, "
            f"host_id: {UUID(int=1)}}}}}}}",
            "schedules.a: timezone: only cron has one: remove it",
        ),
        ("intake: {a: {type: redis}}", "intake.a.type: must be one of kafka, nats, rabbitmq"),
        ("intake: {a: {}}", "intake.a.type: must be one of kafka, nats, rabbitmq"),
        (
            "intake: {a: {type: kafka, bootstrap: [h], topics: [], group: g}}",
            "intake.a.topics: list should have at least 1 item",
        ),
        (
            "intake: {a: {type: kafka, bootstrap: [h], topics: ['^a.*'], group: g}}",
            "intake.a.topics.0: must be a topic of Kafka: up to 249 letters, digits and . _ -",
        ),
        (
            "intake: {a: {type: kafka, bootstrap: [h], topics: [t], group: g, conf: {group.id: x}}}",
            "intake.a.conf: group.id is set by relay: set the key group",
        ),
        (
            "intake: {a: {type: kafka, bootstrap: [h], topics: [t], group: g, conf: {enable.auto.commit: 'true'}}}",
            "intake.a.conf: enable.auto.commit is set by relay: offsets are committed after the events: remove it",
        ),
        (
            "intake: {a: {type: nats, servers: ['nats://n'], stream: a b, consumer: c}}",
            "intake.a.stream: must be a name of NATS, without spaces and . * > / \\",
        ),
        (
            "api: {listen: '127.0.0.1:9466', origins: ['https://app.example/']}",
            "api.origins.0: must be an origin without a path, such as https://app.example",
        ),
        ("intake: {a: {type: rabbitmq, url: 'http://h', queue: q}}", "intake.a.url: "),
        (
            "intake: {'': {type: rabbitmq, url: 'amqp://h', queue: q}}",
            "intake: '' is no name of an intake",
        ),
        (
            "{source: {table: a.b}, intake: {a: {type: rabbitmq, url: 'amqp://h', queue: q}}}",
            "intake: relay publishes into its own outbox only",
        ),
        (
            f"schedules: {{a: {{every: 0s, publish: {{event_type: a, host_id: {UUID(int=1)}}}}}}}",
            "schedules.a.every: must be at least a second",
        ),
        (
            f"schedules: {{a: {{at: '2027-01-01T00:00:00', publish: {{event_type: a, host_id: {UUID(int=1)}}}}}}}",
            "schedules.a.at: needs its offset from UTC",
        ),
        (
            f"schedules: {{a: {{cron: '@daily', timezone: CEST, publish: {{event_type: a, host_id: {UUID(int=1)}}}}}}}",
            "schedules.a: timezone: 'CEST' is not a time zone such as Europe/Paris",
        ),
        ("source: {mode: push}", "source.mode: input should be 'auto', 'wal' or 'poll'"),
        ("source: {columns: {hots_id: x}}", "source.columns: 'hots_id' is not a field"),
        ("source: {columns: {id: 5}}", "source.columns.id: "),
        ("group: ''", "group: "),
        ("group: 5", "group: "),
        ("partitions: many", "partitions: input should be a valid integer"),
        ("partitions: 0", "partitions: "),
        ("partitions: 8.5", "partitions: "),
        ("partitions: yes", "partitions: "),
        ("batch: {max_events: 0}", "batch.max_events: "),
        ("batch: {max_bytes: 16MB}", "batch.max_bytes: "),
        ("batch: {inline_max_events: -1}", "batch.inline_max_events: "),
        ("poll: {listen: often}", "poll.listen: "),
        (
            "{source: {mode: wal}, poll: {listen: true}}",
            "poll.listen: needs source.mode: auto or poll",
        ),
        ("unrouted: drop", "unrouted: input should be 'dead_letter', 'ignore' or 'fail'"),
        ("shutdown_timeout: 0", "shutdown_timeout: "),
        ("spark: {conf: {a: [b]}}", "spark.conf.a: "),
        ("handlers: [h]", "handlers: "),
        ("handlers: {h: text}", "handlers.h: "),
        (
            "handlers: {h: {type: ftp}}",
            "handlers.h.type: must be one of sql, python, queue, spark, function, http, redis",
        ),
        (
            "handlers: {h: {statement: x}}",
            "handlers.h.type: must be one of sql, python, queue, spark, function, http, redis",
        ),
        ("handlers: {h: {type: sql}}", "handlers.h.statement: is required"),
        ("handlers: {h: {type: sql, statement: ''}}", "handlers.h.statement: "),
        ("handlers: {h: {type: sql, statement: x, each: row}}", "handlers.h.each: "),
        ("handlers: {h: {type: python, callable: shop}}", "handlers.h.callable: must be module:"),
        (
            "handlers: {h: {type: python, callable: 'a:b()'}}",
            "handlers.h.callable: must be module:",
        ),
        ("routes: {handlers: [h]}", "routes: "),
        (HANDLER + "routes: [{match: {}}]", "routes.0.handlers: is required"),
        (HANDLER + "routes: [{handlers: []}]", "routes.0.handlers: "),
        (HANDLER + "routes: [{handlers: h}]", "routes.0.handlers: "),
        (HANDLER + "routes: [{handlers: [h], continue: perhaps}]", "routes.0.continue: "),
        (
            HANDLER + "routes: [{handlers: [h], match: {event_typ: x}}]",
            "routes.0.match: 'event_typ' is neither a field",
        ),
        (
            HANDLER + "routes: [{handlers: [h], match: {event_type.x: a}}]",
            "routes.0.match: 'event_type.x' is neither a field",
        ),
        (
            HANDLER + "routes: [{handlers: [h]}, {handlers: [h], match: {event_type: {a: b}}}]",
            "routes.1.match.event_type: must be a value, a pattern",
        ),
        (
            HANDLER + "routes: [{handlers: [h], match: {event_type: []}}]",
            "routes.0.match.event_type: must be a value, a pattern",
        ),
        (
            HANDLER + "routes: [{handlers: [h], match: {event_type: }}]",
            "routes.0.match.event_type: must be a value, a pattern",
        ),
    ],
)
def test_a_wrong_value_is_one_line_with_file_and_key(text: str, start: str) -> None:
    (line,) = refused(text)
    assert line.startswith(f"shop.yaml: {start}")
    assert len(line) > len(f"shop.yaml: {start}") or not start.endswith(" ")


@pytest.mark.parametrize(
    ("handler", "start"),
    [
        ("{type: http}", "url: is required"),
        ("{type: http, url: shop.example}", "url: must be an address such as https://"),
        ("{type: http, url: 'http://h', mode: xml}", "mode: input should be"),
        (
            "{type: http, url: 'http://h', each: transaction, mode: binary}",
            "each: transaction needs",
        ),
        ("{type: http, url: 'http://h', timeout: 0}", "timeout: "),
        ("{type: http, url: 'http://h', retry: {atempts: 3}}", "retry.atempts: unknown key"),
        ("{type: http, url: 'http://h', headers: {a: {env: NONE_SUCH}}}", "headers.a: the env"),
        ("{type: http, url: 'http://h:99999'}", "url: has a port that is not"),
        ("{type: http, url: 'http://h:port'}", "url: has a port that is not"),
        ("{type: http, url: 'http://h:0'}", "url: has a port that is not"),
        ("{type: http, url: 'http://[h'}", "url: is not a valid address"),
        ("{type: http, url: 'http://h', signing_secret: ''}", "signing_secret: is empty"),
        ("{type: http, url: 'http://h', signing_secret: whsec_}", "signing_secret: is empty"),
        ("{type: http, url: 'http://h', headers: {'a b': c}}", "headers: 'a b' is not the name"),
        ("{type: http, url: 'http://h', headers: {'': c}}", "headers: '' is not the name"),
        (
            '{type: http, url: "http://h", headers: {a: "b\\r\\nc"}}',
            "headers: a has a value that a header cannot",
        ),
        (
            "{type: http, url: 'http://h', headers: {a: Zoë}}",
            "headers: a has a value that a header cannot",
        ),
        ("{type: spark}", "needs one of path, table, jdbc and callable"),
        ("{type: spark, path: a, table: b}", "needs one of path, table, jdbc and callable"),
        ("{type: spark, callable: shop}", "callable: must be module:function"),
        ("{type: spark, format: iceberg, table: events}", "table: needs a namespace with"),
        (
            "{type: spark, callable: 'shop:write', format: delta}",
            "format has no effect with callable: remove it",
        ),
        (
            "{type: spark, jdbc: {dsn: 'postgresql://h/d', table: t}, partition_by: [date]}",
            "partition_by has no effect with jdbc: remove it",
        ),
        (
            "{type: spark, path: a, partition_by: [day]}",
            "partition_by: 'day' is not one of the columns",
        ),
        ("{type: spark, path: a, every: 0}", "every: "),
        ("{type: spark, path: a, sql: ''}", "sql: "),
        ("{type: spark, path: a, transform: shop}", "transform: must be module:function"),
        ("{type: spark, path: a, start: then}", "start: "),
        ("{type: spark, path: a, timeout: 1}", "timeout: unknown key"),
        ("{type: redis, topic: t}", "url: is required"),
        ("{type: redis, topic: t, url: 'http://h'}", "url: must be an address such as redis://"),
        ("{type: redis, topic: t, url: 'redis://h:x'}", "url: has a port that is not"),
        (
            "{type: nats, topic: t, servers: ['nats://h:70000']}",
            "servers.0: has a port that is not",
        ),
        ("{type: kafka, topic: t, bootstrap: ['h:0']}", "bootstrap.0: has a port that is not"),
        ("{type: kafka, topic: t, bootstrap: ['']}", "bootstrap.0: must be a server such as"),
        ("{type: redis, url: 'redis://h'}", "topic: is required"),
        (
            "{type: redis, url: 'redis://h', topic: 't.{event_typ}'}",
            "topic: {event_typ} is neither",
        ),
        ("{type: redis, url: 'redis://h', topic: 't.{payload}'}", "topic: {payload} is neither"),
        ("{type: redis, url: 'redis://h', topic: 't.{id:>9}'}", "topic: {id} is neither"),
        ("{type: redis, url: 'redis://h', topic: 't.{id'}", "topic: expected '}'"),
        ("{type: redis, url: 'redis://h', topic: t, max_length: 0}", "max_length: "),
        ("{type: nats, topic: t}", "servers: is required"),
        ("{type: nats, topic: t, servers: []}", "servers: "),
        ("{type: nats, topic: t, servers: [h]}", "servers.0: must be an address such as nats://"),
        ("{type: nats, topic: t, servers: ['ws://h'], tls: {}}", "servers: ws:// is not encrypted"),
        ("{type: rabbitmq, topic: t, url: 'amq://h'}", "url: must be an address such as amqp://"),
        ("{type: kafka, topic: t}", "bootstrap: is required"),
        ("{type: kafka, topic: t, bootstrap: ['h:9092'], key: ''}", "key: "),
    ],
)
def test_a_bad_sink_is_one_line(handler: str, start: str) -> None:
    (line,) = refused(f"handlers: {{h: {handler}}}")
    assert line.startswith(("shop.yaml: handlers.h: " + start, "shop.yaml: handlers.h." + start))


@pytest.mark.parametrize(
    ("handler", "line"),
    [
        ("{type: redis, topic: t, url: 'redis://h?dbx=1'}", "url: the part after ? has an option"),
        ("{type: rabbitmq, topic: t, url: 'amqp://h?a=1'}", "url: the part after ? has an option"),
        ("{type: kafka, topic: t, bootstrap: [h], conf: {a: b}}", "conf: No such configuration"),
        (
            "{type: nats, topic: t, servers: ['tls://h'], tls: {ca_file: none.pem}}",
            "tls: ca_file none.pem: a cert",
        ),
        ("{type: http, url: 'http://h', signing_secret: whsec_!}", "signing_secret: is not base64"),
    ],
)
def test_what_only_a_client_finds_wrong_is_one_line(read: Load, handler: str, line: str) -> None:
    settings = read(f"handlers: {{h: {handler}}}")
    with pytest.raises(ConfigurationError) as raised:
        build_sinks(settings.handlers)
    assert str(raised.value).startswith(f"handlers.h.{line}")
    assert "\n" not in str(raised.value)


def test_an_unknown_handler_in_a_route_is_named_with_the_handlers_there_are() -> None:
    (line,) = refused(HANDLER + "routes: [{handlers: [h]}, {handlers: [orders]}]")
    assert line == "shop.yaml: routes.1.handlers: there is no handler 'orders' (handlers: h)"


def test_every_fault_has_a_line_of_its_own() -> None:
    lines = refused("partitions: many\nbatch: {max_events: x, max_byte: 1}")
    assert sorted(line.split(": ")[1] for line in lines) == [
        "batch.max_byte",
        "batch.max_events",
        "partitions",
    ]
    assert {line.split(": ")[0] for line in lines} == {"shop.yaml"}


def test_a_key_that_stands_twice_is_not_dropped_silently() -> None:
    (line,) = refused("handlers:\n  h: {type: sql, statement: a}\n  h: {type: sql, statement: b}\n")
    assert line.startswith("shop.yaml:3: ")
    assert "h" in line


# Passwords.


@pytest.mark.parametrize(
    "dsn",
    [
        f"postgresql://u:{SECRET} x@h/db",
        f"postgres//u:{SECRET}@h/db",
        f"postgresql://u:{SECRET}@h/db?sslmod=x",
        f"host=h password={SECRET} x",
        f"host=h passwrd={SECRET}",
        f"host=h password='{SECRET}",
        SECRET,
        f"postgresql://u:{SECRET}",
        f"postgresql://u:{SECRET}:x@h:{SECRET}/db",
        f"postgresql://u:a@{SECRET}@h/db",
        f"postgresql://u:{SECRET}@@h/db",
        f"postgresql://u:a%40b@{SECRET}@h/db",
        f"postgresql://u:{SECRET}/b@h/db",
        f"postgresql://u:1/{SECRET}@h/db",
        f"postgresql://u:a@b/{SECRET}@h/db",
        f"postgresql://u:1/{SECRET}?a@h/db",
    ],
)
@pytest.mark.parametrize("key", ["source", "target"])
def test_a_bad_dsn_is_refused_without_its_password(dsn: str, key: str) -> None:
    (line,) = refused(json.dumps({key: {"dsn": dsn}}))
    assert line.startswith(f"shop.yaml: {key}.dsn: is not a PostgreSQL connection string")
    assert SECRET not in line


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://u:a%40b%2Fc@h:5432,i/d%40b",
        "postgresql://u:a?b#c[d@h/db",
        "postgresql:///db?host=/run/postgresql&user=a@tenant",
        "postgresql://%40socket/db",
        "host=h,i port=5432, password=a@b/c",
        "postgresql:///",
    ],
)
def test_a_dsn_that_escapes_what_it_has_to_is_taken(dsn: str, read: Load) -> None:
    assert read(json.dumps({"source": {"dsn": dsn}})).source_dsn.conninfo() == dsn


def test_a_dsn_may_be_in_a_file_or_in_a_variable(
    monkeypatch: pytest.MonkeyPatch, read: Load
) -> None:
    Path("dsn").write_text(f"postgresql://u:{SECRET}@file/db\n")
    monkeypatch.setenv("TARGET", f"postgresql://u:{SECRET}@variable/db")
    settings = read("{source: {dsn: {file: dsn}}, target: {dsn: {env: TARGET}}}")
    assert settings.source_dsn.conninfo() == f"postgresql://u:{SECRET}@file/db"
    assert settings.target_dsn.conninfo() == f"postgresql://u:{SECRET}@variable/db"
    monkeypatch.setenv("RELAY_SOURCE__DSN__FILE", "dsn")
    assert load(None).source_dsn == settings.source_dsn


@pytest.mark.parametrize("dsn", ["{file: none}", "{env: NONE}", "{file: empty}", "''"])
def test_a_dsn_that_is_not_there_is_no_default(dsn: str) -> None:
    Path("empty").write_text("\n")
    (line,) = refused(f"source: {{dsn: {dsn}}}")
    assert line.startswith("shop.yaml: source.dsn: ")


@pytest.mark.parametrize(
    "content",
    [
        {"source": f"postgresql://u:{SECRET}@h/db"},
        {"source": {"dsn": [f"postgresql://u:{SECRET}@h/db"]}},
        {"source": {"dsn": {"password": SECRET}}},
        {"source": {"pasword": SECRET}},
        {"source": {"password": [SECRET]}},
        {"dsn": f"postgresql://u:{SECRET}@h/db"},
        {"partitions": f"postgresql://u:{SECRET}@h/db"},
    ],
)
def test_a_dsn_in_the_wrong_place_is_refused_without_its_password(
    content: dict[str, object],
) -> None:
    (line,) = refused(json.dumps(content))
    assert SECRET not in line


def test_settings_do_not_show_their_passwords(read: Load) -> None:
    dsn = f"postgresql://u:{SECRET}@h/db"
    settings = read(json.dumps({"source": {"dsn": dsn}, "target": {"dsn": dsn}}))
    assert settings.source_dsn.conninfo() == settings.target_dsn.conninfo() == dsn
    for shown in (repr(settings), str(settings), settings.model_dump_json(), repr(settings.source)):
        assert SECRET not in shown


def test_a_spark_sink_may_write_other_columns(read: Load) -> None:
    text = "handlers: {h: {type: spark, path: a, sql: 'select 1 as one from events'%s}}"
    assert read(text % "").spark_handlers["h"].partition_by == []
    assert read(text % ", partition_by: [one]").spark_handlers["h"].partition_by == ["one"]
    plain = read("handlers: {h: {type: spark, path: a}}").spark_handlers["h"]
    assert plain.partition_by == ["date", "host_bucket"]
    assert plain.target == "parquet path a"


def test_spark_cannot_read_the_wal_alone() -> None:
    (line,) = refused("{source: {mode: wal}, handlers: {h: {type: spark, path: a}}}")
    assert "handlers.h.type: spark polls the outbox" in line
    assert line.endswith("set the mode to auto")


def test_the_configuration_of_spark_may_be_secret(
    monkeypatch: pytest.MonkeyPatch, read: Load
) -> None:
    monkeypatch.setenv("CLUSTER", SECRET)
    conf = "{spark.authenticate.secret: {env: CLUSTER}, spark.ui.port: 4040}"
    settings = read(f"spark: {{master: 'spark://h:7077', conf: {conf}}}")
    assert settings.spark.plain_conf["spark.authenticate.secret"] == SECRET
    assert SECRET not in repr(settings) + settings.model_dump_json()


def test_a_standalone_cluster_without_its_secret_is_refused(read: Load) -> None:
    (line,) = refused("spark: {master: 'spark://h:7077'}")
    assert line.startswith("shop.yaml: spark: conf: spark.authenticate.secret is missing")
    assert not read(
        "spark: {master: 'spark://h:7077', conf: {spark.authenticate: false}}"
    ).spark.authenticates
    assert read("spark: {master: yarn}").spark.authenticates


def test_a_cluster_is_authenticated_and_encrypted_unless_it_is_told_not_to_be() -> None:
    def conf(**spark: Any) -> dict[str, str]:
        return _classic_conf(SparkSettings.model_validate(spark))

    protected = {
        "spark.authenticate",
        "spark.network.crypto.enabled",
        "spark.io.encryption.enabled",
    }
    found = conf(master="yarn")
    assert {found[key] for key in protected} == {"true"}
    assert not protected & conf(master="local[*]").keys()
    assert not protected & conf(master="yarn", conf={"spark.authenticate": False}).keys()


@pytest.mark.parametrize(
    ("conf", "text"),
    [
        ({"spark.a": "b"}, "spark.a=b\n"),
        ({"a b": " c=d:e\\#!\n"}, "a\\ b=\\ c\\=d\\:e\\\\\\#\\!\\n\n"),
        ({"a": "é"}, "a=é\n"),
    ],
)
def test_a_file_of_properties(conf: dict[str, str], text: str) -> None:
    assert as_properties(conf) == text


def test_the_dsn_of_an_administrator_is_read_from_a_file_too() -> None:
    Path("dsn").write_text("host=admin\n")
    assert administrator_dsn(None, Path("dsn"), "--admin-dsn") == "host=admin"
    assert administrator_dsn("host=admin", None, "--admin-dsn") == "host=admin"
    assert administrator_dsn(None, None, "--admin-dsn") is None


@pytest.mark.parametrize(
    ("text", "file", "start"),
    [
        (f"postgresql://u:p@{SECRET}@h", None, "--admin-dsn: is not"),
        (None, "dsn", "--admin-dsn-file: is not"),
        (None, "none", "--admin-dsn-file: the file none cannot be read"),
        ("host=h", "dsn", "--admin-dsn: is given twice"),
    ],
)
def test_a_bad_dsn_of_an_administrator_is_not_shown(
    text: str | None, file: str | None, start: str
) -> None:
    Path("dsn").write_text(f"postgresql://u:p@{SECRET}@h")
    with pytest.raises(ConfigurationError) as raised:
        administrator_dsn(text, Path(file) if file else None, "--admin-dsn")
    assert str(raised.value).startswith(start)
    assert SECRET not in str(raised.value)


# The environment.


def test_the_environment_overrides_the_file_key_by_key(
    monkeypatch: pytest.MonkeyPatch, read: Load
) -> None:
    monkeypatch.setenv("RELAY_SOURCE__DSN", "host=environment")
    monkeypatch.setenv("RELAY_GROUP", "environment")
    monkeypatch.setenv("RELAY_BATCH__MAX_EVENTS", "5")
    settings = read("{source: {dsn: host=file, slot: file}, group: file, batch: {max_bytes: 2048}}")
    assert settings.source_dsn.conninfo() == "host=environment"
    assert settings.source.slot == "file"
    assert settings.group == "environment"
    assert (settings.batch.max_events, settings.batch.max_bytes) == (5, 2048)


def test_whole_sections_may_come_from_the_environment_as_json(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RELAY_HANDLERS", '{"h": {"type": "sql", "statement": "select 1"}}')
    monkeypatch.setenv("RELAY_ROUTES", '[{"handlers": ["h"], "match": {"event_type": "a.*"}}]')
    settings = load(None)
    assert list(settings.handlers) == ["h"]
    assert settings.routes[0].match == {"event_type": ["a.*"]}


@pytest.mark.parametrize(
    ("name", "value", "start"),
    [
        ("RELAY_PARTITIONS", "many", "environment: partitions: "),
        ("RELAY_SOURCE__DNS", "x", "environment: source.dns: unknown key"),
        ("RELAY_SOURCE__SLOT", "Not-A-Slot", "environment: source.slot: "),
        ("RELAY_HANDLERS", '{"h": {"type": "ftp"}}', "environment: handlers.h.type: must be "),
        ("RELAY_ROUTES", '[{"handlers": ["h"]}]', "environment: routes.0.handlers: there is no"),
        ("RELAY_ROUTES", "not json", "environment: routes: "),
        ("RELAY_SOURCE", "not json", "environment: source: "),
    ],
)
def test_a_fault_in_the_environment_is_one_line_that_says_so(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, start: str
) -> None:
    monkeypatch.setenv(name, value)
    (line,) = refused_environment()
    assert line.startswith(start)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("RELAY_SOURCE_DSN", "RELAY_SOURCE__DSN"),
        ("RELAY_PARTITION", "RELAY_PARTITIONS"),
        ("relay_batch_max_events", "RELAY_BATCH__MAX_EVENTS"),
    ],
)
def test_a_variable_that_sets_nothing_suggests_the_nearest(
    monkeypatch: pytest.MonkeyPatch, name: str, meant: str
) -> None:
    monkeypatch.setenv(name, SECRET)
    (line,) = refused("group: a")
    assert line == f"environment: {name}: sets no key; did you mean {meant}?"


@pytest.mark.parametrize(
    "name",
    [
        "RELAY_ADMIN_DSN",
        "RELAY_PASSWORD",
        "RELAY_TEST_POSTGRES",
        "RELAY_SERVICE_HOST",
        "RELAY_SERVICE_PORT_HTTP",
        "RELAY_PORT_8080_TCP_ADDR",
        "RELAY_METRICS_SERVICE_HOST",
    ],
)
def test_a_variable_of_somebody_else_is_no_mistake(
    monkeypatch: pytest.MonkeyPatch, read: Load, name: str
) -> None:
    monkeypatch.setenv(name, "x")
    assert read("group: a").group == "a"


def test_a_variable_that_a_secret_is_taken_from_is_no_mistake(
    monkeypatch: pytest.MonkeyPatch, read: Load
) -> None:
    monkeypatch.setenv("RELAY_SHOP_TOKEN", SECRET)
    monkeypatch.setenv("RELAY_SHOP_DSN", "host=shop")
    monkeypatch.setenv("RELAY_SOURCE__DSN__ENV", "RELAY_SHOP_DSN")
    settings = read(
        "handlers: {h: {type: http, url: 'http://h', headers: {a: {env: RELAY_SHOP_TOKEN}}}}"
    )
    assert settings.source_dsn.conninfo() == "host=shop"


def test_a_bad_dsn_in_the_environment_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAY_SOURCE__DSN", f"host=h password={SECRET} x")
    (line,) = refused_environment()
    assert line.startswith("environment: source.dsn: ")
    assert SECRET not in line


@pytest.mark.parametrize(
    ("name", "value", "text", "blamed"),
    [
        ("RELAY_PARTITIONS", "many", "partitions: 8", "environment: partitions"),
        ("RELAY_SOURCE__DSN", "no dsn", "source: {slot: relay}", "environment: source.dsn"),
        ("RELAY_SOURCE__SLOT", "Not-A-Slot", "source: {slot: a}", "environment: source.slot"),
        ("relay_partitions", "many", "partitions: 8", "environment: partitions"),
        (
            "RELAY_CONFIG",
            "shop.yaml",
            "routes: [{handlers: [h]}]",
            "shop.yaml: routes.0.handlers",
        ),
        ("RELAY_GROUP", "mine", "routes: [{handlers: [h]}]", "shop.yaml: routes.0.handlers"),
        ("RELAY_GROUP", "mine", "grou: x", "shop.yaml: grou"),
        ("RELAY_SOURCE__DSN", "host=h", "source: {dns: x}", "shop.yaml: source.dns"),
        ("RELAY_SOURCE__DSN", "host=h", "source: {slot: Not-A-Slot}", "shop.yaml: source.slot"),
        ("RELAYS_PARTITIONS", "x", "partitions: many", "shop.yaml: partitions"),
    ],
)
def test_of_the_environment_and_the_file_the_one_that_is_wrong_is_blamed(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, text: str, blamed: str
) -> None:
    monkeypatch.setenv(name, value)
    (line,) = refused(text)
    assert line.startswith(f"{blamed}: ")


def test_metrics_and_console_have_addresses_of_their_own(read: Load) -> None:
    observe = "observe: {listen: '127.0.0.1:%d', console: {listen: '127.0.0.1:9465', token: 0123456789abcdef}}"
    assert refused(observe % 9465) == [
        "shop.yaml: observe.console.listen: is the same as observe.listen: name another"
    ]
    assert read(observe % 9464).observe.observes


def test_a_secret_file_that_is_not_there_or_not_text_says_so(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(ValueError, match="cannot be read \\(No such file or directory\\)"):
        read_secret_file(str(file))
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        read_secret_file(str(file))
    file.write_bytes(b"a\0b")
    with pytest.raises(ValueError, match="has a NUL character"):
        read_secret_file(str(file))
    with pytest.raises(ValueError, match="has more than 1048576 bytes"):
        read_secret_file("/dev/zero")
