"""What users of SQS, SNS and Pub/Sub report of their clients, tried on relay's sinks.

aws/aws-sdk-go-v2#3519, JasperFx/wolverine#3503: a batch is stored in part, and what was not is lost.
psd401/aistudio#1525, boto/boto3#1953: one character makes SQS refuse a batch for ever.
vmihailenco/taskq#36, hookdeck/outpost#845, floci-io/floci#894: a batch is larger than the service takes.
aws/aws-sdk-js#3807, boto/boto3#2524: credentials expire in a process that runs for long.
localstack/localstack#9923, erlcloud/erlcloud#785: groups and identities of FIFO that the service refuses.
aio-libs/aiobotocore#21, boto/botocore#2014: a kept connection that the service has closed.
aws/aws-sdk-js#367: a connection that was lost without a word hangs.
cockroachdb/cockroach#36982: a request of Pub/Sub has messages of several ordering keys.
redpanda-data/connect#2935, googleapis/nodejs-pubsub#1524: an ordering key stays paused after a failure.
googleapis/google-cloud-python#3154, googleapis/google-cloud-cpp#5408: a batch is larger than 10 MB.
googleapis/java-pubsub#365: messages of a key overtake one that failed.
aws-samples/sample-voice-of-customer-datalake#259, bbc/sqs-consumer#807: what an answer leaves out is taken for sent.
GoogleCloudPlatform/google-cloud-powershell#402: a topic answers with fewer ids than there are messages.
aws/aws-cli#4469, aws/aws-toolkit-vscode#1649, go-to-k/cdk-real-drift#1319: credentials never come, and all hangs.
vectordotdev/vector#9005, async-aws/aws#1227: a throttled request has status 403 and is the sender's fault.
suredone/qdone#69, cuda-networks/django-eb-sqs#42: a queue that was made again is not found.
mozilla/gcp-ingestion#313, snowplow/enrich#485, googleapis/google-cloud-go#8179: an attribute fails a batch for ever.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from pydantic import TypeAdapter

from relay.config.handlers import HandlerSettings
from relay.faults import DestinationRefused, Rejected, Unauthorized, Undelivered
from relay.sinks import Sink, build_sinks
from tests.clouds import CREDENTIALS, KEY, Aws, PubSub, Refusal
from tests.sinks import make_event, transaction


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "GOOGLE_CLOUD_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relay.sinks.brokers.FRESH_SECONDS", 0.0)


@pytest.fixture(params=["sqs", "sns"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def aws() -> Iterator[Aws]:
    with Aws() as server:
        yield server


@pytest.fixture
def pubsub() -> Iterator[PubSub]:
    with PubSub() as server:
        yield server


def using(settings: dict[str, Any], do: Callable[[Sink], Awaitable[None]]) -> None:
    """Build a sink and run a test with it, in an event loop of its own."""
    found: Any = TypeAdapter(HandlerSettings).validate_python({"timeout": 5, **settings})
    ((sink, _),) = build_sinks({"cloud": found}).values()

    async def run() -> None:
        try:
            await do(sink)
        finally:
            async with asyncio.timeout(5):
                await sink.close()

    asyncio.run(run())


def of(aws: Aws, kind: str, **more: Any) -> dict[str, Any]:
    return aws.sqs(**more) if kind == "sqs" else aws.sns(**more)


def amounts(events: list[dict[str, Any]], host: int = 1) -> list[int]:
    hosted = [each for each in events if each["hostid"].endswith(f"{host:012d}")]
    return [int(each["data"]["amount"]) for each in hosted]


def numbered(*numbers: int, host: int = 1, **fields: str) -> Any:
    return transaction(*(make_event(number, host, **fields) for number in numbers))


async def delivered(sink: Sink, *transactions: Any) -> list[Any]:
    return await asyncio.gather(*map(sink.deliver, transactions), return_exceptions=True)


def test_what_a_batch_does_not_store_is_retried_and_nothing_else_fails(aws: Aws, kind: str) -> None:
    failing = True

    def fault(entry: dict[str, Any]) -> str | None:
        return "InternalError" if failing and '"amount": 7}' in entry["body"] else None

    aws.fault = fault

    async def deliver(sink: Sink) -> None:
        nonlocal failing
        results = await delivered(sink, *(numbered(each, host=each) for each in range(30)))
        failed = [each for each, found in enumerate(results) if found is not None]
        assert failed == [7]
        assert isinstance(results[7], Undelivered)
        failing = False
        await sink.deliver(numbered(7, host=7))

    using(of(aws, kind), deliver)
    assert sorted(each["data"]["amount"] for each in aws.events()) == list(range(30))
    assert len(aws.requests) < 30


@pytest.mark.parametrize("left_out", ["entries", "all"])
def test_what_an_answer_does_not_mention_is_not_stored(aws: Aws, kind: str, left_out: str) -> None:
    aws.silent = lambda entry: left_out == "all" or '"amount": 7}' in entry["body"]

    async def deliver(sink: Sink) -> None:
        results = await delivered(sink, *(numbered(each, host=each) for each in range(30)))
        failed = [each for each, found in enumerate(results) if found is not None]
        assert failed == ([7] if left_out == "entries" else list(range(30)))
        assert all(type(results[each]) is Undelivered for each in failed)
        aws.silent = lambda entry: False
        await sink.deliver(numbered(7, host=7))

    using(of(aws, kind), deliver)
    assert 7 in [each["data"]["amount"] for each in aws.events()]


def test_a_message_that_is_throttled_is_retried_though_the_answer_blames_the_sender(
    aws: Aws, kind: str
) -> None:
    aws.fault = lambda entry: "RequestThrottled"
    aws.blames = lambda code: True

    async def deliver(sink: Sink) -> None:
        with pytest.raises(Undelivered, match="RequestThrottled"):
            await sink.deliver(numbered(1))

    using(of(aws, kind), deliver)


def test_a_queue_that_was_made_again_is_found(aws: Aws) -> None:
    async def deliver(sink: Sink) -> None:
        await sink.deliver(numbered(1))
        aws.name, name = "elsewhere.fifo", aws.name
        aws.refusal = Refusal("AWS.SimpleQueueService.NonExistentQueue")
        with pytest.raises(Undelivered, match="NonExistentQueue"):
            await sink.deliver(numbered(2))
        aws.name, aws.refusal = name, None
        looked_up = aws.looked_up
        await sink.deliver(numbered(2))
        assert aws.looked_up == looked_up + 1

    using(aws.sqs(), deliver)
    assert amounts(aws.events()) == [1, 2]


def test_credentials_that_never_come_are_an_outage_that_passes(
    aws: Aws, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    hangs = tmp_path / "hangs"
    hangs.touch()
    program = tmp_path / "program"
    program.write_text(
        f"#!/bin/sh\nif [ -e {hangs} ]; then exec sleep 600; fi\n"
        f"""echo '{{"Version": 1, "AccessKeyId": "{KEY}", "SecretAccessKey": "test"}}'\n"""
    )
    program.chmod(0o755)
    config = tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = {program}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setattr("relay.sinks.batching.OPEN_SECONDS", 2.0)

    async def deliver(sink: Sink) -> None:
        began = time.monotonic()
        results = await delivered(sink, *(numbered(each, host=each) for each in range(40)))
        assert all(isinstance(each, Undelivered) for each in results)
        assert time.monotonic() - began < 15
        hangs.unlink()
        await sink.deliver(numbered(1))

    using(of(aws, kind), deliver)
    assert amounts(aws.events()) == [1]


def test_what_is_sent_again_is_in_a_fifo_queue_once(aws: Aws, kind: str) -> None:
    async def deliver(sink: Sink) -> None:
        sink.resume("one")
        await sink.deliver(numbered(1, 2))
        await sink.deliver(numbered(1, 2))
        assert amounts(aws.events()) == [1, 2]
        # What an operator sends again is no repetition.
        sink.resume("two")
        await sink.deliver(numbered(1, 2))

    using(of(aws, kind), deliver)
    assert amounts(aws.events()) == [1, 2, 1, 2]


def test_a_character_that_xml_has_not_arrives(aws: Aws, kind: str) -> None:
    text = "".join(map(chr, (0xFFFE, 0xFFFF, 0x7F, 0x85, 0x1F600)))

    async def deliver(sink: Sink) -> None:
        await sink.deliver(numbered(1, payload=f'{{"amount": 1, "text": "{text}\\u0007"}}'))

    using(of(aws, kind), deliver)
    (event,) = aws.events()
    assert event["data"]["text"] == f"{text}\u0007"


def test_a_message_that_is_refused_concerns_no_other(aws: Aws, kind: str) -> None:
    aws.fault = lambda entry: "InvalidParameterValue" if "poison" in entry["body"] else None

    async def deliver(sink: Sink) -> None:
        first, refused, last = await delivered(
            sink, numbered(1), numbered(2, host=2, payload='"poison"'), numbered(3, host=3)
        )
        assert first is last is None
        assert isinstance(refused, Rejected)

    using(of(aws, kind), deliver)
    assert len(aws.events()) == 2


def test_messages_that_are_too_large_together_are_sent_apart(aws: Aws, kind: str) -> None:
    """The queue takes less than relay puts into a request: its MaximumMessageSize counts for a whole request."""
    aws.largest = 100_000

    def large(number: int, size: int) -> Any:
        payload = f'{{"amount": {number}, "text": "{"x" * size}"}}'
        return make_event(number, number, payload=payload)

    async def deliver(sink: Sink) -> None:
        results = await delivered(
            sink,
            transaction(*(large(each, 40_000) for each in range(1, 6))),
            transaction(large(6, 40_000)),
            transaction(large(7, 200_000)),
            transaction(large(8, 40_000)),
        )
        assert results[0] is results[1] is results[3] is None
        assert isinstance(results[2], Rejected)
        assert "TooLong" in str(results[2])

    using(of(aws, kind), deliver)
    assert sorted(each["data"]["amount"] for each in aws.events()) == [1, 2, 3, 4, 5, 6, 8]


def test_a_request_has_at_most_256_kilobytes_and_a_larger_message_is_alone(
    aws: Aws, kind: str
) -> None:
    sizes = [90_000, 90_000, 90_000, 400_000, 90_000, *[10] * 12]

    async def deliver(sink: Sink) -> None:
        events = [
            make_event(number, payload=f'"{"x" * size}"', aggregate_id=str(number))
            for number, size in enumerate(sizes)
        ]
        await sink.deliver(transaction(*events))

    using(of(aws, kind, key="{aggregate_id}"), deliver)
    assert [len(each) for each in aws.requests] == [2, 1, 1, 10, 3]


def test_keys_of_any_form_make_groups_that_are_accepted(aws: Aws, kind: str) -> None:
    async def deliver(sink: Sink) -> None:
        for number, key in enumerate(("a b", "é", "x" * 200, "plain-1", "a_b")):
            await sink.deliver(numbered(number, aggregate_id=key))

    using(of(aws, kind, key="{aggregate_id}"), deliver)
    groups = [each["group"] for each in aws.messages]
    assert len(set(groups)) == 5
    assert groups[3] == "plain-1"


def test_messages_of_a_group_keep_their_order(aws: Aws, kind: str) -> None:
    async def deliver(sink: Sink) -> None:
        async def host(number: int) -> None:
            for first in range(0, 30, 3):
                await sink.deliver(numbered(first, first + 1, first + 2, host=number))

        await asyncio.gather(*map(host, range(1, 33)))

    using(of(aws, kind), deliver)
    found = aws.events()
    for number in range(1, 33):
        assert amounts(found, number) == list(range(30))
    # Deliveries share requests, of which each has one message of a group.
    assert all(len({each["group"] for each in some}) == len(some) for some in aws.requests)
    assert len(aws.requests) < 32 * 30


def test_a_standard_queue_gets_neither_group_nor_identity(kind: str) -> None:
    async def deliver(sink: Sink) -> None:
        await sink.deliver(numbered(1))

    with Aws("orders") as aws:
        using(of(aws, kind), deliver)
        assert [(each["group"], each["identity"]) for each in aws.messages] == [("", "")]


@pytest.mark.usefixtures("_at_once")
def test_credentials_that_expire_are_read_again(
    aws: Aws, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def write(key: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = test\n")

    async def deliver(sink: Sink) -> None:
        with pytest.raises(Unauthorized, match="NoCredentialsError"):
            await sink.deliver(numbered(0))
        write(KEY)
        await sink.deliver(numbered(1))
        aws.key = "AKIANEXT"
        with pytest.raises(Unauthorized, match="InvalidClientTokenId"):
            await sink.deliver(numbered(2))
        write("AKIANEXT")
        await sink.deliver(numbered(2))

    using(of(aws, kind), deliver)
    assert amounts(aws.events()) == [1, 2]


@pytest.mark.parametrize(
    ("code", "status"),
    [("ExpiredToken", 403), ("AccessDenied", 403), ("SignatureDoesNotMatch", 403)],
)
def test_a_refusal_of_credentials_costs_no_attempt(aws: Aws, code: str, status: int) -> None:
    aws.refusal = Refusal(code, status)

    async def deliver(sink: Sink) -> None:
        with pytest.raises(Unauthorized, match=code):
            await sink.deliver(numbered(1))
        aws.refusal = None
        await sink.deliver(numbered(1))

    using(aws.sqs(), deliver)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("ThrottlingException", 400),
        ("RequestThrottled", 403),
        ("ServiceUnavailable", 503),
        ("InternalFailure", 500),
        ("KMS.DisabledException", 400),
    ],
)
def test_a_service_that_does_not_want_now_is_an_outage(
    aws: Aws, kind: str, code: str, status: int
) -> None:
    aws.refusal = Refusal(code, status)

    async def deliver(sink: Sink) -> None:
        with pytest.raises(Undelivered, match=code) as raised:
            await sink.deliver(numbered(1))
        assert type(raised.value) is Undelivered

    using(of(aws, kind), deliver)


def test_a_destination_that_is_missing_is_an_outage(aws: Aws, kind: str) -> None:
    elsewhere = of(aws, kind)["topic"].replace("orders", "nowhere")

    async def deliver(sink: Sink) -> None:
        with pytest.raises(Undelivered, match=r"NonExistentQueue|InvalidParameter") as raised:
            await sink.deliver(numbered(1))
        assert type(raised.value) is Undelivered

    using(of(aws, kind, topic=elsewhere), deliver)


def test_without_a_region_the_sink_stops_and_says_what_to_do(aws: Aws) -> None:
    async def deliver(sink: Sink) -> None:
        with pytest.raises(DestinationRefused, match="set the key region or AWS_REGION"):
            await sink.deliver(numbered(1))

    using(aws.sqs(region=None), deliver)


def test_an_event_does_not_choose_a_url(aws: Aws) -> None:
    async def deliver(sink: Sink) -> None:
        with pytest.raises(Rejected):
            await sink.deliver(numbered(1, aggregate_id=f"{aws.url}/other/queue"))

    using(aws.sqs(topic="{aggregate_id}"), deliver)
    assert aws.requests == []


def test_a_url_needs_no_look_up(aws: Aws) -> None:
    async def deliver(sink: Sink) -> None:
        await sink.deliver(numbered(1))

    using(aws.sqs(topic=f"{aws.url}/123456789012/orders.fifo"), deliver)
    assert amounts(aws.events()) == [1]


def test_connections_that_the_service_closes_are_replaced(aws: Aws, kind: str) -> None:
    async def deliver(sink: Sink) -> None:
        for number in range(5):
            await sink.deliver(numbered(number))
            aws.drop()
            # Until the client has read the end of the connection.
            await asyncio.sleep(0.02)

    using(of(aws, kind), deliver)
    assert amounts(aws.events()) == list(range(5))


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("of_kind", ["sqs", "sns", "pubsub"])
def test_a_destination_that_refuses_relay_disturbs_no_request_to_another(of_kind: str) -> None:
    """Deliveries in flight go on while the client is opened again, since the credentials may be new."""

    async def deliver(sink: Sink) -> None:
        await sink.deliver(numbered(0, aggregate_id="orders"))
        server.delay = 0.3
        others = asyncio.create_task(
            delivered(sink, *(numbered(each, host=each, aggregate_id="orders") for each in (1, 2)))
        )
        await asyncio.sleep(0.1)
        with pytest.raises(Unauthorized):
            await sink.deliver(numbered(3, host=3, aggregate_id="forbidden"))
        assert await others == [None, None]
        await sink.deliver(numbered(4, host=4, aggregate_id="orders"))

    with PubSub() if of_kind == "pubsub" else Aws() as server:
        settings = server.handler() if isinstance(server, PubSub) else of(server, of_kind)
        topic = settings["topic"].replace("orders", "{aggregate_id}")
        using({**settings, "topic": topic}, deliver)
        assert [each["data"]["amount"] for each in server.events()] in ([0, 1, 2, 4], [0, 2, 1, 4])


def test_a_destination_that_refuses_relay_opens_few_clients(aws: Aws) -> None:
    async def deliver(sink: Sink) -> None:
        results = []
        for number in range(200):
            results += await delivered(
                sink,
                numbered(number, aggregate_id="orders"),
                numbered(number, host=2, aggregate_id="forbidden"),
            )
        assert {type(each) for each in results} == {type(None), Unauthorized}

    using(aws.sqs(topic="{aggregate_id}.fifo"), deliver)
    assert amounts(aws.events()) == list(range(200))
    assert aws.connections < 20


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


@pytest.mark.parametrize("of_kind", ["sqs", "sns", "pubsub"])
def test_a_service_that_says_nothing_is_an_outage_in_time(silent: int, of_kind: str) -> None:
    server = PubSub() if of_kind == "pubsub" else Aws()
    server.port = silent
    settings = server.handler() if isinstance(server, PubSub) else of(server, of_kind)

    async def deliver(sink: Sink) -> None:
        for _ in range(2):
            began = time.monotonic()
            results = await delivered(sink, *(numbered(each, host=each) for each in range(100)))
            assert all(isinstance(each, Undelivered) for each in results)
            assert time.monotonic() - began < 20

    using({**settings, "timeout": 0.3}, deliver)


# Google Pub/Sub


def test_a_request_has_messages_of_one_ordering_key(pubsub: PubSub) -> None:
    async def deliver(sink: Sink) -> None:
        async def host(number: int) -> None:
            for first in range(0, 30, 3):
                await sink.deliver(numbered(first, first + 1, first + 2, host=number))

        await asyncio.gather(*map(host, range(1, 33)))
        mixed = transaction(*(make_event(each, each % 3 + 100) for each in range(30)))
        await sink.deliver(mixed)

    using(pubsub.handler(), deliver)
    found = pubsub.events()
    for number in range(1, 33):
        assert amounts(found, number) == list(range(30))
    assert amounts(found, 100) == list(range(0, 30, 3))
    assert all(len({each.ordering_key for each in request}) == 1 for request in pubsub.requests)


def test_without_a_key_deliveries_share_requests(pubsub: PubSub) -> None:
    async def deliver(sink: Sink) -> None:
        await delivered(sink, *(numbered(each, host=each) for each in range(1_000)))

    using(pubsub.handler(key=None), deliver)
    assert len(pubsub.events()) == 1_000
    assert len(pubsub.requests) < 200
    assert {each.ordering_key for each in pubsub.messages} == {""}


def test_a_key_that_has_failed_goes_on(pubsub: PubSub) -> None:
    async def deliver(sink: Sink) -> None:
        await sink.deliver(numbered(1))
        pubsub.status = grpc.StatusCode.UNAVAILABLE
        for _ in range(3):
            with pytest.raises(Undelivered, match="ServiceUnavailable"):
                await sink.deliver(numbered(2, 3))
        pubsub.status = None
        await sink.deliver(numbered(2, 3))

    using(pubsub.handler(), deliver)
    assert amounts(pubsub.events()) == [1, 2, 3]


def test_a_request_has_at_most_9_megabytes_and_a_larger_message_is_refused_alone(
    pubsub: PubSub,
) -> None:
    def large(number: int, size: int) -> Any:
        return make_event(number, payload=f'{{"amount": {number}, "text": "{"x" * size}"}}')

    async def deliver(sink: Sink) -> None:
        await sink.deliver(transaction(*(large(each, 3_900_000) for each in range(4))))
        refused, other = await delivered(
            sink, transaction(large(5, 10_100_000)), numbered(6, host=2)
        )
        assert isinstance(refused, Rejected)
        assert other is None

    using(pubsub.handler(), deliver)
    assert amounts(pubsub.events()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("status", "fault"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, Unauthorized),
        (grpc.StatusCode.UNAUTHENTICATED, Unauthorized),
        (grpc.StatusCode.NOT_FOUND, Undelivered),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Undelivered),
        (grpc.StatusCode.INTERNAL, Undelivered),
        (grpc.StatusCode.ABORTED, Undelivered),
        (grpc.StatusCode.FAILED_PRECONDITION, Undelivered),
    ],
)
def test_what_a_status_means(
    pubsub: PubSub, status: grpc.StatusCode, fault: type[Exception]
) -> None:
    pubsub.status = status

    async def deliver(sink: Sink) -> None:
        with pytest.raises(fault) as raised:
            await sink.deliver(numbered(1))
        assert type(raised.value) is fault
        pubsub.status = None
        await sink.deliver(numbered(1))

    using(pubsub.handler(), deliver)


def test_a_key_or_a_topic_that_the_service_cannot_have_is_refused(pubsub: PubSub) -> None:
    async def deliver(sink: Sink) -> None:
        with pytest.raises(Rejected, match="more than 1024 bytes"):
            await sink.deliver(numbered(1, aggregate_id="é" * 600))

    async def deliver_elsewhere(sink: Sink) -> None:
        with pytest.raises(Rejected, match="is not projects"):
            await sink.deliver(numbered(1))

    using(pubsub.handler(key="{aggregate_id}"), deliver)
    using(pubsub.handler(topic="orders-{event_type}"), deliver_elsewhere)


def test_binary_messages_have_their_attributes_beside_them(pubsub: PubSub) -> None:
    async def deliver(sink: Sink) -> None:
        await sink.deliver(numbered(1))

    using(pubsub.handler(mode="binary"), deliver)
    (message,) = pubsub.messages
    assert bytes(message.data) == b'{"amount": 1}'
    assert message.attributes["ce-type"] == "order.placed"
    assert message.attributes["content-type"] == "application/json"


def test_an_answer_with_fewer_ids_confirms_nothing(pubsub: PubSub) -> None:
    pubsub.lacks = 1

    async def deliver(sink: Sink) -> None:
        with pytest.raises(Undelivered, match="not one id for each message"):
            await sink.deliver(numbered(1, 2))
        pubsub.lacks = 0
        await sink.deliver(numbered(1, 2))

    using(pubsub.handler(), deliver)
    assert amounts(pubsub.events()) == [1, 2, 1, 2]


def test_a_message_with_an_attribute_that_is_refused_concerns_no_other(pubsub: PubSub) -> None:
    async def deliver(sink: Sink) -> None:
        first, refused, last = await delivered(
            sink,
            numbered(1),
            numbered(2, host=1, event_type="x" * 1_025),
            numbered(3, host=1),
        )
        assert isinstance(refused, Rejected)
        assert first is last is None

    using(pubsub.handler(mode="binary", key=None), deliver)
    assert len(pubsub.messages) == 2


def test_no_credentials_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "missing.json"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")

    async def deliver(sink: Sink) -> None:
        with pytest.raises(Unauthorized, match="DefaultCredentialsError"):
            await sink.deliver(numbered(1))

    using({"type": "pubsub", "topic": PubSub.TOPIC}, deliver)
