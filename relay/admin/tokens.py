"""Creates, lists and revokes the tokens of the HTTP API: `relay token`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

import psycopg

from relay.admin import acts
from relay.admin.acts import Acting, Done, Missing, Subject
from relay.admin.connections import reach_source, reach_target
from relay.admin.publish import require_own_outbox
from relay.config.settings import Settings
from relay.faults import ConfigurationError
from relay.store import actions, api_tokens
from relay.store.api_tokens import EVERY, RIGHTS, TokenRow
from relay.store.connections import Connection

PREFIX = "relay_"
"""The beginning of a token, by which programs that look for secrets recognise one."""
_BYTES = 32
_NAME_CHARACTERS = 100
_MOST_PATTERNS = 1_000


class UnknownToken(Missing):
    """There is no token of this name that is not revoked."""


def listed(settings: Settings) -> list[TokenRow]:
    """Read the tokens, also those that are revoked. Raises ConfigurationError, psycopg.Error."""
    require_own_outbox(settings)
    with reach_source(settings) as source:
        return api_tokens.listed(source)


def newest(settings: Settings, limit: int, before: int | None = None) -> list[TokenRow]:
    """Read tokens, the newest first, or those before an id. Raises ConfigurationError, psycopg.Error."""
    require_own_outbox(settings)
    with reach_source(settings) as source:
        return api_tokens.newest(source, limit, before)


def create(
    settings: Settings,
    name: str,
    rights: Sequence[str],
    hosts: Sequence[str],
    types: Sequence[str],
    expires: timedelta | None,
    reason: str | None,
) -> str:
    """Create a token, and return it: nobody can read it again. Raises ConfigurationError, psycopg.Error."""
    require_own_outbox(settings)
    if not 1 <= len(name) <= _NAME_CHARACTERS or not name.isprintable():
        raise ConfigurationError(f"the name of a token has 1 to {_NAME_CHARACTERS} characters")
    for right in rights:
        if right not in RIGHTS:
            raise ConfigurationError(
                f"{right!r} is no right of a token: name {' or '.join(RIGHTS)}"
            )
    if not rights:
        raise ConfigurationError(f"a token needs a right: name {' or '.join(RIGHTS)}")
    for what, given in (("host", hosts), ("event type", types)):
        if not 1 <= len(given) <= _MOST_PATTERNS or not all(map(str.isprintable, given)):
            raise ConfigurationError(f"a token needs 1 to {_MOST_PATTERNS} patterns of the {what}")
    named = [host if host == EVERY else _host(host) for host in hosts]
    token = PREFIX + secrets.token_urlsafe(_BYTES)
    detail = {"token": name, "rights": [*rights], "hosts": named, "types": [*types]}
    # One that cannot be recorded is not made, since nobody would see it.
    with reach_target(settings) as target, reach_source(settings) as source, source.transaction():
        try:
            api_tokens.create(source, name, token, rights, named, types, expires)
        except psycopg.errors.UniqueViolation:
            raise ConfigurationError(
                f"there is a token {name!r}: revoke it first, or take another name"
            ) from None
        actions.record(target, settings.group, "", "token create", reason, detail)
    return token


@acts.declare(Subject("token", "NAME", "The name of the token."), "revoke", asks=True, removes=True)
def revoke(act: Acting) -> Done:
    """Revoke a token: within ten seconds it is refused, and what it streams ends."""
    require_own_outbox(act.settings)
    if not api_tokens.revoke(act.source, act.name):
        raise _unknown(act.source, act.name)
    act.ask(
        "Within ten seconds it is refused, and what it streams ends. It cannot be made valid again."
    )
    return Done(f"token {act.name} is revoked")


ACTS = (revoke,)


def _unknown(source: Connection, name: str) -> UnknownToken:
    known = ", ".join(each.name for each in api_tokens.listed(source) if each.revoked_at is None)
    return UnknownToken(f"there is no token {name!r} (tokens: {known or 'none'})")


def _host(text: str) -> str:
    """Return a host's id as PostgreSQL prints it. Raises ConfigurationError."""
    try:
        return str(UUID(text))
    except ValueError:
        raise ConfigurationError(f"{text!r} is no host: name its UUID, or {EVERY}") from None
