"""Reads a sink's secrets for a new connection. Errors name the key."""

from __future__ import annotations

import asyncio

from pydantic import SecretStr

from relay.config.secrets import CallSecret
from relay.faults import SecretUnavailable


def read(key: str, secret: SecretStr) -> str:
    """The text of a secret. Raises SecretUnavailable, whose message names the key."""
    try:
        return secret.get_secret_value()
    except SecretUnavailable as error:
        raise SecretUnavailable(f"{key}: {error}") from None


async def read_aside(key: str, secret: SecretStr) -> str:
    """The same in an event loop, which goes on while a function of the user's is called."""
    if isinstance(secret, CallSecret):
        return await asyncio.to_thread(read, key, secret)
    return read(key, secret)
