"""What the tests of your own handlers and sinks use."""

import sys

if "pytest" in sys.modules:
    # So that a failed test of the contract shows the values that it compares.
    sys.modules["pytest"].register_assert_rewrite("relay.testing.sink_contract")

from relay.testing.calls import (
    GivenDeliveries,
    GivenDelivery,
    deliver,
    deliver_async,
    deliver_batch,
    handle,
    transaction,
)
from relay.testing.configured import routed, run
from relay.testing.memory_sink import MemoryAttempt, MemorySink
from relay.testing.sagas import SagaRun
from relay.testing.sink_contract import SinkContract

__all__ = [
    "GivenDeliveries",
    "GivenDelivery",
    "MemoryAttempt",
    "MemorySink",
    "SagaRun",
    "SinkContract",
    "deliver",
    "deliver_async",
    "deliver_batch",
    "handle",
    "routed",
    "run",
    "transaction",
]
