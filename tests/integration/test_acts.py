"""What operators do is declared once: as a command, in the API and on pages it is the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from relay.admin import acts, queues, readers
from relay.admin.acts import Missing, QueueRebuild, option
from relay.cli.app import app
from tests.console import Program, Visitor, console_of, served
from tests.outbox import Outbox


def test_a_rehearsal_says_what_would_be_done_and_does_nothing(outbox: Outbox) -> None:
    outbox.worker.execute("select relay.declare_queue('mail', null)")
    outbox.worker.execute("select relay.enqueue('mail', '{}') from generate_series(1, 3)")
    outbox.reader.execute("select relay.declare_reader('search')")
    settings = outbox.settings()
    assert queues.purge.rehearse(settings, "mail").said.startswith("3 messages are deleted")
    assert "3 messages and 0 dead letters" in queues.drop.rehearse(settings, "mail").said
    assert queues.rebuild.rehearse(settings, "mail").answer == QueueRebuild(
        "with the oldest event", messages=3, dead=0, done=False
    )
    assert "moved to now" in readers.seek.rehearse(settings, "search", to="now").said
    assert "no longer keeps" in readers.drop.rehearse(settings, "search").said
    assert outbox.value("select count(*) from relay.queue_items") == 3
    assert outbox.value("select count(*) from relay.log_readers") == 1
    assert outbox.value("select count(*) from relay.actions") == 0


def test_an_act_looks_before_it_asks(outbox: Outbox, tmp_path: Path) -> None:
    settings, config = outbox.settings(), str(outbox.config_file(tmp_path / "relay.yaml"))
    for (subject, name), act in acts.declared().items():
        given = {each.name: "now" for each in act.parameters}
        if act.asks:
            with pytest.raises(Missing):
                act.rehearse(settings, "other", **given)
            words = [subject, name, "other", *(f"--{option(each)}=now" for each in act.parameters)]
            said = CliRunner().invoke(app, [*words, "-c", config])
            assert isinstance(said.exception, Missing), words
            assert "?" not in said.output


def test_the_api_has_every_act(outbox: Outbox) -> None:
    outbox.worker.execute("select relay.declare_queue('mail', null)")
    outbox.worker.execute("select relay.enqueue('mail', '{}') from generate_series(1, 3)")
    outbox.reader.execute("select relay.declare_reader('search')")
    with served(outbox.settings(observe=console_of())) as address:
        api = Program(address)
        assert api.post("/queues/mail/purge") == {"messages": 3}
        assert api.post("/queues/mail/drop") == {"changed": True}
        assert api.post("/readers/search/seek", to="beginning") == {"changed": True}
        assert api.post("/readers/search/drop") == {"changed": True}
        assert api.client.post("/readers/search/drop", json={"reason": "x"}).status_code == 404
        for (subject, name), act in acts.declared().items():
            body = {option(each): "now" for each in act.parameters}
            path = f"/{act.of}s/other/{act.path or name}"
            answer = api.client.post(path, json={"reason": "x", **body})
            assert answer.status_code == 404, (subject, name, answer.text)
    assert outbox.column("select action from relay.actions order by id") == [
        *("queue purge", "queue drop", "reader seek", "reader drop"),
    ]


def test_every_act_on_a_page_ends_on_a_page_that_says_all_that_the_command_says(
    outbox: Outbox,
) -> None:
    outbox.worker.execute("select relay.declare_queue('mail', null)")
    outbox.worker.execute("select relay.enqueue('mail', '{}') from generate_series(1, 3)")
    outbox.reader.execute("select relay.declare_reader('search')")
    with served(outbox.settings(observe=console_of())) as address:
        anna = Visitor(address)
        assert "3 messages and 0 dead" in anna.page("/groups/default/queue/rebuild?name=mail")
        for act, given, said in (
            ("queue/rebuild", {"name": "mail"}, "3 messages and 0 dead letters are deleted"),
            ("queue/drop", {"name": "mail"}, "Queue mail is dropped."),
            ("reader/seek", {"name": "search", "to": "now"}, "Reader search is moved to now."),
            ("reader/drop", {"name": "search"}, "Reader search is dropped."),
        ):
            answer = anna.send(f"/groups/default/{act}", reason="because", **given)
            assert answer.status_code == 200, (act, answer.url)
            assert said in answer.text
        assert anna.send("/groups/default/reader/drop", reason="x", name="a").status_code == 404
        unknown = anna.client.get("/groups/other/sinks")
        assert unknown.status_code == 404
        assert "/groups/other" not in unknown.text


def test_what_else_is_to_be_done_once_an_endpoint_is_enabled_stands_on_the_page(
    outbox: Outbox,
) -> None:
    settings = outbox.settings(
        observe=console_of(),
        handlers={
            "hooks": {
                "type": "http",
                "url": "{payload.url}",
                "endpoints": {"disable_after": "5d"},
            }
        },
        routes=[{"match": {}, "handlers": ["hooks"]}],
    )
    endpoint = "https://hooks.example/<b>"
    with served(settings) as address:
        anna = Visitor(address)
        path, given = "/groups/default/endpoint", {"name": "hooks", "endpoint": endpoint}
        assert anna.send(f"{path}/disable", reason="because", **given).status_code == 200
        enabled = anna.send(f"{path}/enable", reason="because", **given).text
    assert "<code>relay dlq replay --sink hooks --exception" in enabled
    assert "<b>" not in enabled
