"""The workloads: which contenders take part in each, and how they are set up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import live
from bench.backlog import STATEMENTS
from bench.outbox import Outbox
from bench.peers import Peer
from bench.peers.psycopg2_loop import Psycopg2Loop
from bench.peers.recvlogical import Recvlogical
from bench.peers.subscription import Subscription
from bench.relaying import NOTE, NOTE_AND_INSERT, NOTHING, Relay
from bench.results import Contender, Workload
from relay.embedded import Cluster

SYNC_ON = Subscription("on")


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is done. Quick runs take less of everything, and expensive contenders once."""

    cluster: Cluster
    folder: Path
    quick: bool
    rounds: int
    peers: Sequence[str] = ()

    def takes(self, peer: str) -> bool:
        """Whether the command line asks for this one; relay always takes part."""
        return peer.startswith("relay") or not self.peers or peer.startswith(tuple(self.peers))

    def often(self, expensive: bool) -> int:
        """Rounds of a contender."""
        return 1 if self.quick and expensive else self.rounds


def _drain(plan: Plan, name: str, peers: Sequence[tuple[Peer, bool]], against: Peer, effect: bool) -> Workload:
    transactions = 8_000 if plan.quick else 40_000
    outbox = Outbox(plan.cluster, name.replace("-", "_"))
    backlog = outbox.publish(transactions)

    def contender(peer: Peer, expensive: bool) -> Contender:
        return Contender(
            peer.name,
            lambda: {"events/s": peer.drain(outbox, backlog, plan.folder, effect)},
            plan.often(expensive),
            against.name,
            peer.unavailable(),
        )

    taken = [contender(peer, expensive) for peer, expensive in peers if plan.takes(peer.name)]
    return Workload(name, f"{backlog.events:,} events in {transactions:,} commits", taken)


def drain_noop(plan: Plan) -> Workload:
    """A backlog to a handler that does nothing."""
    peers: list[tuple[Peer, bool]] = [
        (Recvlogical(), False),
        (Psycopg2Loop(), False),
        (Relay("relay inline", NOTHING), False),
        (Relay("relay on Spark", NOTHING, spark=True), True),
    ]
    return _drain(plan, "drain-noop", peers, Recvlogical(), effect=False)


def drain_apply(plan: Plan) -> Workload:
    """A backlog into a table, a row for each event."""
    peers: list[tuple[Peer, bool]] = [
        (SYNC_ON, False),
        (Subscription("off"), False),
        (Psycopg2Loop(), True),
        *((Relay(f"relay inline, {each}", STATEMENTS[each]), False) for each in STATEMENTS),
        *((Relay(f"relay on Spark, {each}", STATEMENTS[each], spark=True), True) for each in STATEMENTS),
    ]
    return _drain(plan, "drain-apply", peers, SYNC_ON, effect=True)


WORKLOADS: dict[str, Callable[[Plan], Workload]] = {
    "drain-noop": drain_noop,
    "drain-apply": drain_apply,
}
