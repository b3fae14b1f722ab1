"""The intake of brokers of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module

from relay.config.settings import Settings
from relay.event_types.registry import registered
from relay.event_types.upcasting import Upcasting
from relay.faults import ConfigurationError
from relay.intake.consuming import BrokerIntake, MessageFeed
from relay.intake.messages import MessageReader

_FEEDS = {"kafka": "KafkaFeed", "nats": "NatsFeed", "rabbitmq": "RabbitmqFeed"}


def intakes(
    settings: Settings, count: Callable[[str, str, int], None] = lambda name, result, messages: None
) -> list[BrokerIntake]:
    """Build the intake of each broker. `count` gets its name, a result, and how many messages had it.

    Raises ConfigurationError for one that cannot be built, or whose extra is not installed, and for an event type.
    """
    if not settings.intake:
        return []
    reader = MessageReader(Upcasting(registered(settings.events)))
    return [
        BrokerIntake(
            name,
            _feed(name, each.type, each),
            reader,
            settings.source_dsn,
            settings.group,
            each.on_invalid == "reject",
            partial(count, name),
        )
        for name, each in settings.intake.items()
    ]


def _feed(name: str, kind: str, settings: object) -> MessageFeed:
    try:
        module = import_module(f"relay.intake.{kind}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "relay":
            raise
        raise ConfigurationError(
            f"intake.{name}.type: {error.name} is not installed: install relay-outbox[{kind}]"
        ) from None
    feed: MessageFeed = getattr(module, _FEEDS[kind])(name, settings)
    return feed
