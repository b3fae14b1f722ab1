"""The sink of `type: http` whose endpoints data choose: by templates over events, and over the rows of a lookup."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from hashlib import sha256
from itertools import groupby

from relay.config.addresses import AddressTemplate
from relay.config.fields import Row, has_name
from relay.config.handlers import HttpHandler, is_header_value
from relay.faults import (
    ConfigurationError,
    DestinationRefused,
    Drop,
    EndpointRejected,
    Rejected,
    SecretUnavailable,
    Unauthorized,
    Undelivered,
)
from relay.model.events import Event, Transaction
from relay.sinks import ATTEMPT, Target, ToEndpoints
from relay.sinks.endpoint_lookup import Lookup
from relay.sinks.endpoints import FRESH_SECONDS, EndpointId, Endpoints
from relay.sinks.http import AddressNotPublic, Http, HttpAddress, http_address, key_of
from relay.sinks.http_connections import Resolver

LONGEST_ID = 100
"""The most characters of an endpoint's id, which is a part of ordering keys."""
_PATTERN = re.compile(r'[^\s,{}"]+')
MOST_KNOWN = 10_000
"""How many addresses are remembered as they were parsed, each of about two kilobytes."""


def sink(name: str, settings: HttpHandler, target: Target | None) -> HttpEndpoints:
    """The sink of `type: http` whose keys have templates. Raises ConfigurationError as that of `relay.sinks.http`."""
    return HttpEndpoints(name, settings, target)


def identity_of(to: HttpAddress) -> EndpointId:
    """What identifies the endpoint of a destination."""
    digest = sha256(str(to.url).encode()).hexdigest()[:16]
    return EndpointId(digest, f"{to.url.scheme}://{to.url.raw_authority}")


def _takes(patterns: str | None, event_type: str) -> bool:
    """Whether an endpoint takes events of a type: one of its patterns, in an array or a text, matches it."""
    if patterns is None:
        return True
    return any(fnmatchcase(event_type, each) for each in _PATTERN.findall(patterns))


@dataclass(frozen=True, slots=True)
class _Post:
    """Events that go to one endpoint."""

    id: EndpointId
    to: HttpAddress
    events: Sequence[Event]


class HttpEndpoints(Http):
    """Posts each event, or each transaction, to the endpoint that its data choose, or to one of several."""

    def __init__(self, name: str, settings: HttpHandler, target: Target | None) -> None:
        """Raises ConfigurationError where a certificate or the environment's proxy cannot be used."""
        if target is None:
            raise ConfigurationError(f"handlers.{name}.url: a template needs the target")
        self._fixed: HttpAddress | None = None
        self._url: AddressTemplate | None = None
        super().__init__(name, settings)
        self._headers = {
            key.partition(".")[2].lower(): template
            for key, template in settings.header_templates.items()
        }
        self._secrets = settings.secret_templates
        own = settings.endpoints
        self._lookup = Lookup(name, own, target) if own is not None and own.select else None
        self._id = settings.endpoints_or_default.id
        self._types = settings.endpoints_or_default.types
        self._endpoints = Endpoints(name, settings, target)
        self._known: OrderedDict[str, tuple[EndpointId, HttpAddress]] = OrderedDict()

    def _open(self) -> None:
        settings = self._settings
        if has_name(settings.url):
            self._url = AddressTemplate(settings.url)
        else:
            self._fixed = self._destination_of(settings.url)
        self._identifies_itself = True
        self._open_clients(Resolver())

    async def close(self) -> None:
        """Close the connections."""
        await super().close()
        await self._endpoints.close()
        if self._lookup is not None:
            self._lookup.close()

    def resume(self, series: str) -> None:
        """Forget the states of endpoints: another process may have worked the sink."""
        super().resume(series)
        self._endpoints.reset()

    async def deliver(self, transaction: Transaction) -> None:
        """Post the events, in order, each to its endpoint.

        Raises Drop if none has an endpoint, EndpointFailed, EndpointRejected, Rejected, Undelivered if it is not known
        which endpoint an event has, and ToEndpoints if endpoints have ids and the attempt is to none of them.
        """
        if self._fixed is not None:
            await self._deliver_to_one(transaction)
            return
        await self._endpoints.refresh()
        posts = await self._chosen_posts(transaction)
        # Before the first one, since what is posted before a fault is posted again.
        for id in dict.fromkeys(each.id for each in posts):
            if self._endpoints.of(id).disabled is not None:
                await self._endpoints.refresh(FRESH_SECONDS)
            self._endpoints.require(self._endpoints.of(id))
        for each in posts:
            await self._deliver(each)

    async def _deliver_to_one(self, transaction: Transaction) -> None:
        """Post the events to the URL of the configuration: its faults are the sink's."""
        for each in await self._chosen_posts(transaction):
            for identity, headers, body in self._requests(each.events):
                try:
                    await self._post(each.to, identity, headers, body)
                except Unauthorized:
                    if self._lookup is not None:
                        # The row may have other credentials meanwhile.
                        self._lookup.forget(each.events[0])
                    raise

    async def _chosen_posts(self, transaction: Transaction) -> list[_Post]:
        """What is posted where. Whatever data lack or get wrong is the fault of one endpoint.

        Raises Drop, EndpointRejected and Undelivered.
        """
        try:
            return await self._posts(transaction)
        except EndpointRejected:
            raise
        except Rejected as error:
            raise EndpointRejected(str(error), detail=error.detail) from None
        except UnicodeError:
            raise EndpointRejected("a value of the endpoint is not valid Unicode") from None

    async def _posts(self, transaction: Transaction) -> list[_Post]:
        chosen: list[tuple[EndpointId, HttpAddress, Event]] = []
        rows = [(event, row) for event in transaction.events for row in await self._rows(event)]
        attempt = ATTEMPT.get(None)
        only = None if attempt is None else attempt.endpoint
        if self._id is not None and only is None and rows:
            raise ToEndpoints(dict.fromkeys(self._identity(row) for _, row in rows))
        for event, row in rows:
            if self._id is None or self._identity(row) == only:
                chosen.append((*self._chosen(event, row), event))
        if not chosen:
            raise Drop(
                "endpoints.select returns no endpoint"
                if only is None
                else f"the endpoint {only} is gone, or takes no such event"
            )
        posts = []
        for (id, to), some in groupby(chosen, key=lambda each: each[:2]):
            posts.append(_Post(id, to, [event for *_, event in some]))
        if self._settings.each == "transaction" and len(posts) > 1:
            raise Rejected(
                "the events of the transaction have different endpoints, and each: transaction needs one: use each: "
                "event"
            )
        return posts

    async def _rows(self, event: Event) -> Sequence[Row]:
        """The rows of the endpoints that take an event."""
        if self._lookup is None:
            return ({},)
        rows = await self._lookup.rows(event)
        if self._types is not None:
            kind = event.text("event_type") or ""
            rows = [each for each in rows if _takes(each.get(self._types), kind)]
        # An endpoint may have several rows, such as one for each subscription.
        return (
            rows if self._id is None else [*{self._identity(each): each for each in rows}.values()]
        )

    def _identity(self, row: Row) -> str:
        assert self._id is not None  # noqa: S101
        identity = row.get(self._id)
        if not identity or len(identity) > LONGEST_ID or not identity.isprintable():
            raise EndpointRejected(
                f"endpoints.id: the row's {self._id} is not a text of 1 to {LONGEST_ID} printable characters"
            )
        return identity

    def _chosen(self, event: Event, row: Row) -> tuple[EndpointId, HttpAddress]:
        if self._url is not None:
            id, to = self._parsed(self._address(event, row))
        else:
            id, to = self._parsed(self._settings.url)
        if self._headers or self._secrets:
            headers, keys = self._filled(event, row)
            to = replace(to, headers={**to.headers, **headers}, keys=keys)
        return (id if self._id is None else EndpointId(self._identity(row), id.address)), to

    def _address(self, event: Event, row: Row) -> str:
        assert self._url is not None  # noqa: S101
        try:
            return self._url.address(event, row)
        except Rejected as error:
            raise EndpointRejected(str(error)) from None

    def _parsed(self, address: str) -> tuple[EndpointId, HttpAddress]:
        known = self._known.get(address)
        if known is not None:
            self._known.move_to_end(address)
            return known
        try:
            to = self._fixed or http_address(address)
        except ValueError as error:
            raise EndpointRejected(f"url: {error}") from None
        known = self._known[address] = identity_of(to), to
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        return known

    def _filled(self, event: Event, row: Row) -> tuple[dict[str, str], tuple[bytes, ...]]:
        headers = {}
        for name, template in self._headers.items():
            text = template.text(event, row)
            if text is None:
                raise EndpointRejected(f"headers.{name}: the endpoint's row lacks a value")
            if not is_header_value(text):
                raise EndpointRejected(
                    f"headers.{name}: the value is not printable ASCII on one line"
                )
            headers[name] = text
        texts = [text for each in self._secrets if (text := each.text(event, row))]
        if self._secrets and not texts:
            raise EndpointRejected("signing_secret: the endpoint's row has none")
        try:
            return headers, tuple(map(key_of, texts))
        except SecretUnavailable as error:
            raise EndpointRejected(str(error)) from None

    async def _deliver(self, post: _Post) -> None:
        endpoint, host = self._endpoints.of(post.id), post.events[0].text("host_id")
        for identity, headers, body in self._requests(post.events):
            async with self._endpoints.turn(endpoint):
                try:
                    await self._post(post.to, identity, headers, body)
                except SecretUnavailable:
                    # One of the handler's own.
                    raise
                except (AddressNotPublic, Rejected) as error:
                    raise await self._endpoints.refused(endpoint, host, error) from None
                except DestinationRefused as error:
                    raise await self._endpoints.gone(endpoint, host, error) from None
                except Undelivered as error:
                    if isinstance(error, Unauthorized) and self._lookup is not None:
                        # The row may have other credentials meanwhile.
                        self._lookup.forget(post.events[0])
                    raise await self._endpoints.failed(endpoint, host, error) from None
                self._endpoints.succeeded(endpoint, host)
