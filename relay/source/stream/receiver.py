"""The slot as a source of batches: a thread reads its stream, assembles commits, queues them, and reports positions.

A commit that is too large to be received is noted in `relay.suspects`, and is not received again.

Source: PostgreSQL documentation, "Streaming Replication Protocol".
"""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from struct import Struct
from threading import Condition

import numpy as np
import psycopg
from psycopg.abc import Buffer

from relay.config.settings import Settings
from relay.faults import RelayError, TransientFault, describe, exceeds_limits
from relay.logs import RepeatedLines
from relay.model.batch import Batch
from relay.model.events import POSTGRES_EPOCH, Lsn
from relay.model.transactions import Transactions
from relay.model.tuples import ProtocolError
from relay.runtime.parts import Due
from relay.runtime.threads import Thread, Wakeup
from relay.source.decode.assembler import Assembler, OpenCommit
from relay.source.decode.emitted import Emitted
from relay.source.decode.layout import require_contents
from relay.source.recognition import Recognition
from relay.source.state import Received, StreamState
from relay.source.stream.commit_queue import CommitQueue
from relay.source.stream.confirmation import Confirmation
from relay.source.stream.lost_slot import Recovery
from relay.source.stream.replication import Replication
from relay.source.walsender import WalStream, end_of_stream
from relay.store.suspects import Suspects
from relay.waits import Backoff

log = logging.getLogger(__name__)

_XLOG_DATA, _KEEPALIVE = b"wk"
_DATA_START = 25  # an XLogData message is its kind, two positions and a clock before the payload
_KEEPALIVE_BODY = Struct(">QqB")
_EPOCH_SECONDS = POSTGRES_EPOCH.timestamp()

OPEN_COMMIT_SHARE = 0.5
"""The share of `source.buffer_bytes` that the rows of an open commit may take before they spill to a file."""
READ_BYTES = 2 * 1024 * 1024
"""How much is read before it is assembled, so that a fast sender cannot keep the loop from other work."""
BUSY_BYTES = 128 * 1024
"""More than this in one read means that the stream lags: the walsender is then faster if it is not woken."""
PAUSE_SECONDS = 0.01
"""How long reading pauses at most, while the stream lags and while a batch is in flight."""
IDLE_REPORT_SECONDS = 0.2
"""How long idle progress may wait before it is reported; durable batches are reported at once."""
STEADY_SECONDS = 1.0
"""How long a stream that brings nothing new has to last before it counts as working."""
RECONNECT_SECONDS = 0.1, 5.0
"""The shortest and the longest wait before the next connection; it doubles while streams end before they work."""
STANDBYS_SECONDS = 2.0
"""How often the server is asked whether its commits wait for this stream, as for a synchronous standby."""
ASK_SECONDS = 10.0
"""After how long a silence the server is asked for a reply, repeatedly until it answers."""


class FatalCommit(Exception):
    """Receiving a commit failed `deaths` times for its size, or killed the process."""

    def __init__(self, commit: OpenCommit, deaths: int) -> None:
        super().__init__(commit, deaths)
        self.commit = commit
        self.deaths = deaths


class ReceiverSuspects:
    """The receiver's notes in `relay.suspects`: while guarding, the open commit has a note.

    A note that still exists when its commit comes again is a death. Guarding begins after a crash or when memory ran
    out, and ends when more was received than can have been buffered at the crash. Raises psycopg.Error.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._left = 0
        self._noted: OpenCommit | None = None

    @cached_property
    def _suspects(self) -> Suspects:
        """Opened at the first note, which is only written after a crash."""
        return Suspects(self._settings, 1)

    def close(self) -> None:
        """Close the connection."""
        if "_suspects" in self.__dict__:
            self._suspects.close()

    @property
    def guarding(self) -> bool:
        """Whether the open commit is noted."""
        return self._left > 0

    def guard(self) -> None:
        """Begin to note commits, since one may have killed a process."""
        self._left = 2 * self._settings.source.buffer_bytes

    def count_received(self, size: int, begun: OpenCommit | None) -> None:
        """Count received bytes and note the open commit. Raises FatalCommit if it has killed too many processes."""
        if self._noted is None and not self.guarding:
            return
        if begun is not None and begun == self._noted:
            return
        self._left -= size
        former = None if self._noted is None else _note_of(self._noted)
        if begun is not None and self.guarding:
            limit = self._settings.crash_limit
            noted = self._suspects.note_next(former, _note_of(begun), limit)
            self._noted = begun if noted else None
            if not noted:
                raise FatalCommit(begun, limit)
        elif former is not None:
            self._suspects.clear(former)
            self._noted = None

    def died(self, begun: OpenCommit | None) -> None:
        """Count a death, although the process survives: the open commit has a value that is too large."""
        if begun is not None and self._noted is None:
            with _tolerating():
                self._suspects.note(_note_of(begun))
        self._noted = None
        self.guard()

    def survived(self) -> None:
        """Take back the note, since receiving ended for another reason."""
        if self._noted is not None:
            with _tolerating():
                self._suspects.take_back(_note_of(self._noted))
            self._noted = None

    def forget(self, begun: OpenCommit) -> None:
        """Delete the note of a commit that is done."""
        self._suspects.clear(_note_of(begun))


class Receiver:
    """Reads batches of whole commits from the slot, by a thread that streams until it is closed.

    The thread connects again when the stream is lost; other faults end `take` with a RelayError. While the buffer is
    full, it reads nothing until the service acknowledges a batch. With a `recovery` a lost slot is recreated, and
    faults of the slot are an outage instead of an error. A `recognition` refuses a source that has lost events that
    were applied. `changed` is called when the stream is back. What ends at or before `start` counts as received, and is
    never confirmed.

    `confirmation` has the positions that are received and confirmed, `commits` what is received and not applied. All
    methods before `_run` are for the service's thread, unless they say otherwise.
    """

    def __init__(
        self,
        settings: Settings,
        recovery: Recovery | None = None,
        changed: Callable[[], None] = lambda: None,
        recognition: Recognition | None = None,
        start: Lsn | None = None,
    ) -> None:
        # Shared, and safe in any thread.
        self.confirmation = Confirmation()
        if start is not None:
            self.confirmation.commit(start)
        self.commits = CommitQueue(settings.batch)
        self._replication = Replication(settings, self.confirmation, recovery, recognition, changed)
        self.condition = self._replication.condition
        self.heartbeat = self._replication.heartbeat
        self._closing = self._replication.closing
        self._wakeup = Wakeup()
        self._resumed = Condition()
        # Written by the receiver's thread, read by others.
        self._last_heard: float | None = None
        self._last_brought = time.monotonic()
        # Set by the service's thread.
        self._must_reconnect = False
        # Only for the receiver's thread; other threads read the assembler's size.
        self._budget = settings.source.buffer_bytes
        self._prefix = settings.source.message_prefix
        self._assembler = Assembler(
            settings.source.table_name,
            settings.source.mapping,
            # A full buffer stops reading, and an open commit leaves the buffer only once its end is read.
            min(settings.batch.max_bytes, int(self._budget * OPEN_COMMIT_SHARE)),
            settings.batch.spool_directory,
            _DATA_START,
            _emitted(settings),
            settings.source.offsets == "gapless",
            partial(require_contents, mapping=settings.source.mapping, table=settings.source.table),
        )
        self._receiver_suspects = ReceiverSuspects(settings)
        self._reported = Lsn(0)
        self._reconnects = Backoff(*RECONNECT_SECONDS)
        self._has_received = False
        self._logged_ignored = False
        self._refusals = RepeatedLines(
            log, logging.WARNING, "a large commit cannot be received yet", "attempts"
        )
        self._thread = Thread(target=self._run, name="receiver")

    def start(self) -> None:
        """Begin to receive."""
        self._thread.start()

    def guard(self) -> None:
        """Note which commit is received, since one may have killed a process. Call before `start`."""
        self._receiver_suspects.guard()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def state(self) -> StreamState:
        """The stream now. Safe in any thread."""
        return self._replication.state

    @property
    def received(self) -> Received:
        """What is received now, for metrics and health. Safe in any thread."""
        heard = self._last_heard
        size, events, oldest = self.commits.held()
        return Received(
            connected=heard is not None,
            silent=0.0 if heard is None else max(0.0, time.monotonic() - heard),
            position=self.confirmation.received,
            buffered_bytes=size + self._assembler.size,
            buffered_events=events,
            oldest=None if oldest is None else _EPOCH_SECONDS + oldest / 1_000_000,
            connections=self.state.connections,
        )

    @property
    def quiet(self) -> float:
        """For how many seconds the stream has brought no message of a commit."""
        return time.monotonic() - self._last_brought

    @property
    def is_full(self) -> bool:
        """Whether the buffer is full, which stops reading."""
        return self.commits.size + self._assembler.size >= self._budget

    def take(self, timeout: float) -> Batch | None:
        """Return the next whole commits: many under load, few when idle.

        None after `timeout` seconds, or once the commits are stopped. Raises RelayError.
        """
        queued = self.commits.take(timeout)
        if queued is None:
            return None
        number, transactions = queued
        state = self.state
        return Batch(
            number=number,
            transactions=transactions,
            end=transactions.end,
            events=transactions.events,
            size=transactions.held,
            spooled=transactions.spooled is not None,
            source_epoch=state.epoch,
            next_xid=state.next_xid,
            codec=state.codec,
        )

    def ack(self, batch: Batch) -> None:
        """Free the memory of a batch that is committed."""
        self.commits.ack(batch)
        self._wakeup.wake()

    def confirm(self, end: Lsn) -> None:
        """Confirm everything up to a position, which is durable: PostgreSQL may recycle its WAL. Safe in any thread."""
        self.confirmation.ack(end)
        self._wakeup.wake()

    def compared(self, next_xid: int) -> None:
        """Note the source's next full xid, with which the outbox was compared."""
        self._replication.publish(next_xid=next_xid)

    def complete(self, connections: int) -> None:
        """Note that the commits which the slot may lack are polled, unless `connections` shows a newer connection."""
        self._replication.complete(connections)

    def pass_over(self, commit: OpenCommit) -> None:
        """Continue to stream after this commit, since it is durable. Raises psycopg.Error."""
        self._receiver_suspects.forget(commit)
        # The server leaves out commits that end before the requested position.
        self.confirmation.nothing_until(Lsn(commit.lsn + 1))
        with self._resumed:
            self._replication.publish(stuck=None, outage=None)
            self._resumed.notify_all()

    def reconnect(self) -> None:
        """Connect again, which checks slot and publication."""
        self._must_reconnect = True
        self._wakeup.wake()

    def close(self, timeout: float = 5.0) -> None:
        """Report the last position and leave the slot; waits about `timeout` seconds at most."""
        self.commits.stop()
        self._closing.set()
        self._wakeup.wake()
        deadline = time.monotonic() + timeout
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(0.1)
            self._replication.cancel_opening()
        if not self._thread.is_alive():
            self._receiver_suspects.close()
            self._wakeup.close()

    # The receiver's thread.

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                if self.state.stuck is None:
                    self._session()
                else:
                    self._wait_to_pass_over()
            self._replication.note_left()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._closing.is_set():
            return
        with suppress(Exception):
            # A slot that is made in place of a missing one begins later than that was confirmed.
            self._replication.note_left()
        if isinstance(error, ProtocolError):
            error = RelayError(f"the replication stream cannot be read: {error}")
        self.commits.fail(error)

    def _session(self) -> None:
        """Connect and receive until the connection is lost."""
        # The server sends the open commit again, from its beginning.
        self._assembler.reset()
        stream = self._replication.connect()
        if stream is None:
            return
        ended: psycopg.Error | MemoryError | TransientFault | FatalCommit | None = None
        try:
            self._receive(stream)
        except (psycopg.Error, MemoryError, TransientFault, FatalCommit) as error:
            # The traceback would keep the received messages in memory.
            ended = error.with_traceback(None)
        finally:
            self._last_heard = None
            stream.close()
        if ended is None:
            self._receiver_suspects.survived()
        elif isinstance(ended, FatalCommit):
            self._stop_before(ended)
        else:
            self._lose(ended)
            self._wait_to_reconnect()

    def _lose(self, error: psycopg.Error | MemoryError | TransientFault) -> None:
        """Note why the connection was lost. Raises RelayError if a new connection would end the same way."""
        if isinstance(error, TransientFault):
            # The spool cannot be written.
            self._receiver_suspects.survived()
            self._replication.unavailable(str(error), certain=False)
            self._refusals.note(1, fault=str(error))
            return
        if isinstance(error, MemoryError) or exceeds_limits(error):
            # This is not an outage: polling would read the same row.
            self._receiver_suspects.died(self._assembler.begun)
        else:
            self._receiver_suspects.survived()
            self._replication.lost(error)
        log.warning("replication connection lost; reconnecting", extra={"fault": describe(error)})

    def _stop_before(self, error: FatalCommit) -> None:
        self._replication.publish(stuck=error.commit)
        reason = (
            f"the commit at {error.commit.lsn} was too large to be received {error.deaths} times"
        )
        log.error(reason, extra={"xid": error.commit.xid})
        self._replication.unavailable(reason, certain=True)

    def _wait_to_pass_over(self) -> None:
        self.heartbeat.update("waits until the commit is polled that cannot be received")
        with self._resumed:
            self._resumed.wait_for(lambda: self.state.stuck is None or self._closing.is_set(), 0.5)

    def _wait_to_reconnect(self) -> None:
        self.heartbeat.update("waits to connect again", Due.LATE)
        self._closing.wait(self._reconnects.take())

    def _receive(self, stream: WalStream) -> None:
        self._assembler.reset(stream.encoding, stream.partitioned, stream.next_xid)
        pgconn = stream.conn.pgconn
        pgconn.nonblocking = 1
        began = last_heard = last_sent = last_asked = self._last_brought = time.monotonic()
        standbys_asked = began
        self._reported = Lsn(0)
        self._must_reconnect = self._has_received = steady = False
        with selectors.DefaultSelector() as selector:
            selector.register(pgconn.socket, selectors.EVENT_READ, "stream")
            selector.register(stream.session.pgconn.socket, selectors.EVENT_READ, "session")
            selector.register(self._wakeup, selectors.EVENT_READ, "wakeup")
            reading = True
            # libpq may have read the beginning of the stream together with the answer to START_REPLICATION.
            asked = self._read_socket(pgconn)
            while not self._closing.is_set() and not self._must_reconnect:
                self.heartbeat.update("receives")
                # While the buffer is full nothing is read, which is no silence of the server.
                self._last_heard = last_heard if reading else time.monotonic()
                if not steady and self._is_steady(stream, time.monotonic() - began):
                    steady = True
                    self._recovered()
                full = self.is_full
                if full is reading:
                    reading = not full
                    if full:
                        selector.unregister(pgconn.socket)
                    else:
                        selector.register(pgconn.socket, selectors.EVENT_READ, "stream")
                        last_heard = time.monotonic()
                unreported = self.confirmation.flushed > self._reported
                wait = 0.0 if asked else IDLE_REPORT_SECONDS if unreported else 1.0
                ready = {key.data for key, _ in selector.select(wait)}
                woken = "wakeup" in ready
                if woken:
                    self._wakeup.clear()
                if "session" in ready:
                    self._require_running(stream)
                    # The next connection finds out, and says, why there can be no stream.
                    self._must_reconnect |= stream.is_waited_for()
                if "stream" in ready:
                    if not self.confirmation.all_acknowledged:
                        # What comes now is needed after the batch. To assemble it slows down the service, and what is
                        # read together becomes one batch.
                        self._wakeup.wait(PAUSE_SECONDS)
                    last_heard = time.monotonic()
                    asked = self._read_socket(pgconn) or asked
                now = time.monotonic()
                if now - standbys_asked > STANDBYS_SECONDS:
                    # By this thread: the service may be in a commit that waits for this stream.
                    standbys_asked = now
                    stream.ask_standbys()
                silent = now - last_heard if reading else 0.0
                if silent > stream.dead_after:
                    raise psycopg.OperationalError(f"no message from the server for {silent:.0f} s")
                due = now - last_sent > stream.status_every or (
                    unreported and now - last_sent > IDLE_REPORT_SECONDS
                )
                asks = min(silent, now - last_asked) > min(ASK_SECONDS, stream.status_every / 2)
                if asked or woken or due or asks:
                    self._report(pgconn, reply=asks)
                    last_sent, asked = now, False
                    last_asked = now if asks else last_asked
            self._report(pgconn)
            self._replication.leave(stream)

    def _require_running(self, stream: WalStream) -> None:
        """Raise psycopg.OperationalError if the server ends: it must not wait for what relay still has to apply."""
        try:
            stream.require_running()
        except psycopg.OperationalError:
            with suppress(psycopg.Error):
                self._report(stream.conn.pgconn)
            raise

    def _is_steady(self, stream: WalStream, lasted: float) -> bool:
        """Whether the stream works: it has brought something new, or has been idle for STEADY_SECONDS."""
        if self.confirmation.received > stream.start:
            return True
        return lasted > STEADY_SECONDS and self._has_received and not self._assembler.open

    def _recovered(self) -> None:
        self._reconnects.reset()
        self._replication.recovered()

    def _read_socket(self, pgconn: psycopg.pq.abc.PGconn) -> bool:
        """Empty the socket and assemble the messages; returns whether the server requests a status update.

        A walsender is slow if each message wakes the reader. So while the stream lags, the thread empties the socket
        and then pauses for PAUSE_SECONDS; at the head of the stream it does not pause.
        """
        asked = False
        while True:
            size, wanted = self._drain(pgconn)
            asked = asked or wanted
            if size < BUSY_BYTES or asked:
                return asked
            if self.is_full or self._closing.is_set():
                return asked
            if self.confirmation.flushed > self._reported:
                self._report(pgconn)
            if size < READ_BYTES:
                time.sleep(PAUSE_SECONDS)

    def _drain(self, pgconn: psycopg.pq.abc.PGconn) -> tuple[int, bool]:
        """Assemble what the socket holds, up to READ_BYTES; returns the bytes and whether a status is requested."""
        size, before, length = 0, -1, 0
        asked = False
        reached = Lsn(0)
        messages: list[Buffer] = []
        # While guarding, a commit is noted before more is read.
        limit = 1 if self._receiver_suspects.guarding else READ_BYTES
        try:
            # Reads until the socket has nothing more.
            while length == 0 and before < size < limit:
                before = size
                pgconn.consume_input()
                while True:
                    length, data = pgconn.get_copy_data(1)
                    if length <= 0:
                        break
                    size += length
                    kind = data[0]
                    if kind == _XLOG_DATA:
                        messages.append(data)
                    elif kind == _KEEPALIVE:
                        position, _, wanted = _KEEPALIVE_BODY.unpack_from(data, 1)
                        reached = Lsn(position)
                        asked = asked or bool(wanted)
                    del data
        except (psycopg.OperationalError, MemoryError):
            # The assembler then knows which commit was open.
            self._assembler.feed(messages)
            raise
        self._has_received = self._has_received or size > 0
        if messages:
            self._last_brought = time.monotonic()
        passed = self._assembler.feed(messages) or Lsn(0)
        # Everything up to a keepalive's position came before it, except the transaction that is still open.
        self._finished(
            self._assembler.fetch(), passed if self._assembler.open else max(passed, reached)
        )
        self._receiver_suspects.count_received(size, self._assembler.begun)
        if foreign := self._assembler.foreign():
            log.warning(
                "the stream has copies of rows, whose c_xid is that of another transaction; polling applies them "
                "unless that transaction is applied",
                extra={"rows": foreign},
            )
        if self._assembler.ignored() and not self._logged_ignored:
            self._logged_ignored = True
            log.warning(
                "non-transactional messages are not relayed: pass true to pg_logical_emit_message",
                extra={"prefix": self._prefix},
            )
        if length < 0:
            raise end_of_stream(pgconn)
        return size, asked

    def _finished(self, commits: list[Transactions], position: Lsn) -> None:
        """Queue whole commits, and note that the stream has nothing else up to a position."""
        if commits:
            self.confirmation.commit(commits[-1].end)
            self.commits.put(commits)
        if position:
            self.confirmation.nothing_until(position)

    def _report(self, pgconn: psycopg.pq.abc.PGconn, reply: bool = False) -> None:
        clock = int((time.time() - _EPOCH_SECONDS) * 1_000_000)
        flushed = self.confirmation.flushed
        status = self.confirmation.status(clock, reply)
        if status is None:
            return
        pgconn.put_copy_data(status)
        pgconn.flush()
        self._reported = flushed


def commits_after(settings: Settings, lsn: Lsn, until: Lsn) -> Iterator[Transactions]:
    """Yield the slot's commits that end after `lsn`, up to `until`. Reads the slot and confirms nothing.

    Raises RelayError if the slot cannot be read.
    """
    receiver = Receiver(settings, start=lsn)
    receiver.start()
    try:
        while receiver.confirmation.received < until or not receiver.commits.empty:
            batch = receiver.take(0.2)
            if batch is None:
                continue
            later = batch.transactions.facts["end_lsn"] > lsn
            if later.any():
                yield batch.transactions.take(np.flatnonzero(later))
            receiver.ack(batch)
    finally:
        receiver.close()


def _emitted(settings: Settings) -> Emitted | None:
    source = settings.source
    if source.message_prefix is None:
        return None
    return Emitted(source.message_prefix, source.sql_types, _DATA_START)


@contextmanager
def _tolerating() -> Iterator[None]:
    """Tolerate an outage of the target: a wrong count is better than the end of relay."""
    try:
        yield
    except psycopg.OperationalError as error:
        log.warning("cannot count deaths of the receiver", extra={"fault": describe(error)})


def _note_of(commit: OpenCommit) -> str:
    return f"receiving {commit.lsn}"
