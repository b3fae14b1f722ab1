"""The settings of sinks that publish events to Google Cloud Pub/Sub; `pubsub_client` publishes."""

from __future__ import annotations

from typing import Literal

from relay.config.fields import Template
from relay.config.handlers import Named
from relay.config.types import Alike, Own
from relay.sinks.batching import Batching
from relay.sinks.brokers import BrokerSettings, Publishing


class Settings(BrokerSettings):
    """Google Cloud Pub/Sub; `topic` is the full name, `projects/…/topics/…`."""

    type: Alike[Literal["pubsub"]]
    key: Alike[Named | None] = "{host_id}"
    """A template over the event's fields: the ordering key, which subscriptions with message ordering follow; null:
    none. A request has messages of one key."""
    endpoint: Own[str | None] = None
    """A server instead of the service's own, as host:port, such as that of a region. With `http://` before it, it is
    an emulator, which has neither TLS nor credentials."""

    @property
    def templates(self) -> dict[str, Template]:
        """The keys whose values are templates over an event's fields."""
        of_key = {} if self.key is None else {"key": Template(self.key)}
        return {**super().templates, **of_key}


def sink(name: str, settings: Settings) -> Publishing:
    """The sink of `type: pubsub`."""
    # Only what sends needs the client library, whose import takes long.
    from relay.sinks.pubsub_client import PubSub

    service = PubSub(settings.endpoint, settings.timeout)
    return Publishing(name, settings, Batching(service, settings.timeout), settings.key)
