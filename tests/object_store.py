"""A small object store that speaks what deltalake and PyIceberg need of S3, in a process of its own: `python -m`.

deltalake keeps Python's lock while it writes or removes an object, so a store in the same process would wait for it.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase, BytesIO
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from uuid import uuid4
from xml.sax.saxutils import escape, unescape

ROOT = Path(__file__).resolve().parents[1]


class _Store(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.lock = threading.Lock()
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.commits = 0
        self.loses = 0
        """Of the commits to a Delta table, every n-th is stored and not answered; 0: each is answered."""


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Store

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def _asked(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query, True).items()}
        return unquote(parts.path).lstrip("/"), query

    def _body(self) -> bytes:
        if "chunked" in (self.headers.get("Transfer-Encoding") or ""):
            data = _chunks(self.rfile)
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        is_signed = (self.headers.get("x-amz-content-sha256") or "").startswith("STREAMING")
        return _chunks(BytesIO(data)) if is_signed else data

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _xml(self, text: str) -> None:
        self._answer(200, f'<?xml version="1.0"?>{text}'.encode(), Content_Type="application/xml")

    def do_PUT(self) -> None:
        key, query = self._asked()
        data, server = self._body(), self.server
        with server.lock:
            if "uploadId" in query:
                server.parts[query["uploadId"]][int(query["partNumber"])] = data
                return self._answer(200, ETag='"part"')
            if self.headers.get("If-None-Match") == "*" and key in server.objects:
                return self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            server.objects[key] = data
            is_commit = "/_delta_log/" in key and key.endswith(".json")
            server.commits += is_commit
            is_lost = is_commit and server.loses and not server.commits % server.loses
        if is_lost:
            self.close_connection = True
            self.connection.close()
            return
        self._answer(200, ETag='"whole"')

    def do_POST(self) -> None:
        key, query = self._asked()
        data, server = self._body(), self.server
        if not key:
            server.loses = int(data)
            return self._answer(200)
        if "uploads" in query:
            upload = uuid4().hex
            server.parts[upload] = {}
            return self._xml(
                f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            )
        if "delete" in query:
            names = re.findall("<Key>(.*?)</Key>", data.decode())
            for name in names:
                server.objects.pop(f"{key.rstrip('/')}/{unescape(name)}", None)
            gone = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
            return self._xml(f"<DeleteResult>{gone}</DeleteResult>")
        parts = server.parts.pop(query["uploadId"])
        server.objects[key] = b"".join(parts[number] for number in sorted(parts))
        return self._xml(
            '<CompleteMultipartUploadResult><ETag>"whole"</ETag></CompleteMultipartUploadResult>'
        )

    def do_DELETE(self) -> None:
        self.server.objects.pop(self._asked()[0], None)
        self._answer(204)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        key, query = self._asked()
        if "/" not in key.rstrip("/"):
            return self._list(key.rstrip("/"), query)
        data = self.server.objects.get(key)
        if data is None:
            return self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        facts = {"ETag": '"whole"', "Last_Modified": formatdate(usegmt=True)}
        if self.command == "HEAD":
            self.send_response(200)
            for name, value in (*facts.items(), ("Content_Length", str(len(data)))):
                self.send_header(name.replace("_", "-"), value)
            return self.end_headers()
        span = self.headers.get("Range")
        if span is None:
            return self._answer(200, data, **facts)
        first, _, last = span.removeprefix("bytes=").partition("-")
        start = int(first) if first else len(data) - int(last)
        end = min(int(last), len(data) - 1) if first and last else len(data) - 1
        facts["Content_Range"] = f"bytes {start}-{end}/{len(data)}"
        return self._answer(206, data[start : end + 1], **facts)

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        prefix, after = query.get("prefix", ""), query.get("start-after", "")
        delimiter = query.get("delimiter", "")
        with self.server.lock:
            objects = dict(self.server.objects)
        files, folders = [], set()
        for path, data in sorted(objects.items()):
            key = path.removeprefix(f"{bucket}/")
            if not key.startswith(prefix) or key <= after:
                continue
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
                continue
            files.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>2020-01-01T00:00:00.000Z</LastModified>"
                f"<ETag>whole</ETag><Size>{len(data)}</Size></Contents>"
            )
        common = [
            f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>"
            for each in sorted(folders)
        ]
        self._xml(
            f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(files + common)}</ListBucketResult>"
        )


def _chunks(stream: BufferedIOBase) -> bytes:
    """The data of chunks, each after a line with its size; checksums may follow, up to an empty line."""
    found = b""
    while size := int(stream.readline().split(b";")[0], 16):
        found += stream.read(size)
        stream.readline()
    while stream.readline().strip():
        pass
    return found


class ObjectStore:
    """A running store. `options` are deltalake's for it, `properties` PyIceberg's."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.options = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "here",
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }
        self.properties = {
            "s3.endpoint": self.url,
            "s3.region": "here",
            "s3.access-key-id": "id",
            "s3.secret-access-key": "secret",
        }

    def lose(self, every: int) -> None:
        """Store every n-th commit to a Delta table without an answer; 0: answer each."""
        from urllib.request import Request, urlopen

        with urlopen(Request(self.url, str(every).encode(), method="POST"), timeout=10):
            pass


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Run an empty store."""
    process = Popen(
        [sys.executable, "-m", "tests.object_store"],
        cwd=ROOT,
        stdin=DEVNULL,
        stdout=PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield ObjectStore(int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait(30)


if __name__ == "__main__":
    store = _Store()
    print(store.server_port, flush=True)
    store.serve_forever()
