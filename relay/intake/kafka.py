"""Takes messages from topics of Kafka, as a member of a consumer group.

The offset of a partition is committed after the events of all messages before it, and only while the partition is
assigned as it was when they came. A partition that another member gets is dropped: its messages come to that member.

Sources: Apache Kafka documentation, "Consumer Configs"; KIP-345 (static membership), KIP-429 (cooperative rebalancing);
librdkafka, CONFIGURATION.md and "Consumer pause and resume" in its changelog (2.10).
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from relay.config.intake import KafkaSource
from relay.faults import ConfigurationError, SecretUnavailable, Unauthorized, Undelivered
from relay.intake.consuming import FETCH_MESSAGES, FETCH_SECONDS, Taken
from relay.runtime.threads import Thread
from relay.sinks.kafka import OF_CREDENTIALS, client_conf, unconnected_conf

_CLIENT_LOG = logging.getLogger("confluent_kafka")
_FETCH_BYTES = 4_000_000
"""After so many bytes no further message is taken; a single one may be larger."""
_QUEUED_KILOBYTES = 16_384
"""How much the client reads ahead."""
_CLOSING_SECONDS = 2.0
"""How long closing waits: the client may wait for a broker that is away."""
_CHECK_SECONDS = 60.0
"""How often relay asks for the topics: the client says nothing of one that was deleted."""
_REASON_SECONDS = 0.2
"""How long relay waits for the reason for which no broker has answered."""
_UNASSIGNED_SECONDS = 60.0
"""After so long without a partition the group is joined again. A member that has vanished is awaited for 45 seconds."""
_RENEW_SECONDS = 60.0
"""After so long with a broker that refuses relay, or is refused, the group is joined again, although others answer."""
_UNCOMMITTED_SECONDS = 30.0
"""After so long without a commit of offsets that succeeds the connection counts as lost."""

Partition = tuple[str, int]
"""A topic, and the number of a partition."""


class _Origin(NamedTuple):
    """Where a message is, and the number of the assignment with which it came."""

    partition: Partition
    offset: int
    leader_epoch: int | None
    assignment: int


class KafkaFeed:
    """The messages of topics."""

    def __init__(self, name: str, settings: KafkaSource) -> None:
        """Raises ConfigurationError for a setting that the client does not know."""
        self._name = name
        self._settings = settings
        self._member: _Member | None = None
        try:
            Consumer({**unconnected_conf(settings), **self._conf()}, logger=_CLIENT_LOG).close()
        except SecretUnavailable as error:
            raise ConfigurationError(f"intake.{name}.{error}") from None
        except KafkaException as error:
            raise ConfigurationError(f"intake.{name}.conf: {error.args[0].str()}") from None

    async def __aenter__(self) -> Self:
        """Join the group. Raises ConfigurationError for a topic that does not exist, Undelivered, SecretUnavailable."""
        member = await asyncio.to_thread(self._made)
        try:
            await asyncio.to_thread(member.join)
        except BaseException:
            await member.close()
            raise
        self._member = member
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave the cluster; the group keeps the member for its session timeout, in which it may come again."""
        member, self._member = self._member, None
        if member is not None:
            await member.close()

    async def fetch(self) -> Sequence[Taken]:
        """Return the messages that have come, or the next one. Raises Undelivered and ConfigurationError."""
        return await asyncio.to_thread(self._joined.fetch)

    async def acknowledge(self, taken: Sequence[Taken]) -> None:
        """Commit the offsets after messages, before which there are none that are not answered."""
        self._joined.acknowledge(taken)

    async def reject(self, taken: Taken) -> None:
        """Go on after a message, which stays in its topic."""
        self._joined.acknowledge([taken])

    async def extend(self, taken: Sequence[Taken]) -> None:
        """Stay in the group, and read no further. Raises Undelivered."""
        await asyncio.to_thread(self._joined.stay)

    async def give_back(self, taken: Sequence[Taken]) -> None:
        """Nothing: what is not committed comes again."""

    @property
    def _joined(self) -> _Member:
        if self._member is None:
            raise Undelivered("the connection is lost")
        return self._member

    def _made(self) -> _Member:
        """Return a consumer with the newest secrets. Raises Unauthorized and SecretUnavailable."""
        try:
            return _Member(
                self._name, self._settings, {**client_conf(self._settings), **self._conf()}
            )
        except KafkaException as error:
            raise Unauthorized(f"conf: {error.args[0].str()}") from None

    def _conf(self) -> dict[str, Any]:
        given = self._settings.conf
        defaults: dict[str, Any] = {
            "auto.offset.reset": "earliest",
            # One instance works an intake: another one replaces it at once, and fences it off.
            "group.instance.id": f"relay-{re.sub(r'[^A-Za-z0-9._-]', '_', self._name)}"[:249],
            "queued.max.messages.kbytes": _QUEUED_KILOBYTES,
            # How long a full queue is left alone, which is soon empty. The client's default is a second.
            "fetch.queue.backoff.ms": 50,
        }
        if "group.protocol" not in given:
            defaults["partition.assignment.strategy"] = "cooperative-sticky"
        return {
            **{key: value for key, value in defaults.items() if key not in given},
            "group.id": self._settings.group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
        }


class _Member:
    """A consumer and what is assigned to it. Its methods are called one at a time, in any thread.

    The client calls the methods that begin with `_on` within `poll` and `close`.
    """

    def __init__(self, name: str, settings: KafkaSource, conf: dict[str, Any]) -> None:
        """Raises KafkaException for a setting that the client does not know."""
        self._name = name
        self._settings = settings
        self._fault: Undelivered | None = None
        """What ends the connection, when no message comes or after some time."""
        self._faulty_since = 0.0
        self._is_down = False
        """Whether the client has said since it was asked last that no broker answers."""
        self._asked_at = time.monotonic()
        """When relay has asked for the topics."""
        self._assignments = 0
        self._assigned: dict[Partition, int] = {}
        """The partitions, each with the number of the assignment."""
        self._unassigned_since = time.monotonic()
        self._is_paused = False
        self._found: list[Taken] = []
        self._done: dict[Partition, TopicPartition] = {}
        """The offsets that are to be committed, or whose commit is not confirmed."""
        self._commits = 0
        """How many commits are in flight."""
        self._confirmed_at = time.monotonic()
        self._refusal: KafkaError | None = None
        self._consumer = Consumer(
            {**conf, "error_cb": self._on_error, "on_commit": self._on_commit},
            logger=_CLIENT_LOG,
        )

    def join(self) -> None:
        """Begin to consume. Raises Undelivered, and ConfigurationError for a topic that does not exist."""
        self._require_topics()
        self._consumer.subscribe(
            self._settings.topics,
            on_assign=self._on_assign,
            on_revoke=self._on_revoke,
            on_lost=self._on_lost,
        )

    def fetch(self) -> list[Taken]:
        """Return the messages that have come, or the next one; none after a time. Raises Undelivered."""
        if self._is_paused:
            self._consumer.resume(self._consumer.assignment())
            self._is_paused = False
        self._commit()
        size = sum(len(each.body) for each in self._found)
        while len(self._found) < FETCH_MESSAGES and size < _FETCH_BYTES:
            if (taken := self._poll(0.0 if self._found else FETCH_SECONDS)) is None:
                break
            self._found.append(taken)
            size += len(taken.body)
        self._require_commits()
        if time.monotonic() - self._asked_at > _CHECK_SECONDS:
            self._require_topics()
        if not self._found:
            self._require_progress()
        elif self._fault is not None and time.monotonic() - self._faulty_since > _RENEW_SECONDS:
            # With the newest secrets and certificates. What was found comes again.
            raise self._fault
        found, self._found = self._found, []
        return found

    def acknowledge(self, taken: Sequence[Taken]) -> None:
        """Commit the offsets after messages soon, of the partitions that are still assigned."""
        if not self._done:
            self._confirmed_at = time.monotonic()
        for each in taken:
            origin: _Origin = each.raw
            if self._assigned.get(origin.partition) == origin.assignment:
                self._done[origin.partition] = TopicPartition(
                    *origin.partition,
                    origin.offset + 1,
                    leader_epoch=origin.leader_epoch,
                )
        self._commit()

    def stay(self) -> None:
        """Answer the group, and let no message come. Raises Undelivered."""
        self._commit()
        while True:
            # Also the partitions that the call before has assigned.
            self._is_paused = True
            self._consumer.pause(self._consumer.assignment())
            if (taken := self._poll(0.0)) is None:
                return
            self._found.append(taken)

    async def close(self) -> None:
        """Commit what is to be committed, and close the connections, in the background if that takes long."""
        # Calls `_on_revoke`.
        thread = Thread(self._consumer.close, name=f"intake {self._name} closes")
        thread.start()
        await asyncio.to_thread(thread.join, _CLOSING_SECONDS)

    def _poll(self, seconds: float) -> Taken | None:
        """Return the next message. Raises Undelivered."""
        message = self._consumer.poll(seconds)
        if message is None:
            return None
        error = message.error()
        if error is not None:
            # Also of a batch that is damaged, after which the client would go on.
            raise Undelivered(_described(error, message))
        return self._taken(message)

    def _taken(self, message: Message) -> Taken:
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        assert topic is not None and partition is not None and offset is not None  # noqa: S101, PT018
        _, milliseconds = message.timestamp()
        # A topic that is made again has the same offsets, at other times.
        identity = ("kafka", topic, str(partition), str(offset), str(milliseconds))
        where = f"message {offset} of the partition {partition} of the topic {topic}"
        key = (topic, partition)
        origin = _Origin(key, offset, message.leader_epoch(), self._assigned.get(key, 0))
        return Taken(message.value() or b"", identity, where, origin)

    def _commit(self) -> None:
        """Send the offsets that are to be committed, unless a commit is in flight; poll gets its result."""
        if self._done and not self._commits:
            self._send_commit(list(self._done.values()))

    def _send_commit(self, offsets: list[TopicPartition]) -> None:
        try:
            self._consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            self._refusal = error.args[0]
        else:
            self._commits += 1

    def _require_progress(self) -> None:
        """Raise the fault because of which no message comes, if there is one."""
        if self._fault is not None:
            raise self._fault
        if self._is_down:
            self._is_down = False
            self._require_topics()
        if not self._assigned and time.monotonic() - self._unassigned_since > _UNASSIGNED_SECONDS:
            raise Undelivered(
                f"the group {self._settings.group} assigns no partition to relay: it may have other members"
            )

    def _require_commits(self) -> None:
        """Raise Undelivered if no commit has succeeded for long: what is published would be taken again."""
        if self._done and time.monotonic() - self._confirmed_at > _UNCOMMITTED_SECONDS:
            why = "no answer" if self._refusal is None else self._refusal.name()
            raise Undelivered(f"the offsets cannot be committed: {why}")

    def _require_topics(self) -> None:
        """Raise ConfigurationError for a topic that does not exist, and Undelivered if no broker answers."""
        self._asked_at = time.monotonic()
        try:
            known = self._consumer.list_topics(timeout=self._settings.timeout).topics
        except KafkaException as error:
            # Calls `_on_error`, after what the client has logged meanwhile.
            self._consumer.poll(_REASON_SECONDS)
            fault = self._fault or Undelivered(f"no broker answers: {error.args[0].name()}")
            raise fault from None
        missing = [each for each in self._settings.topics if each not in known]
        if missing:
            raise ConfigurationError(
                f"intake.{self._name}.topics: the cluster has no topic {missing[0]}, or does not show it: create it, "
                "and let relay read it"
            )

    def _on_error(self, error: KafkaError) -> None:
        if error.code() in OF_CREDENTIALS:
            self._fail(Unauthorized(f"{error.name()}: a broker refuses relay's credentials"))
        elif error.fatal():
            self._fail(Undelivered(error.name()))
        elif error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._is_down = True

    def _fail(self, fault: Undelivered) -> None:
        if self._fault is None:
            self._faulty_since = time.monotonic()
        self._fault = fault

    def _on_assign(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self._assignments += 1
        for each in partitions:
            self._assigned[each.topic, each.partition] = self._assignments

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Commit what is published of the partitions, and forget them."""
        gone = {(each.topic, each.partition) for each in partitions}
        if offsets := [offset for key, offset in self._done.items() if key in gone]:
            self._send_commit(offsets)
        self._on_lost(consumer, partitions)

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Forget partitions, which others may have already."""
        if self._is_paused:
            # The client would remember it until the partition is assigned again.
            consumer.resume(partitions)
        gone = {(each.topic, each.partition) for each in partitions}
        for key in gone:
            self._assigned.pop(key, None)
            self._done.pop(key, None)
        self._found = [each for each in self._found if each.raw.partition not in gone]
        if not self._assigned:
            self._unassigned_since = time.monotonic()

    def _on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        self._commits -= 1
        if error is not None:
            self._refusal = error
            return
        for each in partitions:
            key = (each.topic, each.partition)
            if each.error is not None:
                self._refusal = each.error
            else:
                self._confirmed_at = time.monotonic()
                # Further messages may have been published meanwhile.
                if key in self._done and self._done[key].offset == each.offset:
                    del self._done[key]


def _described(error: KafkaError, message: Message) -> str:
    """Return an error, and where it is, without a part of a message."""
    if message.topic() is None or error.fatal():
        return error.name()
    return f"{error.name()} at the partition {message.partition()} of the topic {message.topic()}"
