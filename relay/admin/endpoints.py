"""Lists, disables, pauses, enables and tests endpoints that data choose, while relay runs or not: `relay endpoint`."""

from __future__ import annotations

import asyncio
import re
from typing import Annotated

from relay.admin import acts
from relay.admin.acts import Acting, Done, Given, Missing, Subject
from relay.admin.connections import reach_target
from relay.config.addresses import require_http
from relay.config.handlers import HttpHandler
from relay.config.settings import Settings
from relay.faults import ConfigurationError, Drop, describe
from relay.pipeline.routing import BatchRouter
from relay.sinks import Attempt, Target, build_sinks, deliver_once
from relay.source.given import encode
from relay.store import endpoints
from relay.store.endpoints import StoredEndpoint

ENDPOINT = Subject("endpoint", "SINK", "The sink: a handler's name.", of_sink=True)
_ID = re.compile(r"[0-9a-f]{16}")


def listed(settings: Settings, sink: str | None = None, limit: int = 1_000) -> list[StoredEndpoint]:
    """List the endpoints of a sink, or of all, that have failed for a minute, are disabled or paused, these first.

    Raises ConfigurationError.
    """
    if sink is not None:
        _require(settings, sink)
    with reach_target(settings) as target:
        return endpoints.listed(target, settings.group, sink, limit)


EndpointName = Annotated[
    str,
    Given(
        "The endpoint: its id, as `relay endpoint list` shows it, or its URL.",
        is_argument=True,
        examples=("6b1f0c9a2d3e4f50", "https://hooks.example/events"),
    ),
]


@acts.declare(ENDPOINT, "disable", path="endpoints/disable")
def disable(act: Acting, endpoint: EndpointName) -> Done:
    """Disable an endpoint: what is for it becomes dead letters at once, until it is enabled."""
    return _disabled(act, endpoint, "disabled", waits=False)


@acts.declare(ENDPOINT, "pause", path="endpoints/hold")
def pause(act: Acting, endpoint: EndpointName) -> Done:
    """Pause an endpoint: what is for it waits in order, until it is enabled."""
    return _disabled(act, endpoint, "paused", waits=True)


def _disabled(act: Acting, endpoint: str, state: str, waits: bool) -> Done:
    id, address = _identified(act, endpoint)
    before = endpoints.find(act.target, act.group, act.name, id)
    if before is None and address is None:
        raise _unknown(act, id, ", or give its URL")
    if not endpoints.disable(act.target, act.group, act.name, id, address or "", act.reason, waits):
        return Done(f"the endpoint was {state} already", None)
    shown = before.address if before else address
    return Done(f"endpoint {id} ({shown}) is {state}", {"endpoint": id})


@acts.declare(ENDPOINT, "enable", path="endpoints/enable")
def enable(act: Acting, endpoint: EndpointName) -> Done:
    """Enable an endpoint that is disabled or paused, and say what is to be done with what has come meanwhile."""
    id, _ = _identified(act, endpoint)
    before = endpoints.find(act.target, act.group, act.name, id)
    if before is None:
        raise _unknown(act, id)
    if not endpoints.enable(act.target, act.group, act.name, id):
        return Done("the endpoint was neither disabled nor paused", None)
    meanwhile = (
        f"what waits for it is tried soon, or at once: `relay deferred run --sink {act.name}`"
        if before.waits
        else f"what has become dead letters meanwhile: `relay dlq replay --sink {act.name} --exception {id}`"
    )
    return Done(f"endpoint {id} ({before.address}) is enabled\n{meanwhile}", {"endpoint": id})


ACTS = (disable, pause, enable)


def _unknown(act: Acting, id: str, more: str = "") -> Missing:
    return Missing(
        f"sink {act.name} has no endpoint {id} that fails, is disabled or paused: see `relay endpoint list {act.name}`"
        f"{more}"
    )


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
        fault = ConfigurationError if sink in settings.handlers else Missing
        raise fault(
            f"handlers.{sink}: is no sink whose endpoints data choose (such sinks: {', '.join(known) or 'none'})"
        )
    return handler


def _identified(act: Acting, endpoint: str) -> tuple[str, str | None]:
    """The id of an endpoint that is given by its id or URL; with a URL, also its scheme, host and port.

    Where `endpoints.id` names a column, only by that id.
    """
    if _require(act.settings, act.name).has_ids:
        return endpoint, ""
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
