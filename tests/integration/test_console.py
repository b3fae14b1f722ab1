"""The console and its API against a real database: who may, what they see, what they do."""

from __future__ import annotations

import ctypes
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import httpx
import pytest
from psycopg.types.json import Jsonb

from relay.client.saga import Context, saga
from relay.client.worker import Message, Worker
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.schedules.ticking import Ticker
from tests.clients import http_client
from tests.console import TOKEN, Program, Visitor, console_of, served
from tests.outbox import Outbox, event, host, relaying, wait_until
from tests.process import relay, running
from tests.webhook import Answer, Webhook
from tests.workers import working

G = "/groups/default"


@pytest.fixture
def settings(outbox: Outbox) -> Settings:
    """A group whose projection refuses negative amounts."""
    return outbox.settings(observe=console_of())


@pytest.fixture
def address(settings: Settings) -> Iterator[str]:
    """Where its console is."""
    with served(settings) as found:
        yield found


def with_hook(outbox: Outbox, url: str, **more: Any) -> Settings:
    """A group with a sink `hook` beside the projection."""
    handlers = outbox.config()["handlers"] | {"hook": {"type": "http", "url": url}}
    settings = outbox.settings(
        handlers=handlers,
        routes=[{"handlers": ["projection", "hook"]}],
        observe=console_of(),
        **more,
    )
    outbox.install_again(settings)
    return settings


def kill_some(outbox: Outbox, settings: Settings, count: int = 1, **payload: Any) -> list[int]:
    """Let transactions die of a negative amount; returns their dead letters."""
    for number in range(count):
        outbox.publish(host(number), event(-1, payload={"amount": -1, **payload}))
    with relaying(settings):
        wait_until(lambda: outbox.value("select count(*) from relay.dead_letter_queue") >= count)
    return outbox.column("select id from relay.dead_letter_queue order by id")


def acted(outbox: Outbox) -> list[tuple[Any, ...]]:
    """What was done to the group: sink, action, reason, operator."""
    return outbox.conn.execute(
        "select sink, action, reason, operator from relay.actions order by id"
    ).fetchall()


def test_nobody_gets_in_without_the_token(settings: Settings, address: str) -> None:
    """Every page and resource is refused, but for the login and what a browser needs to show it."""
    from relay.console.app import create_app

    client = http_client(address)
    assert settings.observe.console is not None
    app = create_app([settings], settings.observe.console)
    paths = [
        (
            method,
            re.sub(r"\{(id)(:\w+)?\}", "1", re.sub(r"\{group(:\w+)?\}", "default", route.path)),
        )
        for router in app.routes
        for route in getattr(getattr(router, "original_router", None), "routes", [router])
        for method in getattr(route, "methods", None) or ()
    ]
    assert len(paths) > 40
    for method, path in paths:
        if path == "/login":
            continue
        answer = client.request(method, path)
        if path.startswith("/api/"):
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert answer.json()["status"] == 401
        else:
            assert answer.status_code == 303, (method, path)
            assert answer.headers["location"].startswith("/login?next=")
    for token in ("x", "wrong", TOKEN + "x", "é"):
        header = f"Bearer {token}".encode()
        refused = client.get("/api/v1/groups", headers={b"authorization": header})
        assert refused.status_code == 401
    assert Visitor(address, token="wrong").login.status_code == 401
    assert Visitor(address, name=" ").login.status_code == 401
    forged = client.get("/", headers={"cookie": "relay_console=eyJuYW1lIjoieCJ9.AAAA"})
    assert forged.status_code == 303
    assert client.get("/static/console.css").status_code == 200
    assert client.get("/static/../app.py").status_code in (303, 404)


def test_a_browser_may_load_and_run_nothing_from_elsewhere(address: str) -> None:
    """Each answer has the policy, and no page has a script or a style of its own."""
    visitor = Visitor(address)
    for path in (
        "/",
        f"{G}/sinks",
        f"{G}/dead-letters",
        f"{G}/partitions",
        "/nowhere",
        "/static/console.js",
    ):
        answer = visitor.client.get(path)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
        assert answer.headers["cache-control"] == "no-store"
        assert not re.search(
            r"<style|\sstyle=|<script(?! src=\"/static)|\son\w+=|https?://", answer.text
        )
    cookie = visitor.login.history[0].headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie


def test_other_sites_cannot_act(outbox: Outbox, address: str) -> None:
    """A form of another site is refused, also one that knows everything but the session's own token."""
    visitor = Visitor(address)
    path, fields = f"{G}/dead-letters/discard", {"reason": "x"}
    assert visitor.client.post(path, data=fields).status_code == 403
    assert visitor.client.post(path, data={**fields, "form_token": "guess"}).status_code == 403
    other = Visitor(address, name="other")
    token = re.search(r'form_token" value="([^"]+)"', other.page("/"))
    assert token is not None
    theirs = visitor.client.post(path, data={**fields, "form_token": token[1]})
    assert theirs.status_code == 403
    for headers in (
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://["},
    ):
        assert visitor.client.post(path, data=fields, headers=headers).status_code == 403
        login = visitor.client.post("/login", data={"name": "x", "token": TOKEN}, headers=headers)
        assert login.status_code == 403
        program = Program(address, **headers)
        assert program.client.post("/sinks/x/pause", json={"reason": "x"}).status_code == 403
    # A browser's login is none for the API, and a form is no request of a program.
    cookie = visitor.client.post(
        "/api/v1/groups/default/deferred/run", json={"reason": "x", "all": True}
    )
    assert cookie.status_code == 401
    form = Program(address).client.post("/deferred/run", data={"reason": "x"})
    assert form.status_code == 415
    assert acted(outbox) == []


def test_who_guesses_tokens_has_to_wait_and_locks_out_nobody(address: str) -> None:
    """After ten wrong tokens an address is refused for a while, but the right token of that address is not."""
    client = http_client(address)
    answers = [
        client.get("/api/v1/groups", headers={"authorization": f"Bearer {number}"})
        for number in range(11)
    ]
    assert [each.status_code for each in answers] == [401] * 10 + [429]
    assert int(answers[-1].headers["retry-after"]) > 0
    assert client.post("/login", data={"name": "eve", "token": "guess"}).status_code == 429
    right = client.get("/api/v1/groups", headers={"authorization": f"Bearer {TOKEN}"})
    assert right.status_code == 200
    assert client.post("/login", data={"name": "anna", "token": TOKEN}).status_code == 303


def test_a_proxy_says_who_it_is(outbox: Outbox) -> None:
    """Its header counts alone where there is no token, and otherwise only with the token."""
    header = {"x-forwarded-user": "bea"}
    alone = outbox.settings(
        observe={"console": {"listen": "127.0.0.1:0", "user_header": "X-Forwarded-User"}}
    )
    with served(alone) as address:
        assert httpx.get(address + G + "/").status_code == 401
        assert httpx.get(address + "/login").status_code == 404
        page = httpx.get(address + G + "/", headers=header)
        assert page.status_code == 200
        assert "bea" in page.text
        refused = httpx.post(address + f"{G}/deferred/run", data={"reason": "x"}, headers=header)
        assert refused.status_code == 403
    both = outbox.settings(observe=console_of(user_header="X-Forwarded-User"))
    with served(both) as address:
        assert httpx.get(address + G + "/", headers=header).status_code == 303
        with_token = httpx.get(
            address + G + "/", headers={**header, "authorization": f"Bearer {TOKEN}"}
        )
        assert "bea" in with_token.text


def test_what_a_payload_holds_is_text(outbox: Outbox, settings: Settings, address: str) -> None:
    """Scripts in a payload, an exception or a search are shown, and not run."""
    (dead_letter,) = kill_some(outbox, settings, note="</pre><script>alert(1)</script>")
    outbox.conn.execute(
        "update relay.dead_letter_queue set exception = '<img src=x onerror=alert(2)>: x', handler = '<b>h</b>'"
    )
    visitor = Visitor(address, name="<i>anna</i>")
    page = visitor.page(f"{G}/dead-letter?id={dead_letter}")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    for path in (
        f"{G}/dead-letter?id={dead_letter}",
        f"{G}/dead-letters",
        f"{G}/dead-letters?exception=<script>x",
    ):
        page = visitor.page(path)
        assert not re.search(r"<script>|<img|<b>h|<i>anna", page)
    saved = visitor.client.get(f"{G}/dead-letter/payload?id={dead_letter}")
    assert saved.headers["content-type"] == "application/json"
    assert saved.headers["content-disposition"].startswith("attachment")
    assert saved.json()["note"].startswith("</pre>")


def test_a_dead_letter_is_edited_and_replayed(
    outbox: Outbox, settings: Settings, address: str
) -> None:
    """In the pages: found by its fault, mended, applied; each step says who did it, and why."""
    first, second = kill_some(outbox, settings, 2)
    visitor = Visitor(address)
    found = visitor.page(f"{G}/dead-letters?kind=CheckViolation+[23514]&handler=projection")
    assert f"dead-letter?id={first}" in found
    assert f"dead-letter?id={first}" not in visitor.page(
        f"{G}/dead-letters?exception=nothing+like+it"
    )
    refused = visitor.send(f"{G}/dead-letter/edit", id=str(first), payload="{", reason="a digit")
    assert refused.status_code == 409
    assert "is not JSON" in refused.text
    no_reason = visitor.send(f"{G}/dead-letter/edit", id=str(first), payload="{}", reason=" ")
    assert no_reason.status_code == 409
    edited = visitor.send(
        f"{G}/dead-letter/edit",
        id=str(first),
        payload='{"amount": 12345678901234567890.25}',
        reason="a digit",
    )
    assert "has the new payload" in edited.text
    assert "Payload as published" in edited.text
    replayed = visitor.send(f"{G}/dead-letters/replay?ids={first}", reason="mended")
    assert "1 transaction is queued" in replayed.text
    assert "is running: they are applied when one starts" in replayed.text
    discarded = visitor.send(f"{G}/dead-letters/discard?ids={second}", reason="a test's")
    assert "1 transaction is discarded" in discarded.text
    with relaying(settings):
        wait_until(lambda: outbox.value("select count(*) from projection") == 1)
    assert str(outbox.value("select amount from projection")) == "12345678901234567890.25"
    assert outbox.column("select status from relay.dead_letter_queue order by id") == [
        "replayed",
        "discarded",
    ]
    done = outbox.conn.execute(
        "select action, reason, operator, acted_by = 'app_relay' from relay.dead_letter_actions order by id"
    ).fetchall()
    assert done == [
        ("edit", "a digit", "anna", True),
        ("replay", "mended", "anna", True),
        ("discard", "a test's", "anna", True),
        ("replayed", None, None, True),
    ]
    log = visitor.page(f"{G}/actions?about=dead-letters")
    assert "mended" in log
    assert "anna (as " in log


def test_a_sink_is_paused_moved_and_resumed(
    outbox: Outbox, caplog: pytest.LogCaptureFixture
) -> None:
    """In the pages, while relay runs: nothing arrives, then what was published, then all of it again."""
    caplog.set_level("INFO", "relay")
    with Webhook() as hook:
        settings = with_hook(outbox, hook.url)
        with served(settings) as address, relaying(settings):
            outbox.publish(host(1), event())
            wait_until(lambda: len(hook.requests) == 1)
            visitor = Visitor(address)
            visitor.send(f"{G}/sink/pause", name="hook", reason="maintenance")
            wait_until(
                lambda: outbox.value("select paused_by from relay.sinks") == "anna (as app_relay)"
            )
            wait_until(lambda: "a sink is paused" in caplog.text)
            outbox.publish(host(1), event())
            outbox.wait_handled()
            page = visitor.page(f"{G}/sink?name=hook")
            assert '<p class="big" id="unread">1</p>' in page
            assert "by anna (as app_relay): maintenance" in page
            assert len(hook.requests) == 1
            visitor.send(f"{G}/sink/resume", name="hook", reason="over")
            wait_until(lambda: len(hook.requests) == 2)
            asked = visitor.page(f"{G}/sink/rebuild?name=hook&from=beginning")
            assert "Sink hook goes on with the oldest event." in asked
            visitor.send(
                f"{G}/sink/rebuild", name="hook", **{"from": "beginning"}, reason="lost it"
            )
            wait_until(lambda: len(hook.requests) == 4)
            refused = visitor.send(f"{G}/sink/seek", name="hook", to="0/1", reason="x")
            assert refused.status_code == 409
            assert "is a position in the WAL" in refused.text
            gone = visitor.send(f"{G}/sink/drop", name="hook", reason="x")
            assert "is configured: take it out first" in gone.text
            running_group = visitor.client.get(f"{G}/partitions/seek?to=beginning")
            assert running_group.status_code == 409
            assert "A running group cannot be moved" in visitor.page(f"{G}/partitions")
    assert acted(outbox) == [
        ("hook", "sink pause", "maintenance", "anna"),
        ("hook", "sink resume", "over", "anna"),
        ("hook", "sink rebuild", "lost it", "anna"),
    ]


def test_endpoints_that_data_choose_are_disabled_and_enabled(outbox: Outbox) -> None:
    """By the page of their sink and by the API; an endpoint is given by its URL or its id."""
    settings = with_hook(outbox, "http://hooks.example/{host_id}/secret")
    url = "http://hooks.example/1/secret"
    with served(settings) as address:
        api, visitor = Program(address), Visitor(address)
        assert api.get("/sinks/hook/endpoints") == []
        visitor.send(f"{G}/endpoint/disable", name="hook", endpoint=url, reason="abuse")
        (row,) = api.get("/sinks/hook/endpoints")
        assert (row["address"], row["disabled_by"]) == (
            "http://hooks.example",
            "anna (as app_relay)",
        )
        page = visitor.page(f"{G}/sink?name=hook")
        assert row["endpoint"] in page
        assert "by anna (as app_relay): abuse" in page
        assert "hooks.example/1" not in page
        again = {"reason": "repaired", "endpoint": row["endpoint"]}
        assert api.post("/sinks/hook/endpoints/enable", **again) == {"changed": True}
        assert api.post("/sinks/hook/endpoints/enable", **again) == {"changed": False}
        assert api.post("/sinks/hook/endpoints/disable", **again) == {"changed": True}
        assert api.post("/sinks/hook/endpoints/hold", **again) == {"changed": True}
        assert "paused" in visitor.page(f"{G}/sink?name=hook")
        visitor.send(f"{G}/endpoint/enable", name="hook", endpoint=row["endpoint"], reason="y")
        assert api.get("/sinks/hook/endpoints")[0]["disabled_at"] is None
        visitor.send(f"{G}/endpoint/pause", name="hook", endpoint=row["endpoint"], reason="z")
        assert api.get("/sinks/hook/endpoints")[0]["waits"]
    assert [action for _, action, _, _ in acted(outbox)] == [
        *("endpoint disable", "endpoint enable", "endpoint disable", "endpoint pause"),
        *("endpoint enable", "endpoint pause"),
    ]


def test_work_queues(outbox: Outbox) -> None:
    """Their pages show what is in them; one is paused, its dead letters are replayed or discarded, also by the API."""
    outbox.worker.execute("select relay.declare_queue('a/b <i>', null)")
    outbox.worker.execute(
        "select relay.enqueue('a/b <i>', '{}', event_id => n) from unnest('{e1,e2}'::text[]) as n"
    )
    outbox.worker.execute(
        "select relay.fail('a/b <i>', id, 1, 'no address') from relay.claim('a/b <i>')"
    )
    name = "a/b <i>"
    with served(outbox.settings(observe=console_of())) as address:
        api, visitor = Program(address), Visitor(address)
        (figures,) = api.get("/queues")
        assert (figures["queue"], figures["ready"], figures["dead"]) == (name, 1, 1)
        assert "a/b &lt;i&gt;" in visitor.page(f"{G}/queues")
        page = visitor.page(f"{G}/queue?name=a/b%20%3Ci%3E&state=dead")
        assert "no address" in page
        assert "e1" in page
        assert "e2" not in page
        visitor.send(f"{G}/queue/pause", name=name, reason="rest")
        assert outbox.worker.column("select event_id from relay.take('a/b <i>')") == []
        path = "/queues/a%2Fb%20%3Ci%3E"
        assert api.post(f"{path}/resume") == {"changed": True}
        assert api.post(f"{path}/resume") == {"changed": False}
        items = api.get(f"{path}/messages", state="enqueued")["items"]
        assert [each["event_id"] for each in items] == ["e2"]
        sent = visitor.send(f"{G}/dead-letters/replay?sink=queue:{name}", reason="mended")
        assert "1 message is in the queue again" in sent.text
        assert api.post(f"{path}/replay") == {"messages": 0}
        assert visitor.client.get(f"{G}/queue?name=other").status_code == 404
        assert outbox.worker.column("select event_id from relay.take('a/b <i>', 2)") == ["e2", "e1"]
        outbox.worker.execute("select relay.enqueue('a/b <i>', '{}') from generate_series(1, 3)")
        first, *_ = outbox.worker.column(
            "select c.id from relay.claim('a/b <i>', 3) as c where relay.fail('a/b <i>', c.id, c.attempt)"
        )
        unmeant = api.client.post(f"{path}/discard", json={"reason": "wrong address"})
        assert (unmeant.status_code, unmeant.json()["detail"].partition(":")[0]) == (409, "ids")
        assert api.post(f"{path}/discard", ids=[first, 999]) == {"messages": 1}
        assert "Discard 2 dead letters" in visitor.page(f"{G}/queue/discard?name=a%2Fb%20%3Ci%3E")
        sent = visitor.send(f"{G}/dead-letters/discard?sink=queue:{name}", reason="no use")
        assert "2 messages are discarded" in sent.text
        assert api.post(f"{path}/discard", all=True) == {"messages": 0}
        assert visitor.client.get(f"{G}/queue/discard?name=other").status_code == 404
        assert outbox.value("select count(*) from relay.queue_dead_letters") == 0
        outbox.worker.execute("select relay.enqueue('a/b <i>', '{}') from generate_series(1, 2)")
        outbox.worker.execute("select relay.fail('a/b <i>', id, 1) from relay.claim('a/b <i>')")
        assert api.post(f"{path}/rebuild", dry_run=True) == {
            **{"begins": "with the oldest event", "messages": 1, "dead": 1, "done": False}
        }
        unclear = api.client.post(f"{path}/rebuild", json={"reason": "x", "from": "noon"})
        assert (unclear.status_code, unclear.json()["detail"][:12]) == (409, "from: 'noon'")
        wanted = "select count(*) from relay.queue_fills where purges and start = %s"
        assert outbox.value(wanted, ["beginning"]) == 0
        page = visitor.page(f"{G}/queue/rebuild?name=a/b%20%3Ci%3E&from=beginning")
        assert "1 message and 1 dead letter are deleted" in page
        sent = visitor.send(
            f"{G}/queue/rebuild", name=name, **{"from": "beginning"}, reason="a fault"
        )
        assert "is filled again, beginning with the oldest event" in sent.text
        assert outbox.value(wanted, ["beginning"]) == 1
        assert api.post(f"{path}/rebuild", **{"from": "1"})["done"] is True
        assert outbox.value(wanted, ["1"]) == 1
        assert visitor.client.get(f"{G}/queue/rebuild?name=other&from=beginning").status_code == 404
    assert [action for _, action, _, _ in acted(outbox)] == [
        *("queue pause", "queue resume", "queue rebuild", "queue rebuild"),
    ]


def test_sagas(outbox: Outbox) -> None:
    """Their pages list them by state and show what has happened; a step is skipped, one given up, also by the API."""

    def run(ctx: Context, event: Message) -> None:
        ctx.step("one", lambda step: {"by": "<i>"})
        ctx.wait("b")

    of = saga("orders", starts="a", waits="b", key="host")(run)
    statement, text = of.queue.declaration()
    outbox.worker.execute(statement.with_parameter("%s").encode(), (text,))
    begin = "select relay.enqueue('orders', '{}', 'a', %s)"
    for number in (1, 2):
        outbox.worker.execute(begin, (str(host(number)),))
    waiting = "select id from relay.sagas where state = 'waiting' order by id"
    with working(Worker(outbox.worker_dsn, of, poll=0.05)):
        wait_until(lambda: len(outbox.column(waiting)) == 2)
    first, second = outbox.column(waiting)
    outbox.conn.execute(
        "update relay.sagas set state = 'stuck', step = 'one', error = 'undo of step one: no' where id = %s",
        (first,),
    )
    with served(outbox.settings(observe=console_of())) as address:
        api, visitor = Program(address), Visitor(address)
        found = api.get("/sagas", limit=1)
        assert ([each["id"] for each in found["rows"]], found["next"]) == ([first], first)
        found = api.get("/sagas", limit=1, after=first)
        assert ([each["id"] for each in found["rows"]], found["next"]) == ([second], None)
        assert [each["id"] for each in api.get("/sagas", state="stuck")["rows"]] == [first]
        assert api.get("/sagas", version=2)["rows"] == []
        assert api.client.get("/sagas", params={"state": "lost"}).status_code == 422
        shown = api.get(f"/sagas/{first}", limit=2)
        assert [each["kind"] for each in shown["entries"]] == ["event", "step"]
        assert shown["next"] == 2
        assert api.get(f"/sagas/{first}", after=2)["next"] is None
        assert api.client.get("/sagas/99").status_code == 404
        listed = visitor.page(f"{G}/sagas?state=stuck")
        assert "undo of step one: no" in listed
        assert f"name={second}" not in listed
        page = visitor.page(f"{G}/saga?name={first}")
        assert "&lt;i&gt;" in page
        assert "Give up" in page
        # The result of a step that is skipped need not be given.
        done = visitor.send(f"{G}/saga/skip", name=str(first), result="", reason="by hand")
        assert f"Saga {first} is undoing." in done.text
        asked = visitor.page(f"{G}/saga/give-up?name={first}")
        assert f"Saga {first} of orders, with the key " in asked
        assert "is given_up then." in asked
        visitor.send(f"{G}/saga/give-up", name=str(first), reason="enough")
        assert "Give up" not in visitor.page(f"{G}/saga?name={first}")
        assert visitor.send(f"{G}/saga/undo", name=str(first), reason="x").status_code == 409
        assert visitor.client.get(f"{G}/saga?name=99").status_code == 404
        assert api.post(f"/sagas/{second}/undo") == {"changed": True}
    assert [(action, who) for _, action, _, who in acted(outbox)] == [
        ("saga skip", "anna"),
        ("saga give-up", "anna"),
        ("saga undo", "robot"),
    ]


def test_schedules(outbox: Outbox) -> None:
    """Their pages show the last and the next times; a schedule is paused, resumed and run, there and by the API."""
    name, first = "a/b <i>", "a"
    publish = {"event_type": "cron.often", "host_id": str(host(1)), "payload": {}}
    outbox.conn.execute(
        "select relay.declare_schedule(name, %s, cron => cron, timezone => 'Europe/Paris') "
        "from (values ('a/b <i>', '0 3 * * *'), ('a', '61 * * * *')) as v (name, cron)",
        [Jsonb(publish)],
    )
    settings = outbox.settings(observe=console_of())
    ticker = Ticker(settings)
    ticker.turn()
    ticker.release()
    with served(settings) as address:
        api, visitor = Program(address), Visitor(address)
        found = api.get("/schedules", limit=1)
        assert ([each["name"] for each in found["rows"]], found["next"]) == ([first], first)
        found = api.get("/schedules", limit=1, after=first)
        assert ([each["name"] for each in found["rows"]], found["next"]) == ([name], None)
        listed = visitor.page(f"{G}/schedules?limit=1")
        assert "stands still" in listed
        assert "a/b &lt;i&gt;" not in listed
        assert "a/b &lt;i&gt;" in visitor.page(f"{G}/schedules?after={first}")
        assert "61" in visitor.page(f"{G}/schedule?name={first}")
        path, page = "/schedules/a%2Fb%20%3Ci%3E", f"{G}/schedule?name=a/b%20%3Ci%3E"
        times = api.get(f"{path}/times")["next"]
        assert len(times) == 10
        shown = visitor.page(page)
        for each in times:
            local = datetime.fromisoformat(each).astimezone(ZoneInfo("Europe/Paris"))
            assert f"{local:%Y-%m-%d 03:00:00 %Z}" in shown
        done = visitor.send(f"{G}/schedule/pause", name=name, reason="rest")
        assert "is paused." in done.text
        assert "Resume" in done.text
        assert api.get("/status")["status"]["schedules"][1]["is_paused"]
        assert api.post(f"{path}/pause") == {"changed": False}
        assert api.post(f"{path}/resume") == {"changed": True}
        published = api.post(f"{path}/run-now")["event_id"]
        done = visitor.send(f"{G}/schedule/run-now", name=name, reason="now")
        found = outbox.column("select id::text from outbox_message_t order by c_offset")
        assert published == found[0]
        assert f"Published event {found[1]}." in done.text
        assert "schedule a has no next time: minute: &#39;61&#39;" in visitor.page(G + "/")
        # Without a reason, and without the token of the session's forms, nothing is done.
        assert visitor.send(f"{G}/schedule/run-now", name=name).status_code == 409
        form = {"name": name, "reason": "x", "form_token": "other"}
        assert visitor.client.post(f"{G}/schedule/run-now", data=form).status_code == 403
        assert visitor.client.get(f"{G}/schedule?name=other").status_code == 404
        assert visitor.send(f"{G}/schedule/pause", name="other", reason="x").status_code == 404
        assert visitor.send(f"{G}/schedule/drop", name=name, reason="x").status_code == 404
    assert [(action, who) for _, action, _, who in acted(outbox)] == [
        ("schedule pause", "anna"),
        *(
            ("schedule resume", "robot"),
            ("schedule run-now", "robot"),
            ("schedule run-now", "anna"),
        ),
    ]
    assert outbox.value("select count(*) from outbox_message_t") == 2


def test_tokens_of_the_http_api(outbox: Outbox, caplog: pytest.LogCaptureFixture) -> None:
    """One is created and shown once, listed with what it is for, and revoked after a question; by the API, too."""
    caplog.set_level("DEBUG")
    with served(outbox.settings(observe=console_of())) as address:
        api, visitor = Program(address), Visitor(address)
        assert "There is no token." in visitor.page(f"{G}/tokens")
        fields = {
            "name": "a/b <i>",
            "right-publish": "on",
            "hosts": f"{host(1)}\r\n{host(2)}\r\n",
            "types": "order.*\n",
            "expires": "90d",
        }
        shown = visitor.send(f"{G}/token/create", **fields, reason="a shop")
        assert shown.status_code == 200
        assert shown.headers["cache-control"] == "no-store"
        assert shown.history == []
        found = re.search(r'<pre id="new-token">(relay_[\w-]{43})</pre>', shown.text)
        assert found is not None
        stored = outbox.value(
            "select digest = sha256(%s::bytea) from relay.api_tokens", (found[1],)
        )
        assert stored
        for path in ("tokens", "actions", "token/revoke?name=a/b%20%3Ci%3E"):
            assert found[1] not in visitor.page(f"{G}/{path}")
        page = visitor.page(f"{G}/tokens")
        assert "a/b &lt;i&gt;" in page
        assert str(host(2)) in page
        assert "order.*" in page
        again = visitor.send(f"{G}/token/create", **fields, reason="a shop")
        assert (again.status_code, "there is a token" in again.text) == (409, True)
        for wrong in (
            {"name": "x"},
            {"name": "x", "right-read": "on", "hosts": "7"},
            {"name": "x", "right-read": "on", "expires": "soon"},
            {"right-read": "on"},
        ):
            assert visitor.send(f"{G}/token/create", **wrong, reason="x").status_code == 409
        assert visitor.send(f"{G}/token/create", **{**fields, "name": "y"}).status_code == 409
        form = {**fields, "name": "y", "reason": "x"}
        assert visitor.client.post(f"{G}/token/create", data=form).status_code == 403
        other = api.post("/tokens", name="reader", types=["a.*"])["token"]
        first = api.get("/tokens", limit=1)
        (row,) = first["rows"]
        assert (row["name"], row["rights"], row["hosts"]) == ("reader", ["read"], ["*"])
        (row,) = api.get("/tokens", limit=1, before=first["next"])["rows"]
        assert row["hosts"] == [str(host(1)), str(host(2))]
        asked = visitor.page(f"{G}/token/revoke?name=a/b%20%3Ci%3E")
        assert "Revoke token a/b &lt;i&gt;?" in asked
        done = visitor.send(f"{G}/token/revoke", name="a/b <i>", reason="lost")
        assert "is revoked" in done.text
        assert visitor.send(f"{G}/token/revoke", name="a/b <i>", reason="lost").status_code == 404
        assert api.post("/tokens/reader/revoke") == {"changed": True}
        missing = api.client.post("/tokens/reader/revoke", json={"reason": "x"})
        assert missing.status_code == 404
        assert outbox.column("select name from relay.api_tokens where revoked_at is null") == []
    assert acted(outbox) == [
        ("", "token create", "a shop", "anna"),
        ("", "token create", "because", "robot"),
        ("", "token revoke", "lost", "anna"),
        ("", "token revoke", "because", "robot"),
    ]
    kept = str(outbox.conn.execute("select detail from relay.actions").fetchall()) + caplog.text
    assert found[1] not in kept
    assert other not in kept


def test_an_outbox_without_a_table_has_no_schedules(outbox: Outbox) -> None:
    """The page says so; the API refuses."""
    source = {**outbox.config()["source"], "mode": "wal", "message_prefix": "shop.outbox"}
    with served(outbox.settings(source=source, observe=console_of())) as address:
        assert "need relay's own outbox" in Visitor(address).page(f"{G}/schedules")
        answer = Program(address).client.get("/schedules")
        assert answer.status_code == 409
        assert "schedules need relay's own outbox" in answer.json()["detail"]


def test_the_api_does_the_same(outbox: Outbox) -> None:
    """Every action of the API has its effect, and its row among the actions."""
    with Webhook(lambda headers, body: Answer(503)) as hook:
        settings = with_hook(outbox, hook.url)
        first, second, third = kill_some(outbox, settings, 3)
        with served(settings) as address:
            api = Program(address)
            assert api.get("/status")["status"]["dead_letters"] == 3
            assert api.post("/sinks/hook/pause") == {"changed": True}
            assert api.post("/sinks/hook/pause") == {"changed": False}
            assert api.get("/sinks/hook/status")["state"] == "paused"
            assert [each["name"] for each in api.get("/sinks")] == ["hook"]
            assert api.post("/sinks/hook/resume") == {"changed": True}
            planned = api.post("/sinks/hook/seek", to="end", dry_run=True)
            assert planned["done"] is False
            assert api.post("/sinks/hook/seek", to="end")["done"] is True
            assert api.post("/sinks/hook/rebuild")["goes_on"] == "with the oldest event"
            moved = api.post("/partitions/seek", to="end")
            assert (moved["done"], moved["again"]) == (True, 0)
            page = api.get("/dead-letters", limit=2)
            assert [each["id"] for each in page["rows"]] == [third, second]
            (last,) = api.get("/dead-letters", limit=2, before=page["next"])["rows"]
            assert last["id"] == first
            assert api.get("/dead-letters/kinds")[0] == {
                "sink": "",
                "handler": "projection",
                "kind": "CheckViolation [23514]",
                "events": 3,
            }
            detail = api.get(f"/dead-letters/{first}")
            assert "violates check constraint" in detail["events"][0]["exception"]
            api.post(f"/dead-letters/{first}/payload", payload='{"amount": 7}')
            assert api.get(f"/dead-letters/{first}/payload") == {"payload": '{"amount": 7}'}
            assert api.post("/dead-letters/replay", filter={"ids": [first]})["transactions"] == 1
            assert api.post("/dead-letters/discard", filter={"ids": [second]})["transactions"] == 1
            waiting = api.get("/deferred")["rows"]
            assert [each["kind"] for each in waiting] == ["replay"]
            assert (
                api.post("/deferred/run", filter={"ids": [waiting[0]["id"]]})["transactions"] == 1
            )
            assert api.post("/deferred/cancel", all=True)["transactions"] == 1
            assert (
                outbox.value("select status from relay.dead_letter_queue where id = %s", [first])
                == "dead"
            )
            assert (
                "cancelled by robot (as app_relay): because"
                in api.get(f"/dead-letters/{first}")["events"][0]["exception"]
            )
            assert api.get("/partitions")["rows"]["rows"][0]["unread"] == 0
            assert api.get("/stopped-handlers") == []
            assert len(api.get("/history")) == 4
            whole = api.client.post("/dead-letters/discard", json={"reason": "x"})
            assert (whole.status_code, whole.json()["detail"]) == (
                409,
                "filter: is empty: give a condition, or all: true",
            )
            missing = api.client.get("/dead-letters/999")
            assert missing.status_code == 404
            assert missing.headers["content-type"] == "application/problem+json"
            wrong = api.client.post("/sinks/hook/pause", json={"reason": " "})
            assert (wrong.status_code, wrong.json()["detail"].partition(":")[0]) == (422, "reason")
            unknown = api.client.get("/dead-letters", params={"handlr": "x"})
            assert unknown.status_code == 422
            assert Program(address, "nobody").client.get("/sinks").status_code == 404
            done = {each["action"] for each in api.get("/actions")["rows"]}
            assert {each["operator"] for each in api.get("/actions")["rows"]} == {"robot"}
            of_dead = {each["action"] for each in api.get("/dead-letter-actions")["rows"]}
    assert done == {
        *("sink pause", "sink resume", "sink seek", "sink rebuild", "offsets seek"),
        *("deferred run", "deferred cancel"),
    }
    assert of_dead == {"edit", "replay", "discard", "cancel"}


def test_a_forgotten_sink_is_dropped(outbox: Outbox) -> None:
    """One that is no longer configured can be forgotten, in the pages and in the API."""
    with_hook(outbox, "http://127.0.0.1:9")
    with served(outbox.settings(observe=console_of())) as address:
        visitor = Visitor(address)
        assert "Drop sink hook?" in visitor.page(f"{G}/sink/drop?name=hook")
        assert "is dropped" in visitor.send(f"{G}/sink/drop", name="hook", reason="no use").text
    assert acted(outbox) == [("hook", "sink drop", "no use", "anna")]


def test_the_api_is_described(address: str) -> None:
    """The OpenAPI document names every route of the API, the token, and what each error looks like."""
    document = httpx.get(
        f"{address}/api/openapi.json", headers={"authorization": f"Bearer {TOKEN}"}
    ).json()
    assert document["openapi"].startswith("3.1")
    assert not [path for path in document["paths"] if not path.startswith("/api/v1/")]
    operations = [
        (path, method, operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
    ]
    assert operations
    for path, method, operation in operations:
        assert operation["summary"], path
        assert operation["description"], path
        assert operation["security"] == [{"HTTPBearer": []}]
        assert "application/problem+json" in operation["responses"]["409"]["content"]
        answer = operation["responses"]["200"]["content"]["application/json"]["schema"]
        assert answer, path
        if method == "post":
            body = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            schema = document["components"]["schemas"][body.rpartition("/")[2]]
            assert "reason" in schema["required"], path
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', str(document).replace("'", '"')))
    assert references <= set(document["components"]["schemas"])


def fill_up(outbox: Outbox) -> None:
    """100,000 dead letters of a thousand hosts, 1,000 partitions and 50 sinks."""
    outbox.conn.execute(
        """
        insert into relay.dead_letter_queue (group_id, dead_transaction, event_id, host_id, transaction_id, c_offset,
                                             event_type, payload, handler, exception, created_dt)
        select 'default', nextval('relay.dead_transactions'), gen_random_uuid(), lpad((n % 1000)::text, 36, '0'),
               gen_random_uuid(), n, 'order.placed', jsonb_build_object('amount', -n, 'note', repeat('x', 300)),
               'projection',
               case when n % 1000 = 0 then 'ValueError: rare' else 'CheckViolation [23514]: refused ' || n end
               || E'\\n  at somewhere', now() - n * interval '1 second'
          from generate_series(1, 100000) n
        """
    )
    outbox.conn.execute("analyze relay.dead_letter_queue")


@pytest.mark.rare
def test_it_stays_usable_when_there_is_much(outbox: Outbox) -> None:
    """Pages have a bounded number of rows, and every one of them comes within its limit, by indexes."""
    config = outbox.config()
    handlers = config["handlers"] | {
        f"hook-{n:02d}": {"type": "http", "url": "http://127.0.0.1:9"} for n in range(50)
    }
    settings = outbox.settings(
        handlers=handlers,
        routes=[{"handlers": list(handlers)}],
        partitions=1000,
        group="large",
        source={"dsn": outbox.relay_dsn, "mode": "poll"},
        observe=console_of(),
    )
    outbox.install_again(settings)
    fill_up(outbox)
    outbox.conn.execute("update relay.dead_letter_queue set group_id = 'large'")
    outbox.conn.execute("vacuum analyze relay.dead_letter_queue")
    for number in range(20):
        outbox.publish(host(number), event())
    with served(settings) as address:
        visitor = Visitor(address)
        page = visitor.page("/groups/large/dead-letters")
        assert "100,000" in page
        assert page.count("<tr>") == 51
        assert len(page) < 200_000
        older = re.search(r'href="([^"]+)" rel="next"', page)
        assert older is not None
        second = visitor.page(older[1].replace("&amp;", "&"))
        ids = [set(re.findall(r"dead-letter\?id=(\d+)", each)) for each in (page, second)]
        assert [len(each) for each in ids] == [50, 50]
        assert not ids[0] & ids[1]
        rare = visitor.page("/groups/large/dead-letters?kind=ValueError&limit=500")
        assert rare.count("<tr>") == 101
        assert "Nothing matches" in visitor.page("/groups/large/dead-letters?exception=nowhere")
        assert "Replay 100,000 dead transactions?" in visitor.page(
            "/groups/large/dead-letters/replay"
        )
        partitions = visitor.page("/groups/large/partitions")
        assert partitions.count("<tr>") == 101
        assert "1,000 partitions" in partitions
        assert visitor.page("/groups/large/partitions?after=899").count("<tr>") == 101
        sinks = visitor.page("/groups/large/sinks")
        assert sinks.count("<tr>") == 51
        assert "100,000" in visitor.page("/groups/large/")
        assert max(visitor.seconds.values()) < 8
        api = Program(address, "large")
        assert len(api.get("/dead-letters", limit=500)["rows"]) == 500
        assert api.client.get("/dead-letters", params={"limit": 501}).status_code == 422
    plan = "\n".join(
        outbox.column(
            """
            explain select distinct d.dead_transaction from relay.dead_letter_queue d
             where d.group_id = 'large' and d.status = 'dead' and d.dead_transaction < 50000
             order by d.dead_transaction desc limit 51
            """
        )
    )
    assert "dead_letter_queue_status" in plan or "dead_letter_queue_dead" in plan
    assert "Seq Scan" not in plan


def test_a_large_payload_is_cut(outbox: Outbox, settings: Settings, address: str) -> None:
    """A page has the beginning of it; the whole can be saved. What is too large to be sent is refused."""
    (dead_letter,) = kill_some(outbox, settings, note="y" * 3_000_000)
    visitor = Visitor(address)
    page = visitor.page(f"{G}/dead-letter?id={dead_letter}")
    assert len(page) < 60_000
    assert "characters are shown" in page
    assert "Too large to edit here" in page
    saved = visitor.client.get(f"{G}/dead-letter/payload?id={dead_letter}")
    assert len(saved.json()["note"]) == 3_000_000
    too_large = visitor.client.post(f"{G}/dead-letter/edit", content=b"x" * 2_000_000)
    assert too_large.status_code == 413
    chunked = Program(address).client.post(
        "/deferred/run",
        content=iter([b" " * 100_000] * 20),
        headers={"content-type": "application/json"},
    )
    assert chunked.status_code == 413


def test_a_database_that_is_away_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Status 503 and a sentence, in the pages and in the API; no traceback, and no password."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dsn = f"postgresql://u:hush@127.0.0.1:{closed.getsockname()[1]}/x"
        settings = Settings(source={"dsn": dsn}, observe=console_of())
        with served(settings) as address:
            visitor = Visitor(address)
            page = visitor.client.get(f"{G}/dead-letters")
            problem = Program(address).client.get("/sinks")
    assert page.status_code == problem.status_code == 503
    assert "cannot connect" in page.text
    assert problem.json()["title"] == "Service Unavailable"
    output = page.text + problem.text + "".join(capfd.readouterr())
    assert "hush" not in output
    assert "Traceback" not in output


def test_several_groups_have_one_console(outbox: Outbox) -> None:
    """Its header leads from one to the other."""
    first = outbox.settings(observe=console_of())
    second = outbox.settings(
        group="second other",
        source={
            "dsn": outbox.relay_dsn,
            "slot": f"{outbox.slot}_2",
            "publication": outbox.slot,
        },
    )
    outbox.install_again(second)
    with served(first, second) as address:
        visitor = Visitor(address)
        assert 'href="/groups/second%20other/"' in visitor.page("/")
        assert "none reads the source" in visitor.page("/groups/second%20other/")
        assert visitor.client.get("/groups/third/").status_code == 404
        assert [
            each["name"]
            for each in httpx.get(
                f"{address}/api/v1/groups", headers={"authorization": f"Bearer {TOKEN}"}
            ).json()
        ] == ["default", "second other"]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_relay_run_serves_it_and_ends_with_it(outbox: Outbox, tmp_path: Path) -> None:
    """A request that is not over does not keep the process; what is secret is in no log line."""
    port = _free_port()
    config = outbox.config_file(
        tmp_path / "relay.yaml", observe=console_of(listen=f"127.0.0.1:{port}")
    )
    with running(config) as process:
        process.wait_said("the console is served")
        visitor = Visitor(f"http://127.0.0.1:{port}")
        assert visitor.login.status_code == 200
        with socket.create_connection(("127.0.0.1", port)) as half:
            half.sendall(b"POST /login HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nname=")
            begun = time.monotonic()
            assert process.terminate() == 0
        assert time.monotonic() - begun < 15
        assert TOKEN not in process.log.read_text()
        assert "Traceback" not in process.log.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="sends a signal to one thread as Linux does")
def test_a_signal_that_another_thread_receives_ends_the_console(
    outbox: Outbox, tmp_path: Path
) -> None:
    config = outbox.config_file(
        tmp_path / "relay.yaml", observe=console_of(listen=f"127.0.0.1:{_free_port()}")
    )
    with running(config, command="console") as process:
        process.wait_said("the console is served")
        main = process.process.pid
        others = {int(each.name) for each in Path(f"/proc/{main}/task").iterdir()} - {main}
        assert ctypes.CDLL(None).tgkill(main, max(others), signal.SIGTERM) == 0
        assert process.process.wait(40) == 0


@pytest.mark.rare
def test_relay_console_serves_it_alone(outbox: Outbox, tmp_path: Path) -> None:
    """In the foreground, without a relay: there is no history, and the stopped group can be moved."""
    port = _free_port()
    config = outbox.config_file(
        tmp_path / "relay.yaml", observe=console_of(listen=f"127.0.0.1:{port}")
    )
    none = relay("console", "--config", str(outbox.config_file(tmp_path / "none.yaml")))
    assert (none.returncode, "observe.console: is not configured" in none.stderr) == (2, True)
    with running(config, command="console") as process:
        process.wait_said("the console is served")
        visitor = Visitor(f"http://127.0.0.1:{port}")
        assert "Nothing is measured in this process" in visitor.page(f"{G}/")
        assert "0 events will be delivered again" in visitor.page(f"{G}/partitions/seek?to=end")
        moved = visitor.send(f"{G}/partitions/seek", to="end", partition="", reason="try")
        assert "The group goes on with what is published from now on." in moved.text
        taken = relay("console", "--config", str(config))
        assert f"cannot listen on 127.0.0.1:{port}" in taken.stderr
        assert process.terminate() == 0
    assert acted(outbox) == [("", "offsets seek", "try", "anna")]


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says what to install."""
    from relay.console.server import console_server

    settings = Settings(source={"dsn": "postgresql://u@h/x"}, observe=console_of())
    assert settings.observe.console is not None
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigurationError, match=r"install relay-outbox\[console\]"):
        console_server([settings], settings.observe.console)


ODD_QUERIES = (
    "dead-letters?ids=99999999999999999999999",
    "dead-letters?ids=" + "9" * 5_000,
    "dead-letters?ids=x",
    "dead-letters?exception=%00",
    "dead-letters?exception=%ff%fe",
    "dead-letters?exception=%ED%A0%80",
    "dead-letters?exception='%20or%201=1--",
    "dead-letters?kind=%25&handler=%27&event_type=%22&transaction=x&host=y",
    "dead-letters?since=0001-01-01&until=9999-12-31",
    "dead-letters?since=infinity",
    "dead-letters?before=99999999999999999999999",
    "dead-letters?before=-1",
    "dead-letters?limit=-5",
    "dead-letters?status=%00",
    "dead-letter?id=99999999999999999999999",
    "dead-letter?id=-1",
    "dead-letter?id=1&after=99999999999999999999999",
    "dead-letter/payload?id=99999999999999999999999",
    "deferred?ids=99999999999999999999999&key=%00",
    "deferred?after=99999999999999999999999",
    "partitions?after=99999999999999999999999&limit=99999999999999999999999",
    "partitions/seek?to=99999999999999999999999",
    "partitions/seek?to=end&partition=99999999999999999999999",
    "partitions/seek?to=end&partition=" + "9" * 5_000,
    "partitions/seek?to=%00",
    "partitions/seek?to=FFFFFFFF/FFFFFFFFF",
    "partitions/seek?to=9999-12-31T23:59:59",
    "sink?name=%00",
    "sink/seek?name=hook&to=%00",
    "sink/seek?name=hook&to=99999999999999999999999",
    "sink/seek?name=hook&to=0001-01-01",
    "sink/drop?name=%3Cscript%3E",
    "actions?before=99999999999999999999999&about=%3Cscript%3E",
    "?hours=nan",
    "?hours=inf",
    "?hours=-1",
    "?hours=1e308",
)


def test_an_odd_request_is_refused_in_a_sentence(address: str) -> None:
    """Never as a failure of relay's, whatever is in it."""
    visitor, program = Visitor(address), Program(address)
    for query in ODD_QUERIES:
        page = visitor.client.get(f"{G}/{query}")
        assert page.status_code in (200, 404, 409, 422), query[:80]
        assert "<script>" not in page.text
        answer = program.client.get(f"/{query}")
        assert answer.status_code in (200, 404, 405, 409, 422), query[:80]


ODD_BODIES = (
    b'{"reason": "\\ud800", "all": true}',
    b'{"reason": "\\u0000", "all": true}',
    b'{"reason": "x", "filter": {"ids": [99999999999999999999999]}}',
    b'{"reason": "x", "filter": {"ids": [' + b"9" * 5_000 + b"]}}",
    b'{"reason": "x", "filter": {"exception": "\\ud800"}}',
    b"[" * 100_000,
    b"\xff\xfe",
    b"NaN",
)


def test_an_odd_body_is_refused_in_a_sentence(outbox: Outbox, address: str) -> None:
    program = Program(address, **{"content-type": "application/json"})
    for body in ODD_BODIES:
        for path in ("/dead-letters/replay", "/deferred/run", "/sinks/hook/pause"):
            answer = program.client.post(path, content=body)
            assert answer.status_code in (200, 400, 404, 409, 422), (body[:60], answer.text)
    assert outbox.value("select count(*) from relay.dead_letter_actions") == 0


def test_an_odd_payload_is_refused_in_a_sentence(
    outbox: Outbox, settings: Settings, address: str
) -> None:
    (dead_letter,) = kill_some(outbox, settings)
    visitor, program = Visitor(address), Program(address)
    for payload in (
        "[" * 50_000 + "]" * 50_000,
        '"\\u0000"',
        '"\\ud800"',
        "{",
        "",
        "1e999999",
        "\x00",
    ):
        fields = {"id": str(dead_letter), "payload": payload, "reason": "x"}
        page = visitor.send(f"{G}/dead-letter/edit", **fields)
        body = {"reason": "x", "payload": payload}
        answer = program.client.post(f"/dead-letters/{dead_letter}/payload", json=body)
        assert page.status_code == answer.status_code == 409, payload[:30]
    assert outbox.value("select payload->>'amount' from relay.dead_letter_queue") == "-1"
