"""The HTTP API: who may read what, pages and streams of the log, and what has become of an event."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from psycopg.conninfo import make_conninfo

from relay.admin import tokens
from relay.api import callers, streams
from relay.config.settings import Settings
from relay.demo.embedded import free_port
from relay.faults import ConfigurationError
from relay.observe import api_counts
from tests.api import API, Program, Source, authorized, new_token, served, settings_of
from tests.clients import http_client
from tests.observing import Scrape, is_good
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.process import relay, running


@pytest.fixture
def settings(outbox: Outbox) -> Settings:
    return settings_of(outbox)


@pytest.fixture
def address(settings: Settings) -> Iterator[str]:
    with served(settings) as address:
        yield address


def number_of(found: Any) -> int:
    return int(found["payload"]["amount"])


_HOST = host(1)


def _remove(outbox: Outbox, which: str = "") -> None:
    """Remove events as retention does, which notes it."""
    outbox.conn.execute(
        "insert into relay.removed (outbox, newest, snapshot)"
        " select 'public.outbox_message_t', max(c_xid::text::bigint)::text::xid8, pg_current_snapshot()"
        " from outbox_message_t"
    )
    outbox.conn.execute(f"delete from outbox_message_t {which}".encode())


def publish_amounts(outbox: Outbox, *amounts: int, host_id: uuid.UUID = _HOST, **more: Any) -> None:
    outbox.publish(host_id, *(event(amount, **more) for amount in amounts))


def test_who_has_no_valid_token_is_refused(settings: Settings, address: str) -> None:
    """Without one, with a wrong, revoked or expired one, with a cookie; only the description is open."""
    token = new_token(settings)
    client = http_client(address)
    ok = client.get("/v1/events", headers=authorized(token))
    assert ok.status_code == 200
    assert ok.headers["cache-control"] == "no-store"
    for headers in (
        {},
        authorized("relay_wrong"),
        {"authorization": f"Basic {token}"},
        {"cookie": f"token={token}; relay_console={token}"},
    ):
        refused = client.get("/v1/events", headers=headers)
        assert refused.status_code == 401, headers
        assert refused.headers["content-type"] == "application/problem+json"
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["status"] == 401
    assert client.get(f"/v1/events?access_token={token}").status_code == 401
    assert client.get("/v1/openapi.json").json()["paths"].keys() >= {"/v1/events/stream"}
    tokens.revoke(settings, "reader", "it leaked")
    wait_until(lambda: client.get("/v1/events", headers=authorized(token)).status_code == 401, 10)


def test_a_token_that_expires_is_refused(outbox: Outbox, settings: Settings, address: str) -> None:
    token = new_token(settings)
    client = http_client(address, headers=authorized(token))
    assert client.get("/v1/events").status_code == 200
    outbox.conn.execute("update relay.api_tokens set expires_at = now() + interval '1 second'")
    wait_until(lambda: client.get("/v1/events").status_code == 401, 15)


def test_a_token_that_cannot_be_recorded_is_not_made(outbox: Outbox, settings: Settings) -> None:
    """Its name was taken, and nobody had seen it."""
    nowhere = {**outbox.config().get("target", {}), "dsn": "host=127.0.0.1 port=1"}
    away = outbox.settings(api=API, target=nowhere)
    with pytest.raises(ConfigurationError, match=r"target\.dsn"):
        tokens.create(away, "shop", ["read"], ["*"], ["*"], None, None)
    assert tokens.listed(settings) == []


@pytest.mark.parametrize(
    ("path", "detail"),
    [
        ("/v1/events?types=order.placed", "types: unknown parameter; did you mean type?"),
        ("/v1/events?event_type=a&limit=x", "event_type: unknown parameter; see /v1/openapi.json"),
        ("/v1/events/stream?limit=5", "limit: unknown parameter; see /v1/openapi.json"),
        (
            f"/v1/events/{host(1)}?{'x' * 99}=",
            f"{'x' * 50}: unknown parameter; see /v1/openapi.json",
        ),
    ],
)
def test_a_parameter_with_a_typo_is_refused_and_not_left_out(
    settings: Settings, address: str, path: str, detail: str
) -> None:
    """A filter that is left out would choose everything."""
    refused = httpx.get(address + path, headers=authorized(new_token(settings)))
    assert (refused.status_code, refused.json()["detail"]) == (422, detail)


def test_who_misses_the_path_or_the_method_is_told_where_they_are(
    settings: Settings, address: str
) -> None:
    token = authorized(new_token(settings))
    missed = httpx.get(f"{address}/v1/event", headers=token)
    assert (missed.status_code, missed.json()["detail"]) == (
        404,
        "there is no such path: see /v1/openapi.json",
    )
    wrong = httpx.put(f"{address}/v1/events", headers=token)
    assert wrong.json()["detail"] == "the path has no such method: see /v1/openapi.json"
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, POST")


def test_wrong_tokens_of_an_address_do_not_refuse_the_right_one(
    settings: Settings, address: str
) -> None:
    token = new_token(settings)
    client = http_client(address)
    refused = [
        client.get("/v1/events", headers=authorized(f"guess {number}")) for number in range(12)
    ]
    assert [each.status_code for each in refused] == [401] * 10 + [429] * 2
    assert int(refused[-1].headers["retry-after"]) > 0
    assert client.get("/v1/events", headers=authorized(token)).status_code == 200


def test_a_token_is_for_its_right_hosts_and_types(
    outbox: Outbox, settings: Settings, address: str
) -> None:
    """The same in pages, in streams and of one event: what it is not for does not exist."""
    publisher = new_token(settings, "publisher", rights=["publish"])
    refused = httpx.get(f"{address}/v1/events", headers=authorized(publisher))
    assert (refused.status_code, refused.json()["detail"]) == (
        403,
        "the token publisher gives no right to read",
    )
    token = new_token(settings, "narrow", hosts=[str(host(1))], types=["order.*", "x"])
    program = Program(address, token)
    with Source(address, token).ready() as source:
        publish_amounts(outbox, 1)
        publish_amounts(outbox, 2, host_id=host(2))
        publish_amounts(outbox, 3, event_type="card.charged")
        publish_amounts(outbox, 4, event_type="x")
        assert [number_of(each) for each in source.take(2)] == [1, 4]
    assert [number_of(each) for each in program.pages()] == [1, 4]
    assert [number_of(each) for each in program.pages(type="order.*")] == [1]
    assert program.pages(host=str(host(2))) == []
    ids = outbox.column("select id::text from outbox_message_t order by c_offset")
    answers = [program.client.get(f"/events/{each}") for each in [*ids, uuid.uuid4()]]
    assert [each.status_code for each in answers] == [200, 404, 404, 200, 404]
    assert len({each.text for each in answers if each.status_code == 404}) == 1


def test_an_event_is_as_it_was_published(outbox: Outbox, settings: Settings, address: str) -> None:
    """Every digit of its numbers, and line ends and other characters of its texts."""
    exact = '{"amount": 0.1000000000000000055511151231257827, "text": "a\\r\\nb\\u2028\\n\\nid: x"}'
    outbox.conn.execute(
        "select relay.publish(%s, null, jsonb_build_array(jsonb_build_object("
        "'event_type', 'a', 'aggregate_type', 'b', 'aggregate_id', 'c', 'payload', %s::jsonb)))",
        (host(1), exact),
    )
    token = new_token(settings)
    with Source(address, token, after="beginning") as source:
        (streamed,) = source.take(1)
    text = httpx.get(f"{address}/v1/events", headers=authorized(token)).text
    assert "0.1000000000000000055511151231257827" in text
    assert json.loads(text)["events"] == [streamed]
    assert streamed["payload"]["text"] == "a\r\nb\u2028\n\nid: x"
    row = outbox.conn.execute(
        "select id, host_id, transaction_id, event_ts, transaction_ordinal from outbox_message_t"
    ).fetchone()
    assert row is not None
    assert [streamed[key] for key in ("id", "host_id", "transaction_id")] == [*map(str, row[:3])]
    assert outbox.value("select %s::timestamptz", (streamed["event_ts"],)) == row[3]
    assert (streamed["transaction_ordinal"], streamed["user_id"]) == (1, None)


_FORGED = (
    *("x", "1", "1:2", "0:0:", "5:5:5", "5:6:7", "5:9:7,6", "6:9:7", "7:9:7,7", "5:4:"),
    *("1:1:~", "1:1:~1.1", "9:9:~9.1", "-1:1:", "1:1:~1.1x", "9" * 19 + ":1:", "1:" + "9" * 30),
    *("٣:٣:", "1:1:\x00", "a" * 20_000, "1;1;", "5:5:@1", "5:5:@1.1", "5:5:@1.1.x"),
)


def test_a_forged_position_is_refused(settings: Settings, address: str) -> None:
    headers = authorized(new_token(settings))
    for position in _FORGED:
        for path in ("/v1/events", "/v1/events/stream"):
            for given in (position, f"{position}@1.1.1"):
                refused = httpx.get(address + path, params={"after": given}, headers=headers)
                assert refused.status_code == 400, (given, refused.text)
                assert refused.headers["content-type"] == "application/problem+json"
        if position.isascii() and position.isprintable():
            more = {**headers, "last-event-id": position}
            assert httpx.get(address + path, headers=more).status_code == 400, position


def test_a_stream_resumes_within_a_transaction(
    outbox: Outbox, settings: Settings, address: str
) -> None:
    """Each id says what the client has, also in the middle; pages end there as well, and go on.

    electric-sql/electric#2869: messages before the mark of the end of a batch came twice.
    """
    token = new_token(settings)
    publish_amounts(outbox, 1, 2, 3)
    publish_amounts(outbox, 4, 5)
    found, last = [], ""
    for _ in range(5):
        with Source(address, token, last, **({} if last else {"after": "beginning"})) as source:
            found += source.take(1)[:1]
            last = source.last
    assert [number_of(each) for each in found] == [1, 2, 3, 4, 5]
    program = Program(address, token)
    for limit in (1, 2, 3, 100):
        assert [number_of(each) for each in program.pages(limit)] == [1, 2, 3, 4, 5]


def test_a_client_of_which_little_matches_does_not_fall_behind(
    outbox: Outbox, settings: Settings, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats have the position, which a browser remembers without an event."""
    monkeypatch.setattr(streams, "HEARTBEAT_SECONDS", 0.1)
    token = new_token(settings)
    with Source(address, token, type="other").ready() as source:
        before = source.last
        publish_amounts(outbox, 1)
        while source.last == before:
            source.block()
        last = source.last
    with Source(address, token, last) as source:
        publish_amounts(outbox, 2)
        assert [number_of(each) for each in source.take(1)] == [2]


def test_a_stream_that_is_too_far_behind_is_told_to_read_pages(outbox: Outbox) -> None:
    settings = settings_of(outbox, replay=10)
    with served(settings) as address:
        token = new_token(settings)
        for number in range(11):
            publish_amounts(outbox, number)
        with Source(address, token, after="beginning") as source:
            assert source.status == 204
        page = Program(address, token).get("/events", limit=1)
        with Source(address, token, page["next"]) as source:
            assert len(source.take(10)) == 10


def test_removed_events_are_no_silent_gap(
    outbox: Outbox, settings: Settings, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A position before them is gone; one after them is not."""
    token = new_token(settings)
    publish_amounts(outbox, 1)
    program = Program(address, token)
    before = program.get("/events", after="now")["next"]
    publish_amounts(outbox, 2)
    after = program.get("/events", after="now")["next"]
    _remove(outbox)
    publish_amounts(outbox, 3)
    for path in ("/events", "/events/stream"):
        gone = program.client.get(path, params={"after": before})
        assert gone.status_code == 410
        assert gone.headers["content-type"] == "application/problem+json"
    assert [number_of(each) for each in program.get("/events", after=after)["events"]] == [3]
    with Source(address, token, after) as source:
        assert [number_of(each) for each in source.take(1)] == [3]


def test_a_transaction_of_which_a_part_is_removed_is_no_silent_gap(
    outbox: Outbox, settings: Settings, address: str
) -> None:
    """A position within it is gone; one after it is not."""
    token = new_token(settings)
    program = Program(address, token)
    publish_amounts(outbox, 0, 1, 2, 3)
    within = program.get("/events", after="beginning", limit=1)["next"]
    after = program.get("/events", after="beginning")["next"]
    _remove(outbox, "where transaction_ordinal <= 2")
    publish_amounts(outbox, 9)
    for path in ("/events", "/events/stream"):
        assert program.client.get(path, params={"after": within}).status_code == 410
    assert [number_of(each) for each in program.get("/events", after=after)["events"]] == [9]


def test_streams_are_bounded(outbox: Outbox) -> None:
    """In all, and of one token; who has closed one gets another."""
    settings = settings_of(outbox, streams=3, streams_per_token=2)
    with served(settings) as address:
        one, other = new_token(settings, "one"), new_token(settings, "other")
        with Source(address, one).ready(), Source(address, one).ready():
            with Source(address, one) as third:
                assert third.status == 429
            with Source(address, other).ready(), Source(address, other) as fourth:
                assert fourth.status == 503
                assert Program(address, one).get("/events")["events"] == []

        def opens() -> bool:
            with Source(address, one) as again:
                return again.status == 200

        wait_until(opens)


def test_the_streams_of_a_revoked_token_end(
    outbox: Outbox, settings: Settings, address: str
) -> None:
    """Those of another one go on."""
    token = new_token(settings)
    with (
        Source(address, token).ready() as source,
        Source(address, new_token(settings, "other")).ready() as other,
    ):
        tokens.revoke(settings, "reader")
        source.until_the_end()
        with Source(address, token, source.last) as again:
            assert again.status == 401
        publish_amounts(outbox, 1)
        assert [number_of(each) for each in other.take(1)] == [1]


def test_a_client_that_takes_nothing_is_cut_and_resumes(
    outbox: Outbox, settings: Settings, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buffer is bounded; another client is not concerned."""
    monkeypatch.setattr(streams, "BUFFER_BYTES", 100_000)
    token = new_token(settings)
    with Source(address, token).ready() as slow, Source(address, token).ready() as quick:
        reading = Thread(target=quick.take, args=(400,))
        reading.start()
        for number in range(400):
            publish_amounts(outbox, number, payload={"amount": number, "note": "x" * 50_000})
        reading.join(60)
        assert [number_of(each) for each in quick.events] == list(range(400))
        slow.until_the_end()
        got = [number_of(each) for each in slow.events]
        assert got == list(range(len(got)))
        assert len(got) < 400
    with Source(address, token, slow.last) as again:
        assert [number_of(each) for each in again.take(400 - len(got))] == list(
            range(len(got), 400)
        )


def test_what_the_api_counts_is_in_a_scrape(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metrics of a service in the same process have it, as long as the API is served."""
    monkeypatch.setattr(streams, "CHECK_SECONDS", 0.1)
    port = free_port()
    observed = outbox.settings(api=API, observe={"listen": f"127.0.0.1:{port}"})

    def value(name: str, **labels: str) -> float | None:
        return Scrape(port).value(f"relay_api_{name}", group="default", **labels)

    with relaying(observed):
        wait_until(lambda: is_good(port, "/livez"))
        with served(observed) as address:
            one, other = new_token(observed, "one"), new_token(observed, "other")
            publisher = new_token(observed, "shop", ["publish"])
            wait_until(lambda: value("streams") is not None)
            for name in ("streams", "events_sent_total", "published_total"):
                assert value(name) == 0, name
            assert value("streams_cut_total", reason="revoked") == 0
            with Source(address, one).ready() as first, Source(address, other).ready() as second:
                assert value("streams") == 2
                publish_amounts(outbox, 1, 2)
                document = {"host_id": str(_HOST), "event_type": "order.placed", "payload": {}}
                for _ in range(2):
                    answer = httpx.post(
                        f"{address}/v1/events",
                        json={**document, "id": str(uuid.UUID(int=7))},
                        headers=authorized(publisher),
                        timeout=30,
                    )
                    assert answer.status_code in (200, 202), answer.text
                first.take(3)
                second.take(3)
                assert value("events_sent_total") == 6
                assert value("published_total") == 1
                tokens.revoke(observed, "one")
                first.until_the_end()
                wait_until(lambda: value("streams_cut_total", reason="revoked") == 1)
                assert value("streams") == 1
            wait_until(lambda: value("streams") == 0)
            assert value("streams_cut_total", reason="slow") == 0
        assert value("streams") is None


def test_the_state_of_an_event_has_no_payload(outbox: Outbox, tmp_path: Path) -> None:
    """Passed, and dead with the kind of fault alone."""
    settings = settings_of(outbox)
    publish_amounts(outbox, 1)
    publish_amounts(outbox, -7)
    with relaying(settings):
        outbox.wait_handled()
    ids = outbox.column("select id::text from outbox_message_t order by c_offset")
    with served(settings) as address:
        program = Program(address, new_token(settings))
        applied, dead = (program.get(f"/events/{each}") for each in ids)
    assert [each["state"] for each in applied["states"]] == ["passed"]
    (state,) = dead["states"]
    assert (state["state"], state["reason"]) == ("dead", "CheckViolation [23514]")
    assert "-7" not in json.dumps(dead["states"])


def test_commands_make_list_and_revoke_tokens(outbox: Outbox, tmp_path: Path) -> None:
    """The token is printed once; what was done is recorded."""
    config = str(outbox.config_file(tmp_path / "relay.yaml"))
    made = relay(
        *("token", "create", "billing", "--right", "read", "--type", "order.*", "--config", config),
        *("--expires", "90d", "--host", str(host(1)).upper(), "--reason", "invoices"),
    )
    token = made.stdout.strip()
    assert len(token) >= 43
    (listed,) = json.loads(relay("token", "list", "--json", "--config", config).stdout)
    assert (listed["rights"], listed["hosts"]) == (["read"], [str(host(1))])
    assert (listed["types"], listed["revoked_at"]) == (["order.*"], None)
    assert token not in json.dumps(listed)
    for arguments, words in (
        (("create", "billing"), "there is a token 'billing'"),
        (("create", "b", "--right", "write"), "'write' is no right"),
        (("create", "b", "--host", "x"), "'x' is no host"),
        (("create", "b", "--expires", "soon"), "--expires: must be"),
        (("create", ""), "the name of a token has"),
        (("revoke", "b", "--yes"), "there is no token 'b' (tokens: billing)"),
    ):
        refused = relay("token", *arguments, "--config", config)
        assert refused.returncode != 0
        assert words in refused.stderr
    assert relay("token", "revoke", "billing", "--yes", "--config", config).returncode == 0
    again = relay("token", "create", "billing", "--config", config)
    assert again.returncode == 0
    assert outbox.column("select action || ' ' || coalesce(reason, '-') from relay.actions") == [
        "token create invoices",
        "token revoke -",
        "token create -",
    ]
    assert token not in str(outbox.column("select t::text from relay.api_tokens as t"))


def test_relay_api_serves_alone_and_run_beside_relay(outbox: Outbox, tmp_path: Path) -> None:
    """No token, payload or path with a token is in a log."""
    settings = settings_of(outbox)
    token = new_token(settings)
    port = free_port()
    for command in ("api", "run"):
        config = outbox.config_file(
            tmp_path / f"{command}.yaml", api=API, observe={"listen": f"127.0.0.1:{port}"}
        )
        with running(config, command=command) as process:
            process.wait_said("the API is served")
            (said,) = [each for each in process.lines() if "the API is served" in each["message"]]
            address = f"http://{said['address']}"
            publish_amounts(
                outbox, 5, event_type="secret.thing", payload={"amount": 5, "word": "hush"}
            )
            with Source(address, token, after="beginning", access_token=token) as source:
                assert number_of(source.take(1)[0]) == 5
            if command == "run":
                wait_until(lambda: is_good(port, "/livez"))
                # The address answers before the group begins.
                wait_until(lambda: (Scrape(port).value("relay_api_events_sent_total") or 0) > 0)
            assert httpx.get(f"{address}/v1/events?access_token={token}").status_code == 401
            assert process.terminate() == 0
        text = config.with_suffix(".log").read_text()
        assert token not in text
        assert "hush" not in text
    none = relay("api", "--config", str(outbox.config_file(tmp_path / "none.yaml")))
    assert "api: is not configured" in none.stderr


def test_two_processes_serve_one_client(outbox: Outbox, settings: Settings) -> None:
    """A client that goes from one to the other gets each event once, however far either is."""
    token = new_token(settings)
    with served(settings) as one, served(settings) as other:
        found, last = [], ""
        with Source(one, token).ready() as source:
            last = source.last
        for number in range(30):
            publish_amounts(outbox, number)
            with Source((one, other)[number % 2], token, last) as source:
                found += source.take(1)
                last = source.last
    assert [number_of(each) for each in found] == list(range(30))


def test_a_path_with_a_slash_too_many_is_not_redirected(settings: Settings, address: str) -> None:
    """Behind a proxy for TLS the redirect would lead a client with its token to plain HTTP."""
    answer = httpx.get(f"{address}/v1/events/", headers=authorized(new_token(settings)))
    assert answer.status_code == 404


def test_an_outage_is_logged_once(
    outbox: Outbox, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients are told 503; an operator reads why, however many ask. A fault that concerns nobody any more is none."""
    away = make_conninfo(outbox.relay_dsn, dbname=f"{outbox.slot}_away")
    of_source = {"dsn": away, "slot": outbox.slot, "publication": outbox.slot}
    with served(outbox.settings(api={**API}, source=of_source)) as address:
        for _ in range(5):
            answer = httpx.get(f"{address}/v1/events", headers=authorized("relay_x"), timeout=30)
            assert answer.status_code == 503
            assert "_away" not in answer.text, "no client has to know of the database"
        counts = api_counts.of("default")
        assert counts is not None
        assert counts.requests["5xx"] == 5
        assert counts.failing == {"tokens": True, "streams": False, "publishing": False}
        monkeypatch.setattr(callers, "_STALE_SECONDS", 0.0)
        counts = api_counts.of("default")
        assert counts is not None
        assert not counts.failing["tokens"]
    assert sum("cannot read its tokens" in each.getMessage() for each in caplog.records) == 1
