"""The rows of `relay.api_tokens`, the tokens of the HTTP API. A token itself is stored nowhere, only its digest."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any

import psycopg
from psycopg.rows import class_row

RIGHTS = ("read", "publish")
"""What a token can give a right to."""
EVERY = "*"
"""The host that stands for all of them."""

_COLUMNS = "id, name, rights, hosts, types, created_at, expires_at, revoked_at, last_used_at"


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A token, and what it gives a right to. `types` are globs."""

    id: int
    name: str
    rights: list[str]
    hosts: list[str]
    types: list[str]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


def digest(token: str) -> bytes:
    """Return the SHA-256 of a token. It has 256 random bits, so that no slower hash is needed."""
    return sha256(token.encode("utf-8", "replace")).digest()


def create(
    source: psycopg.Connection[Any],
    name: str,
    token: str,
    rights: Sequence[str],
    hosts: Sequence[str],
    types: Sequence[str],
    expires: timedelta | None,
) -> None:
    """Store a token. Raises psycopg.errors.UniqueViolation if one of this name is not revoked, and psycopg.Error."""
    source.execute(
        "insert into relay.api_tokens (name, digest, rights, hosts, types, expires_at)"
        " values (%s, %s, %s, %s, %s, now() + %s)",
        (name, digest(token), list(rights), list(hosts), list(types), expires),
    )


def revoke(source: psycopg.Connection[Any], name: str) -> bool:
    """Revoke the token of a name; return whether there was one that was not revoked. Raises psycopg.Error."""
    revoked = source.execute(
        "update relay.api_tokens set revoked_at = now() where name = %s and revoked_at is null",
        (name,),
    )
    return revoked.rowcount > 0


def listed(source: psycopg.Connection[Any]) -> list[TokenRow]:
    """Read all tokens, in the order of their names. Raises psycopg.Error."""
    with source.cursor(row_factory=class_row(TokenRow)) as cursor:
        return cursor.execute(
            f"select {_COLUMNS} from relay.api_tokens order by name, id"  # noqa: S608
        ).fetchall()


def newest(source: psycopg.Connection[Any], limit: int, before: int | None) -> list[TokenRow]:
    """Read tokens, the newest first, or those before an id. Raises psycopg.Error."""
    with source.cursor(row_factory=class_row(TokenRow)) as cursor:
        return cursor.execute(
            f"select {_COLUMNS} from relay.api_tokens"  # noqa: S608
            " where %(before)s::bigint is null or id < %(before)s order by id desc limit %(limit)s",
            {"before": before, "limit": limit},
        ).fetchall()


def valid(source: psycopg.Connection[Any]) -> dict[bytes, tuple[TokenRow, str]]:
    """Read the tokens that are neither revoked nor expired, by digest, each with the sender of its requests.

    The sender is the same for all tokens of a name, one after the other, and a secret, which the name is not: the
    digest of the first of them. Raises psycopg.Error.
    """
    rows = source.execute(
        f"select digest, {_COLUMNS}, sender from relay.api_tokens"  # noqa: S608
        " join (select distinct on (name) name, encode(digest, 'hex') as sender"
        " from relay.api_tokens order by name, id) as first using (name)"
        " where revoked_at is null and (expires_at is null or expires_at > now())"
    )
    return {digest: (TokenRow(*row), sender) for digest, *row, sender in rows}


def note_use(source: psycopg.Connection[Any], ids: Collection[int]) -> None:
    """Note that tokens are in use, where that was not noted within a minute. Raises psycopg.Error."""
    source.execute(
        "update relay.api_tokens set last_used_at = now()"
        " where id = any(%s) and coalesce(last_used_at < now() - interval '1 minute', true)",
        (list(ids),),
    )
