"""Extra columns of an outbox as the fields `headers.*`: names, rows, routes, templates, CloudEvents, dead letters."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from relay.config.effects import Effects
from relay.config.fields import Template, is_name
from relay.config.handlers import SqlHandler
from relay.config.settings import Route, Settings
from relay.config.source import SourceSettings
from relay.faults import ConfigurationError, Rejected
from relay.handlers import relation
from relay.handlers.sql import SqlEvent
from relay.model import tuples
from relay.model.events import EVENT_FIELDS, FIELDS, Event, TypedEvent
from relay.model.headers import ATTRIBUTES, as_json, from_json
from relay.model.transactions import Rows
from relay.model.tuples import RowDecoder
from relay.pipeline.routing import RouteRules
from relay.sinks import cloudevents
from relay.source.decode.grouping import Grouping
from relay.source.decode.layout import Layout, polled
from tests.unit import wire

COMMIT = ("0/10", "2000-01-01 00:00:00+00", "7")
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


def source(**section: Any) -> SourceSettings:
    return SourceSettings.model_validate(section)


def an_event(headers: dict[str, str | None] | None) -> Event:
    return Event((None,) * (len(FIELDS) + 3), headers)


def test_headers_are_named_by_a_list_or_a_mapping() -> None:
    assert source(headers=["region", "priority"]).headers == {
        "region": "region",
        "priority": "priority",
    }
    found = source(headers={"region": "Tenant Region"})
    assert found.mapping["headers.region"] == "Tenant Region"
    assert found.sql_types["headers"] == "jsonb"
    assert "headers" not in source().sql_types


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        (["Region"], "'Region' is not the name of a header"),
        (["7th"], "'7th' is not the name of a header"),
        (["a.b"], "'a.b' is not the name of a header"),
        ({"x" * 64: "a"}, "is not the name of a header"),
        (["sequence"], "'sequence' would be the CloudEvents attribute sequence"),
        (["host_id"], "'host_id' would be the CloudEvents attribute hostid"),
        (["trace_id", "traceid"], "'traceid' and 'trace_id' would both be"),
        ({"region": ""}, "at least 1 character"),
        ("region", "valid dictionary"),
    ],
)
def test_a_name_that_cannot_be_a_header_is_refused(headers: Any, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        source(headers=headers)


@pytest.mark.parametrize(
    "more",
    [
        {"routes": [{"match": {"headers.zone": "eu"}, "handlers": ["a"]}]},
        {"routes": [{"handlers": ["log"]}], "topic": "x.{headers.zone}"},
    ],
)
def test_a_header_that_is_not_configured_is_refused(more: dict[str, Any]) -> None:
    topic = more.pop("topic", "x.{headers.region}")
    handlers = {
        "a": {"type": "sql", "statement": "select 1"},
        "log": {"type": "redis", "url": "redis://r", "topic": topic},
    }
    with pytest.raises(ValidationError, match=r"source\.headers has no headers\.zone \(headers: r"):
        Settings(source={"headers": ["region"]}, handlers=handlers, **more)


def test_headers_decide_effects() -> None:
    assert Effects.of(Settings(source={"headers": ["region"]})).values["source.headers.region"]


def test_names_of_headers_are_no_paths() -> None:
    assert is_name("headers.trace_id")
    assert not any(map(is_name, ("headers", "headers.", "headers.a.b", "headers.A")))


@given(st.dictionaries(st.sampled_from(["region", "trace_id", "p9"]), st.none() | TEXTS))
def test_headers_survive_json(headers: dict[str, str | None]) -> None:
    assert from_json(as_json(headers)) == headers
    assert from_json(an_event(headers).text("headers")) == headers


@pytest.mark.parametrize("text", [None, "[]", '"degraded"', "1", '{"a": 1}'])
def test_what_are_no_headers_are_none(text: str | None) -> None:
    assert from_json(text) == {}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(*[st.none() | TEXTS] * 4), min_size=1, max_size=60),
    few=st.sampled_from([0, 1_000]),
)
def test_rows_have_their_headers_one_by_one_and_together(
    rows: list[tuple[str | None, ...]], few: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuples, "FEW_ROWS", few)
        mapping = source(headers={"region": "zone", "gone": "absent", "kind": "event_type"}).mapping
        decoder = RowDecoder(["id", "zone", "event_type", "more"], mapping)
        encoded = [
            wire.tuple_data([None if cell is None else cell.encode() for cell in row])
            for row in rows
        ]
        fields = ["event_type", "headers", "headers.region"]
        kinds, objects, regions = decoder.columns(Rows.of(encoded), fields)
        for row, kind, found, region, data in zip(
            rows, kinds, objects, regions, encoded, strict=True
        ):
            expected = {"region": row[1], "gone": None, "kind": row[2]}
            event = decoder.event(data, COMMIT)
            assert event.headers == json.loads(found or b"") == expected
            assert event.text("headers.region") == row[1]
            assert [kind, region] == [
                None if each is None else each.encode() for each in (row[2], row[1])
            ]


def test_an_event_without_headers_has_none() -> None:
    event = an_event(None)
    assert event.headers == {}
    assert event.text("headers") is None
    for name in ("headers.region", "region", "nonsense"):
        with pytest.raises(KeyError):
            event.text(name)
    with pytest.raises(KeyError):
        an_event({"region": "eu"}).text("region")


def test_headers_belong_to_the_event() -> None:
    event = an_event({"region": "eu"})
    assert event != an_event(None)
    assert event == an_event({"region": "eu"})
    assert event.without(["payload"]).headers == {"region": "eu"}
    assert pickle.loads(pickle.dumps(event)) == event
    with pytest.raises(TypeError):
        event.headers["region"] = "us"  # type: ignore[index]
    assert TypedEvent(event.row, None, dict(event.headers)).headers == {"region": "eu"}


def test_routes_and_templates_read_headers() -> None:
    router = RouteRules(
        [
            Route(match={"headers.region": ["eu*", 7]}, handlers=["europe"]),
            Route(match={"payload.a": 1}, handlers=["one"]),
        ]
    )
    assert router.fields == ("headers.region", "payload")
    assert router.handlers(an_event({"region": "eu-west"})) == ("europe",)
    assert router.handlers(an_event({"region": "7"})) == ("europe",)
    assert router.handlers(an_event({"region": None})) == ()
    template = Template("x.{headers.region}")
    assert template.names == ["headers.region"]
    assert template.fill(an_event({"region": "eu"})) == "x.eu"
    with pytest.raises(Rejected, match=r"no text or number at headers\.region"):
        template.fill(an_event({"region": None}))
    with pytest.raises(ValueError, match="neither a field"):
        Template("{headers}")


def test_headers_are_extension_attributes() -> None:
    found = cloudevents.attributes(an_event({"trace_parent": "00-ab", "region": None}), "shop")
    assert found["traceparent"] == "00-ab"
    assert "region" not in found
    every = Event(tuple("2026-11-21 10:00:00+00" for _ in range(len(FIELDS) + 3)))
    assert set(cloudevents.attributes(every, "shop")) < ATTRIBUTES


def test_statements_name_headers_where_there_are_any() -> None:
    statement = Settings(
        handlers={"a": {"type": "sql", "statement": "select %(headers)s->>'region'"}}
    ).handlers["a"]
    assert isinstance(statement, SqlHandler)
    SqlEvent("a", statement, source(headers=["region"]).sql_types)
    with pytest.raises(ConfigurationError, match="is not a field of an event"):
        SqlEvent("a", statement, source().sql_types)
    assert relation.RESERVED


def test_a_table_that_gains_a_header_midway_gives_it_to_the_rows_after() -> None:
    mapping = source(headers=["region"]).mapping
    before = Layout.of(["id", "host_id", "transaction_id"], mapping, "t")
    after = Layout.of(["id", "host_id", "transaction_id", "region"], mapping, "t")
    grouping = Grouping(mapping, 1 << 20)
    grouping.take(before, Rows.of([wire.tuple_data([b"1", b"h", b"t"])]), polled([]), 7)
    ends = polled([(1, 7)])
    grouping.take(after, Rows.of([wire.tuple_data([b"2", b"h", b"t", b"eu"])]), ends)
    (found,) = grouping.fetch()
    decoder = RowDecoder(found.columns, mapping)
    assert [decoder.event(row, COMMIT).headers for row in found[0].tuples] == [
        {"region": None},
        {"region": "eu"},
    ]


def test_an_event_without_an_id_is_the_same_from_the_wal_and_polled() -> None:
    def without_id(**fields: str) -> str:
        return cloudevents.identity(Event(tuple(fields.get(name) for name in EVENT_FIELDS)))

    assert without_id(id="", c_offset="7", commit_lsn="0/10") == without_id(c_offset="7") == "/7"
    assert without_id(commit_lsn="0/10") == "0/10/"
