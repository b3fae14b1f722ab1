"""Names made of an event's fields."""

from __future__ import annotations

import pytest

from relay.config.fields import Template
from relay.faults import Rejected
from relay.model.events import EVENT_FIELDS, Event


def event(**fields: str) -> Event:
    return Event(tuple(fields.get(name) for name in EVENT_FIELDS))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("orders", "orders"),
        ("{{{event_type}}}", "{order.paid}"),
        ("{event_type}-{payload.customer.id}", "order.paid-7"),
        ("{payload.vip}.{payload.amount}", "true.9.50"),
        ("{metadata.trace}", "é"),
        ("{payload.lines.1.sku}", "b"),
    ],
)
def test_a_name_has_the_event_s_values(text: str, name: str) -> None:
    payload = '{"customer": {"id": 7}, "vip": true, "amount": "9.50", "lines": [{}, {"sku": "b"}]}'
    one = event(event_type="order.paid", payload=payload, metadata='{"trace": "é"}')
    assert Template(text).fill(one) == name


@pytest.mark.parametrize(
    "text", ["{user_id}", "{payload.customer}", "{payload.x.y}", "{payload.n}"]
)
def test_an_event_without_the_value_is_refused(text: str) -> None:
    one = event(payload='{"customer": {"id": 7}, "n": null}')
    with pytest.raises(Rejected, match="which a template needs"):
        Template(text).fill(one)


@pytest.mark.parametrize("text", ["{}", "{0}", "{id!r}", "{id:3}", "{id.x}", "{payload.}", "{"])
def test_what_is_no_field_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"field|expected|Single"):
        Template(text)
