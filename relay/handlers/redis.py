"""Handlers that append events to Redis streams. A message's fields are `id`, the attributes and `data`.

Source: Redis documentation, "XADD" and "Transactions".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from relay.faults import ConfigurationError, Rejected, Undelivered
from relay.handler_settings import RedisHandler
from relay.handlers.messages import Message


class Redis:
    """A pool of connections to a server."""

    def __init__(self, name: str, settings: RedisHandler) -> None:
        """Raises ConfigurationError for an address with options that the client does not know."""
        self._max_length = settings.max_length
        try:
            self._client = redis.Redis.from_url(
                settings.url.get_secret_value(),
                socket_timeout=settings.timeout,
                socket_connect_timeout=settings.timeout,
                # A connection that the server closed while it was idle is no failure; waiting is not for the client.
                retry=Retry(NoBackoff(), 1),
            )
            self._client.connection_pool.make_connection()
        except (ValueError, TypeError, RedisError):
            raise ConfigurationError(
                f"handlers.{name}.url: the part after ? has an option that cannot be used"
            ) from None

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def send(self, messages: Sequence[Message]) -> None:
        """Append all messages or none, in one round trip. Raises Undelivered or Rejected."""
        transaction = self._client.pipeline(transaction=True)
        for message in messages:
            fields: dict[Any, Any] = {
                "id": message.identity,
                **message.attributes,
                "data": message.body,
            }
            transaction.xadd(message.topic, fields, maxlen=self._max_length)
        try:
            answers = transaction.execute(raise_on_error=False)
        except RedisError as error:
            # Also for a command that the server would not even queue, as when it is full or a replica.
            raise Undelivered(type(error).__name__) from None
        for answer in answers:
            if isinstance(answer, Exception):
                raise Rejected(str(answer).partition(" ")[0])
