"""What is sent to sinks, and when it is tried again. No server."""

from __future__ import annotations

from typing import Any

import pytest

from relay.config.handlers import HttpHandler
from relay.model.events import EVENT_FIELDS, Event
from relay.sinks import cloudevents
from relay.sinks.http import public_url, signatures


def event(**fields: str) -> Event:
    return Event(tuple(fields.get(name) for name in EVENT_FIELDS))


def test_a_cloud_event_leaves_out_what_it_does_not_have_and_keeps_every_digit() -> None:
    body = cloudevents.structured(
        event(id="1-2", event_type="t", payload='{"n": 1.10000000000000000001}'), "/s"
    )
    assert body == (
        b'{"specversion": "1.0", "id": "1-2", "source": "/s", "type": "t", '
        b'"datacontenttype": "application/json", "data": {"n": 1.10000000000000000001}}'
    )


@pytest.mark.parametrize(
    ("printed", "time_"),
    [
        ("2026-11-21 10:00:00.5+00", "2026-11-21T10:00:00.5Z"),
        ("infinity", None),
        ("0044-03-15 12:00:00+00 BC", None),
        ("12026-01-01 00:00:00+00", None),
    ],
)
def test_a_time_is_rfc_3339_or_left_out(printed: str, time_: str | None) -> None:
    assert cloudevents.attributes(event(id="1", event_ts=printed), "s").get("time") == time_


def test_headers_of_a_binary_event_are_printable_ascii() -> None:
    one = event(id="1", aggregate_id='é "50%" \n')
    headers = cloudevents.headers(cloudevents.attributes(one, "s"))
    assert headers["ce-subject"] == "%C3%A9%20%2250%25%22%20%0A"
    assert cloudevents.data(one) == b"null"


def test_a_signature_is_that_of_the_standard_s_own_example() -> None:
    """The example of the Standard Webhooks specification's libraries."""
    import base64

    key = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    found = signatures([key], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert found["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_an_address_is_shown_without_what_may_be_a_secret() -> None:
    url = "https://me:hunter2@shop.example:8443/events?token=hunter2&flag#hunter2"
    assert public_url(url) == "https://shop.example:8443/events?token=...&..."


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"url": "shop.example/events"}, "must be an address such as"),
        ({"url": "ftp://x"}, "must be an address such as"),
        ({"each": "transaction", "mode": "binary"}, "needs mode: batch"),
        ({"headers": {"x": {"env": "RELAY_NOT_THERE"}}}, "no variable RELAY_NOT_THERE"),
        ({"headers": {"x": {"file": "/not/there"}}}, "/not/there cannot be read"),
        ({"headers": {"x": {"vault": "a"}}}, r"must be a text, \{env: NAME\}"),
        ({"retry": {"wait": 0}}, "greater than 0"),
        ({"circuit_breaker": {"failures": 0}}, "greater than 0"),
        ({"rate_limit": True}, "must be a number"),
        ({"statuses": {"2xx": "retry"}}, "2xx is neither a status from 300 to 599 nor a class"),
        ({"statuses": {404: "drop"}}, "'retry', 'dead' or 'stop'"),
        ({"order_by": "tenant"}, "'host', 'user', 'aggregate' or 'none'"),
    ],
)
def test_a_wrong_setting_is_refused(bad: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        HttpHandler(**{"type": "http", "url": "https://x", **bad})
