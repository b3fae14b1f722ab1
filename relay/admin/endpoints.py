"""Lists, disables, pauses, enables and tests endpoints that data choose, while relay runs or not: `relay endpoint`."""

from __future__ import annotations

import asyncio
import re

from relay.admin.connections import reach_target
from relay.config.addresses import require_http
from relay.config.handlers import HttpHandler
from relay.config.settings import Settings
from relay.faults import ConfigurationError, Drop, describe
from relay.pipeline.routing import BatchRouter
from relay.sinks import Attempt, Target, build_sinks, deliver_once
from relay.source.given import encode
from relay.store import actions, endpoints
from relay.store.endpoints import StoredEndpoint

_ID = re.compile(r"[0-9a-f]{16}")


def listed(settings: Settings, sink: str | None = None, limit: int = 1_000) -> list[StoredEndpoint]:
    """List the endpoints of a sink, or of all, that have failed for a minute, are disabled or paused, these first.

    Raises ConfigurationError.
    """
    if sink is not None:
        _require(settings, sink)
    with reach_target(settings) as target:
        return endpoints.listed(target, settings.group, sink, limit)


def set_disabled(
    settings: Settings,
    sink: str,
    endpoint: str,
    disabled: bool,
    reason: str | None,
    *,
    waits: bool = False,
) -> StoredEndpoint | None:
    """Disable an endpoint, by its id or URL, or enable it; returns it as it was before, None if it was so already.

    Where `endpoints.id` names a column, only by that id. If it `waits`, it is paused.

    An instance that runs does so within seconds. Raises ConfigurationError.
    """
    id, address = (endpoint, "") if _require(settings, sink).has_ids else _identified(endpoint)
    with reach_target(settings) as target, target.transaction():
        before = endpoints.find(target, settings.group, sink, id)
        if before is None and not (disabled and address is not None):
            raise ConfigurationError(
                f"sink {sink} has no endpoint {id} that fails, is disabled or paused: see `relay endpoint list {sink}`"
                + (", or give its URL" if disabled else "")
            )
        if disabled:
            changed = endpoints.disable(
                target, settings.group, sink, id, address or "", reason, waits
            )
        else:
            changed = endpoints.enable(target, settings.group, sink, id)
        if not changed:
            return None
        action = f"endpoint {('pause' if waits else 'disable') if disabled else 'enable'}"
        actions.record(target, settings.group, sink, action, reason, {"endpoint": id})
    return before or StoredEndpoint(sink, id, address or "", None, None, None)


def test(
    settings: Settings, sink: str, host: str, event_type: str, payload: object, endpoint: str | None
) -> dict[str | None, str]:
    """Post an event that is in no outbox to the endpoints of a host that take it, or to one of them.

    Returns for each, None where it has no id, what is wrong, and an empty text where it was accepted. Raises
    ConfigurationError.
    """
    handler = _require(settings, sink)
    given = {"host_id": host, "event_type": event_type, "payload": payload}
    try:
        transactions = encode([given], settings.source)
    except ValueError as error:
        raise ConfigurationError(f"the test event: {error}") from None
    (transaction,) = BatchRouter(settings).whole(transactions)
    attempt = Attempt((), None, 0, None, host, endpoint)
    ((built, _),) = build_sinks({sink: handler}, None, Target.of(settings)).values()

    async def deliver() -> dict[str | None, Exception | None]:
        try:
            return await deliver_once(built, transaction, attempt)
        finally:
            await built.close()

    raised = asyncio.run(deliver())
    return {each: "" if error is None else _said(error) for each, error in raised.items()}


def _said(error: Exception) -> str:
    # That of a Drop is the sink's own.
    return str(error) if isinstance(error, Drop) else describe(error)


def _require(settings: Settings, sink: str) -> HttpHandler:
    handler = settings.handlers.get(sink)
    if not isinstance(handler, HttpHandler) or not handler.has_endpoints:
        known = [
            name
            for name, each in settings.handlers.items()
            if isinstance(each, HttpHandler) and each.has_endpoints
        ]
        raise ConfigurationError(
            f"handlers.{sink}: is no sink whose endpoints data choose (such sinks: {', '.join(known) or 'none'})"
        )
    return handler


def _identified(endpoint: str) -> tuple[str, str | None]:
    """The id of an endpoint that is given by its id or URL; with a URL, also its scheme, host and port."""
    if _ID.fullmatch(endpoint):
        return endpoint, None
    # The client of HTTP is an extra.
    from relay.sinks.http import http_address
    from relay.sinks.http_endpoints import identity_of

    try:
        require_http(endpoint)
        found = identity_of(http_address(endpoint))
    except ValueError as error:
        raise ConfigurationError(
            f"the endpoint is neither an id of 16 hexadecimal digits nor a URL: {error}"
        ) from None
    return found.digest, found.address
