"""Services of clouds that tests fail, stop and restart: Amazon SQS and SNS, and Google Pub/Sub.

`Aws` is a server of relay's own with the rules that real queues and topics have been seen to have; `Moto` is moto's.
`PubSub` is a server made of Google's published stubs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qsl
from xml.sax.saxutils import escape

import boto3
import grpc
from google.pubsub_v1.types import PublishRequest, PublishResponse

from relay.demo.embedded import free_port
from tests.brokers import CloudEvent
from tests.outbox import wait_until

REGION = "eu-west-1"
KEY = "AKIATEST"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": "test"}
ACCOUNT = "123456789012"

_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_GROUP = re.compile(r"[!-~]{1,128}")

Entry = dict[str, Any]


class Refusal(Exception):
    """A request is refused with a code, in a status."""

    def __init__(self, code: str, status: int = 400, message: str = "") -> None:
        self.code, self.status, self.message = code, status, message


class _HttpServer(ThreadingHTTPServer):
    request_queue_size = 1_000
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore the errors of clients."""


class Aws:
    """The methods of SQS and SNS that send, as a queue or topic that keeps what it gets while the server is down."""

    def __init__(self, name: str = "orders.fifo") -> None:
        self.name = name
        self.messages: list[Entry] = []
        """What is stored, as its entries."""
        self.requests: list[list[Entry]] = []
        """The entries of each request that was not refused."""
        self.largest = 1_048_576
        """The bytes of a request, and of a message."""
        self.fault: Callable[[Entry], str | None] = lambda entry: None
        """The code with which the server fails to store an entry."""
        self.refusal: Refusal | None = None
        """What every request gets."""
        self.silent: Callable[[Entry], bool] = lambda entry: False
        """Whether the answer does not mention an entry, which is not stored."""
        self.blames: Callable[[str], bool] = lambda code: code.startswith("Invalid")
        """Whether a code is a fault of the sender."""
        self.delay = 0.0
        """The seconds until a request is answered."""
        self.forbidden = "forbidden.fifo"
        """A queue or topic that nobody may use."""
        self.looked_up = 0
        """How often the address of the queue was asked for."""
        self.key = KEY
        """The access key that is valid."""
        self.port = free_port()
        self.connections = 0
        self._seen: set[str] = set()
        self._lock = threading.Lock()
        self._server: _HttpServer | None = None
        self._sockets: list[Any] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def sqs(self, **more: Any) -> dict[str, Any]:
        """The settings of a handler of type sqs."""
        return {
            "type": "sqs",
            "topic": self.name,
            "region": REGION,
            "endpoint": self.url,
            **more,
        }

    def sns(self, **more: Any) -> dict[str, Any]:
        """The settings of a handler of type sns."""
        arn = f"arn:aws:sns:{REGION}:{ACCOUNT}:{self.name}"
        return {**self.sqs(), "type": "sns", "topic": arn, **more}

    def events(self) -> list[CloudEvent]:
        with self._lock:
            return [json.loads(each["body"]) for each in self.messages]

    def start(self) -> None:
        self._server = _HttpServer(("127.0.0.1", self.port), self._handler())
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def kill(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
            self.drop()

    @property
    def is_up(self) -> bool:
        return self._server is not None

    def drop(self) -> None:
        """End all connections."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(2)
        self._sockets.clear()

    def store(self, entries: list[Entry]) -> dict[str, str]:
        """Store entries of a request; returns the codes of those that failed, by their ids. Raises Refusal."""
        time.sleep(self.delay)
        if self.refusal is not None:
            raise self.refusal
        if not 1 <= len(entries) <= 10:
            raise Refusal("AWS.SimpleQueueService.TooManyEntriesInBatchRequest")
        if sum(len(each["body"].encode()) for each in entries) > self.largest:
            raise Refusal("AWS.SimpleQueueService.BatchRequestTooLong")
        failed: dict[str, str] = {}
        with self._lock:
            self.requests.append(entries)
            for each in entries:
                if self.name.endswith(".fifo") and not (
                    _GROUP.fullmatch(each["group"]) and _GROUP.fullmatch(each["identity"])
                ):
                    failed[each["id"]] = "InvalidParameterValue"
                elif _FORBIDDEN.search(each["body"]):
                    failed[each["id"]] = "InvalidMessageContents"
                elif self.silent(each):
                    failed[each["id"]] = ""
                elif code := self.fault(each):
                    failed[each["id"]] = code
                elif each["identity"] not in self._seen:
                    self._seen |= {each["identity"]} if each["identity"] else set()
                    self.messages.append(each)
        return failed

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        aws = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                aws.connections += 1
                aws._sockets.append(self.connection)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                is_json = "x-amz-target" in self.headers
                try:
                    key = re.search(r"Credential=([^/]*)/", self.headers.get("authorization", ""))
                    if key is None or key[1] != aws.key:
                        raise Refusal("InvalidClientTokenId", 403)
                    answer = (
                        _sqs(aws, self.headers["x-amz-target"], body)
                        if is_json
                        else _sns(aws, body)
                    )
                    self._answer(200, answer)
                except Refusal as refusal:
                    self._answer(refusal.status, _refused(refusal, is_json), refusal.code)

            def _answer(self, status: int, text: str, code: str = "") -> None:
                data = text.encode()
                self.send_response(status)
                if code:
                    self.send_header("x-amzn-query-error", f"{code};Sender")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        return Handler


def _sqs(aws: Aws, target: str, body: bytes) -> str:
    """A request of SQS in its protocol of JSON."""
    given = json.loads(body)
    if target == "AmazonSQS.GetQueueUrl":
        aws.looked_up += 1
        if aws.refusal is not None:
            raise aws.refusal
        if given["QueueName"] == aws.forbidden:
            raise Refusal("AccessDenied", 403)
        if given["QueueName"] != aws.name:
            raise Refusal("AWS.SimpleQueueService.NonExistentQueue")
        return json.dumps({"QueueUrl": f"{aws.url}/{ACCOUNT}/{aws.name}"})
    entries = [
        {
            "id": each["Id"],
            "body": each["MessageBody"],
            "group": each.get("MessageGroupId", ""),
            "identity": each.get("MessageDeduplicationId", ""),
            "attributes": each.get("MessageAttributes", {}),
        }
        for each in given["Entries"]
    ]
    failed = aws.store(entries)
    return json.dumps(
        {
            "Successful": [
                {"Id": each["id"], "MessageId": "1", "MD5OfMessageBody": ""}
                for each in entries
                if each["id"] not in failed
            ],
            "Failed": [
                {"Id": identity, "Code": code, "SenderFault": aws.blames(code)}
                for identity, code in failed.items()
                if code
            ],
        }
    )


def _sns(aws: Aws, body: bytes) -> str:
    """A request of SNS in its protocol of forms and XML."""
    given = dict(parse_qsl(body.decode(), keep_blank_values=True))
    assert given["Action"] == "PublishBatch"
    if given["TopicArn"].endswith(f":{aws.forbidden}"):
        raise Refusal("AuthorizationError", 403)
    if not given["TopicArn"].endswith(f":{aws.name}"):
        raise Refusal("InvalidParameter", message="Invalid parameter: TopicArn")
    prefix = "PublishBatchRequestEntries.member"
    count = len({name.split(".")[2] for name in given if name.startswith(prefix)})
    entries = [
        {
            "id": given[f"{prefix}.{number}.Id"],
            "body": given[f"{prefix}.{number}.Message"],
            "group": given.get(f"{prefix}.{number}.MessageGroupId", ""),
            "identity": given.get(f"{prefix}.{number}.MessageDeduplicationId", ""),
        }
        for number in range(1, count + 1)
    ]
    failed = aws.store(entries)
    done = "".join(
        f"<member><Id>{each['id']}</Id><MessageId>1</MessageId></member>"
        for each in entries
        if each["id"] not in failed
    )
    faults = "".join(
        f"<member><Id>{identity}</Id><Code>{code}</Code>"
        f"<SenderFault>{str(aws.blames(code)).lower()}</SenderFault></member>"
        for identity, code in failed.items()
        if code
    )
    return (
        '<PublishBatchResponse xmlns="http://sns.amazonaws.com/doc/2010-03-31/"><PublishBatchResult>'
        f"<Successful>{done}</Successful><Failed>{faults}</Failed>"
        "</PublishBatchResult></PublishBatchResponse>"
    )


def _refused(refusal: Refusal, is_json: bool) -> str:
    if is_json:
        return json.dumps({"__type": refusal.code, "message": refusal.message})
    return (
        '<ErrorResponse xmlns="http://sns.amazonaws.com/doc/2010-03-31/"><Error><Type>Sender</Type>'
        f"<Code>{refusal.code}</Code><Message>{escape(refusal.message)}</Message></Error></ErrorResponse>"
    )


class Moto:
    """moto's server, a process of its own, with a FIFO queue that subscribes to a FIFO topic."""

    def __init__(self, name: str = "orders.fifo") -> None:
        self.name = name
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._events: list[CloudEvent] = []

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(self._answers)
        self._queues, topics = self._client("sqs"), self._client("sns")
        made = self._queues.create_queue(QueueName=self.name, Attributes={"FifoQueue": "true"})
        self.url = str(made["QueueUrl"])
        self.topic = topics.create_topic(Name=self.name, Attributes={"FifoTopic": "true"})[
            "TopicArn"
        ]
        found = self._queues.get_queue_attributes(QueueUrl=self.url, AttributeNames=["QueueArn"])
        topics.subscribe(
            TopicArn=self.topic,
            Protocol="sqs",
            Endpoint=found["Attributes"]["QueueArn"],
            Attributes={"RawMessageDelivery": "true"},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def handler(self, kind: str) -> dict[str, Any]:
        topic = self.name if kind == "sqs" else self.topic
        return {"type": kind, "topic": topic, "region": REGION, "endpoint": self.endpoint}

    def events(self) -> list[CloudEvent]:
        """All events so far, in the order of each group."""
        while True:
            found = self._queues.receive_message(QueueUrl=self.url, MaxNumberOfMessages=10)
            messages = found.get("Messages", [])
            if not messages:
                return self._events
            self._events += [json.loads(each["Body"]) for each in messages]
            handles = [
                {"Id": str(index), "ReceiptHandle": each["ReceiptHandle"]}
                for index, each in enumerate(messages)
            ]
            self._queues.delete_message_batch(QueueUrl=self.url, Entries=handles)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.endpoint}/moto-api/", timeout=5):
                return True
        except OSError:
            return False

    def _client(self, service: str) -> Any:
        return boto3.client(
            service,
            region_name=REGION,
            endpoint_url=self.endpoint,
            aws_access_key_id=KEY,
            aws_secret_access_key="test",
        )


class PubSub:
    """The method Publish of Pub/Sub; it stores all messages of a request, or refuses it."""

    TOPIC = "projects/shop/topics/orders"

    def __init__(self) -> None:
        self.port = free_port()
        self.messages: list[Any] = []
        self.requests: list[list[Any]] = []
        """The messages of each request that was not refused."""
        self.status: grpc.StatusCode | None = None
        """What every request gets; None: as it is."""
        self.refuses: Callable[[], bool] = lambda: False
        """Whether the next request is refused as one too many."""
        self.silent = threading.Event()
        """While it is set, nothing is answered."""
        self.delay = 0.0
        """The seconds until a request is answered."""
        self.forbidden = self.TOPIC.replace("orders", "forbidden")
        """A topic that nobody may use."""
        self.lacks = 0
        """How many ids an answer lacks."""
        self._lock = threading.Lock()
        self._server: Any = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.silent.clear()
        self.kill()

    def handler(self, **more: Any) -> dict[str, Any]:
        """The settings of a handler for it."""
        endpoint = f"http://127.0.0.1:{self.port}"
        return {"type": "pubsub", "topic": self.TOPIC, "endpoint": endpoint, **more}

    def start(self) -> None:
        """Start the server, unless it runs."""
        if self._server is not None:
            return
        method = grpc.unary_unary_rpc_method_handler(
            self._publish,
            request_deserializer=PublishRequest.deserialize,
            response_serializer=PublishResponse.serialize,
        )
        options = [("grpc.max_receive_message_length", 20_000_000)]
        self._server = grpc.server(ThreadPoolExecutor(8), options=options)
        self._server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(
                    "google.pubsub.v1.Publisher", {"Publish": method}
                )
            ]
        )
        self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def kill(self) -> None:
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None

    def events(self) -> list[CloudEvent]:
        with self._lock:
            return [json.loads(each.data) for each in self.messages]

    def _publish(self, request: Any, context: Any) -> Any:
        while self.silent.is_set() and context.is_active():
            threading.Event().wait(0.05)
        if self.status is not None:
            context.abort(self.status, "as the test wants")
        if self.refuses():
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")
        if request.topic == self.forbidden:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "nobody may")
        time.sleep(self.delay)
        messages = list(request.messages)
        if len({each.ordering_key for each in messages}) > 1:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "a request has messages of one ordering key"
            )
        if len(messages) > 1_000 or PublishRequest.pb(request).ByteSize() > 10_000_000:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is too large")
        if any(
            len(text.encode()) > 1_024 for each in messages for text in each.attributes.values()
        ):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "an attribute is too long")
        with self._lock:
            self.requests.append(messages)
            self.messages += messages
        return PublishResponse(message_ids=["1"] * (len(messages) - self.lacks))
