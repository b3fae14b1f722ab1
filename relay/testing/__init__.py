"""What the tests of your own handlers and sinks use."""

from relay.testing.calls import GivenDelivery, deliver, deliver_async, handle, transaction
from relay.testing.sink_contract import SinkContract

__all__ = ["GivenDelivery", "SinkContract", "deliver", "deliver_async", "handle", "transaction"]
