"""A client of a service of Amazon Web Services, and what its errors mean.

Source: botocore, "Error handling" and `botocore.exceptions`.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from typing import Any

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.exceptions import (
    ClientError,
    CredentialRetrievalError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)

from relay.faults import DestinationRefused, Rejected, Unauthorized, Undelivered
from relay.sinks import batching
from relay.sinks.aws import OF_THE_EVENT, REQUESTS, AwsSettings
from relay.sinks.brokers import Renewed

_NO_CREDENTIALS = (
    CredentialRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)
_REFUSED = re.compile(
    "AccessDenied|AuthFailure|AuthorizationError|ExpiredToken|IncompleteSignature|InvalidAccessKeyId|"
    "InvalidClientTokenId|InvalidSecurity|InvalidSignature|OptInRequired|SignatureDoesNotMatch|UnrecognizedClient"
)
"""Codes of a request whose credentials the service refuses."""


class AwsClient:
    """A client of one service, opened with the first request, and again after its credentials were refused."""

    def __init__(self, service: str, settings: AwsSettings) -> None:
        """`service` is its name in the SDK."""
        self._service = service
        self._settings = settings
        self._clients = Renewed(self._open, _close)

    async def open(self) -> None:
        """Load the SDK's description of the service and open the client. Raises Undelivered."""
        try:
            await self._clients.open()
        except Exception as error:
            raise _fault(error) from None

    async def close(self) -> None:
        """Close the connections."""
        await self._clients.close()

    async def call(
        self, operation: str, parameters: dict[str, Any], *, has_entries: bool = True
    ) -> dict[str, Any]:
        """Send a request; returns the response. Raises Undelivered, and Rejected if one of its entries is at fault."""
        await self.open()
        async with self._clients.use() as opened:
            try:
                response: dict[str, Any] = await getattr(opened.client, operation)(**parameters)
            except Exception as error:
                raise _fault(error, has_entries) from None
        return response

    async def _open(self) -> _OpenClient:
        session = get_session()
        # The description of a service is a large file.
        loader = session.get_component("data_loader")
        await asyncio.to_thread(loader.load_service_model, self._service, "service-2")
        timeout = self._settings.timeout
        # Retries are the sink's: it knows which entries have failed.
        options = AioConfig(
            connect_timeout=timeout,
            read_timeout=timeout,
            max_pool_connections=REQUESTS,
            retries={"total_max_attempts": 1},
        )
        client = session.create_client(
            self._service,
            region_name=self._settings.region,
            endpoint_url=self._settings.endpoint,
            config=options,
        )
        stack = AsyncExitStack()
        # It may ask services and processes for credentials, some of which never answer.
        async with asyncio.timeout(batching.OPEN_SECONDS):
            return _OpenClient(await stack.enter_async_context(client), stack)


class _OpenClient:
    """A client of the SDK, and what closes it."""

    def __init__(self, client: Any, stack: AsyncExitStack) -> None:
        self.client = client
        self.stack = stack


async def _close(opened: _OpenClient) -> None:
    await opened.stack.aclose()


def _fault(error: Exception, has_entries: bool = False) -> Exception:
    """What the error of a whole request means: an entry may be at fault only if the request has entries."""
    if isinstance(error, Undelivered):
        return error
    if isinstance(error, _NO_CREDENTIALS):
        return Unauthorized(f"{type(error).__name__}: the SDK finds no credentials")
    if isinstance(error, NoRegionError):
        return DestinationRefused("there is no region: set the key region or AWS_REGION")
    if not isinstance(error, ClientError):
        return Undelivered(type(error).__name__)
    described = error.response.get("Error", {})
    code = str(described.get("Code", "ClientError"))
    if _REFUSED.search(code):
        return Unauthorized(f"{code}: the service refuses relay's credentials")
    is_of_event = (
        has_entries
        and OF_THE_EVENT.search(code)
        # So SNS calls a topic of another region, or none.
        and "TopicArn" not in str(described.get("Message"))
    )
    return (Rejected if is_of_event else Undelivered)(code)
