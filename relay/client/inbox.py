"""Remembers what a consumer has handled, in the transaction of the effects, so that a second delivery has none.

`relay.client.schema.install_inbox` has the SQL of the table. It has one unique index for all ids, and no partitions by
time: an id that comes again after a boundary of partitions would not be recognised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
)
from datetime import timedelta
from typing import Any

from relay.client import sessions
from relay.client.errors import EventInvalid

_MAX_BYTES = 1000
"""Of an id, and of a consumer's name: an entry of the index has 2,700 bytes at most."""
_HEADERS = ("idempotency-key", "webhook-id", "ce-id", "ce_id")
_RECORD = sessions.Statement(
    "insert into relay.inbox (consumer, id) select consumer, id from json_to_record(cast(",
    " as text)::json) as given (consumer text, id text) on conflict do nothing",
)
_PURGE = sessions.Statement(
    "delete from relay.inbox where ctid = any (array (select i.ctid from json_to_record(cast(",
    " as text)::json) as given (consumer text, seconds float8) join relay.inbox as i using (consumer) "
    "where i.handled_at < clock_timestamp() - make_interval(secs => given.seconds) "
    "order by i.handled_at limit 10000 for update of i skip locked))",
)


class Inbox:
    """The inbox of a consumer, whose name keeps its ids apart from those of others in the same table.

    A delivery whose id another transaction has recorded and not yet committed waits for that transaction. At
    REPEATABLE READ and SERIALIZABLE it is then a serialization failure, and the caller tries again.
    """

    def __init__(self, consumer: str, *, keep: timedelta = timedelta(days=7)) -> None:
        """Keep ids for `keep` at least, after which `purge` may delete them.

        Raises EventInvalid for a name that is no text of 1 to 1000 bytes, ValueError for `keep` that is not positive.
        """
        self._consumer = _text("consumer", consumer)
        if keep <= timedelta(0):
            raise ValueError("keep: must be positive")
        self._keep = keep

    def once(self, session: Any, event_id: object) -> Once:
        """Return a context manager, of either kind, that yields whether this is the first delivery of the id.

        If its block raises, the id and the effects of the block are undone together, whatever the caller does then.
        Raises NotInTransaction, UnknownSession, EventInvalid, and what the driver raises.
        """
        if event_id is None:
            # As a text it would be the id of every other delivery that has none.
            raise EventInvalid("event_id: is None: the delivery has no id")
        text = (
            event_id.decode(errors="surrogateescape") if isinstance(event_id, bytes) else event_id
        )
        parameter = {"consumer": self._consumer, "id": _text("event_id", str(text))}
        return Once(session, json.dumps(parameter))

    def purge(self, session: Any) -> int:
        """Delete at most 10,000 ids that were handled longer ago than `keep`; return how many."""
        return sessions.execute(session, _PURGE, self._purged())

    async def purge_async(self, session: Any) -> int:
        """Do what `purge` does, in an asynchronous session."""
        return await sessions.execute_async(session, _PURGE, self._purged())

    def _purged(self) -> str:
        return json.dumps({"consumer": self._consumer, "seconds": self._keep.total_seconds()})


class Once(AbstractContextManager[bool], AbstractAsyncContextManager[bool]):
    """What `Inbox.once` returns. May be entered once."""

    def __init__(self, session: Any, parameter: str) -> None:
        self._session, self._parameter = session, parameter
        self._stack, self._async_stack = ExitStack(), AsyncExitStack()

    def __bool__(self) -> bool:
        """Raise TypeError: an object is true, and its delivery would never be the second."""
        raise TypeError("write `with inbox.once(…) as first`, and ask `first` in the block")

    def __enter__(self) -> bool:
        with ExitStack() as stack:
            stack.enter_context(sessions.savepoint(self._session))
            first = sessions.execute(self._session, _RECORD, self._parameter) == 1
            self._stack = stack.pop_all()
        return first

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    async def __aenter__(self) -> bool:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(await sessions.savepoint_async(self._session))
            first = await sessions.execute_async(self._session, _RECORD, self._parameter) == 1
            self._async_stack = stack.pop_all()
        return first

    async def __aexit__(self, *error: Any) -> None:
        await self._async_stack.__aexit__(*error)


def key(headers: Mapping[str, Any]) -> str:
    """Return the key of a delivery from the headers that relay gives it, whatever their case.

    Raises EventInvalid without one.
    """
    found = {str(name).lower(): value for name, value in headers.items()}
    for name in _HEADERS:
        value = found.get(name)
        if value:
            return value.decode() if isinstance(value, bytes) else str(value)
    raise EventInvalid(f"headers: have none of {', '.join(_HEADERS)}")


def _text(name: str, value: str) -> str:
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= _MAX_BYTES or "\0" in value:
        raise EventInvalid(
            f"{name}: must have 1 to {_MAX_BYTES} bytes of UTF-8, and no NUL character"
        )
    return value
