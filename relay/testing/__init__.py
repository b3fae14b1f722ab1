"""What the tests of your own handlers and sinks use."""

from relay.testing.calls import (
    GivenDeliveries,
    GivenDelivery,
    deliver,
    deliver_async,
    deliver_batch,
    handle,
    transaction,
)
from relay.testing.sink_contract import SinkContract

__all__ = [
    "GivenDeliveries",
    "GivenDelivery",
    "SinkContract",
    "deliver",
    "deliver_async",
    "deliver_batch",
    "handle",
    "transaction",
]
