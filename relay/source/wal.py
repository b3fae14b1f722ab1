"""Streams a slot over COPY BOTH: a thread receives and reports, the service takes batches and acknowledges.

psycopg has no replication API, but it lets START_REPLICATION run on a connection opened with
`replication=database`, and its libpq wrapper reads and writes the copy.

Source: PostgreSQL documentation, "Streaming Replication Protocol".
"""

from __future__ import annotations

import logging
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from struct import Struct
from threading import Condition, Event, Lock

import numpy as np
import psycopg
from psycopg import sql
from psycopg.abc import Buffer
from psycopg.pq import ExecStatus
from psycopg.rows import scalar_row
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    sleep_using_event,
    stop_when_event_set,
    wait_exponential_jitter,
)

from relay.batch import Batch
from relay.config import Settings
from relay.events import POSTGRES_EPOCH, Lsn
from relay.faults import (
    ConfigurationError,
    RelayError,
    TransientFault,
    describe,
    first_line,
    is_transient,
    server_error,
)
from relay.pulse import Due, Pulse
from relay.source.assembler import Assembler, Begun
from relay.source.bell import Bell
from relay.source.casualties import Casualties, Undigestible, is_out_of_memory
from relay.source.columns import is_partitioned
from relay.source.emitted import Emitted
from relay.source.pgoutput import ProtocolError
from relay.source.progress import Progress
from relay.source.recovery import (
    Recognition,
    Recovery,
    Sighting,
    System,
    Unavailable,
    identify,
    open_replication,
)
from relay.source.slot import require_ours, require_published, slot_reader, slot_state
from relay.source.state import Received
from relay.source.translation import Encoding
from relay.store.connections import pin_text_form
from relay.threads import Thread
from relay.transactions import Transactions

log = logging.getLogger(__name__)

_XLOG_DATA, _KEEPALIVE = b"wk"
_DATA_START = 25  # an XLogData message is its kind, two positions and a clock before the payload
_KEEPALIVE_BODY = Struct(">QqB")
_EPOCH_SECONDS = POSTGRES_EPOCH.timestamp()

OPEN_COMMIT_SHARE = 0.5
"""The share of `source.buffer_bytes` that the rows of an open commit may take before they spill to a file."""
GULP_BYTES = 2 * 1024 * 1024
"""How much is read before it is looked at, so that a fast sender cannot hold the loop for ever."""
BUSY_BYTES = 128 * 1024
"""A gulp of more than this means that the stream is behind: the walsender then runs faster if it is not woken."""
NAP_SECONDS = 0.01
"""How long the stream is left alone at most, while it is behind and while a batch is in flight."""
IDLE_REPORT_SECONDS = 0.2
"""How long idle progress may wait before it is reported; durable batches are reported at once."""
ACTIVE_WAIT_SECONDS = 1.0
STEADY_SECONDS = 1.0
"""How long a stream that brings nothing new has to last before it counts as working."""
RECONNECT_SECONDS = 0.1, 5.0
"""The shortest and the longest wait before the next connection; it doubles while streams end before they work."""
DEFAULT_SENDER_TIMEOUT = 60.0
ASK_SECONDS = 10.0
"""After how long a silence of the server it is asked for a reply, again and again until it answers."""
STATUS_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class _Stream:
    """One replication connection in COPY BOTH mode."""

    conn: psycopg.Connection[object]
    start: Lsn
    status_every: float
    dead_after: float


class _SlotActive(Exception):
    """Another process reads the slot."""


@dataclass(frozen=True, slots=True)
class Outage:
    """Why the stream cannot be had, and since when (monotonic clock). `certain` says that no retry alone mends it."""

    reason: str
    since: float
    certain: bool


class WalSource:
    """The slot as a source of batches.

    `take()` gives whole commits in commit order; `ack()` says that everything up to a batch's end is durable.
    Faults of the connection are waited out; others end `take()` with a RelayError. With a `recovery` a lost slot is
    recreated, and what keeps the stream away is an `outage` instead of an error. A `recognition` refuses a source that
    has lost what was applied. `changed` is called when the stream is back.
    """

    def __init__(
        self,
        settings: Settings,
        recovery: Recovery | None = None,
        changed: Callable[[], None] = lambda: None,
        recognition: Recognition | None = None,
        start: Lsn | None = None,
    ) -> None:
        self._settings = settings
        self._recovery = recovery
        self._recognition = recognition
        self._epoch: int | None = None
        self._incomplete = False
        self._completing = Lock()
        self.next_xid = 0
        self._opening: psycopg.Connection[object] | None = None
        self._tell = changed
        self._outage: Outage | None = None
        self._standing_by = False
        self._fruitless = 0
        self._heard = False
        self._undecodable = False
        self._ignores = False
        self._suspected = False
        self._system: System | None = None
        self._connections = 0
        self._limits = settings.batch
        self._budget = settings.source.buffer_bytes
        self._progress = Progress()
        if start is not None:
            # As if everything before had been received, and were never to be acknowledged.
            self._progress.commit(start)
        self._assembler = Assembler(
            settings.source.table_name,
            settings.source.mapping,
            # A full buffer stops the reading, and an open commit leaves the buffer only when its end is read.
            min(settings.batch.max_bytes, int(self._budget * OPEN_COMMIT_SHARE)),
            settings.batch.spool_directory,
            _DATA_START,
            _emitted(settings),
        )
        self._queue: deque[Transactions] = deque()
        self._changed = Condition()
        self._buffered = 0
        self._buffered_events = 0
        self._unapplied: deque[tuple[int, int]] = deque()
        self._last_heard: float | None = None
        self.pulse = Pulse()
        self._error: BaseException | None = None
        self._stopping = Event()
        self._closing = Event()
        self._bell = Bell()
        self._reported = Lsn(0)
        self._batches = 0
        self._casualties = Casualties(settings)
        self._stuck: Begun | None = None
        self._thread = Thread(target=self._run, name="receiver", daemon=True)

    def start(self) -> None:
        """Begin to receive."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the receiver's thread runs."""
        return self._thread.is_alive()

    def received_now(self) -> Received:
        """What the stream has brought up to now. Safe in any thread."""
        heard = self._last_heard
        with self._changed:
            first = self._unapplied[0][1] if self._unapplied else None
            if first is None and self._queue:
                first = int(self._queue[0].facts["ts"][0])
        return Received(
            connected=heard is not None,
            silent=0.0 if heard is None else max(0.0, time.monotonic() - heard),
            position=self._progress.received,
            buffered_bytes=self._buffered + self._assembler.size,
            buffered_events=self._buffered_events,
            oldest=None if first is None else _EPOCH_SECONDS + first / 1_000_000,
            connections=self._connections,
        )

    def stop(self) -> None:
        """Let `take()` return. Safe in a signal handler's thread."""
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()

    def guard(self) -> None:
        """A process may have died of receiving what comes now: note which commit is open. Before `start`."""
        self._casualties.guard()

    @property
    def stuck(self) -> Begun | None:
        """The commit that receiving ended in deaths of, `crash_limit` times; the stream stands before it."""
        return self._stuck

    def pass_over(self, commit: Begun) -> None:
        """Everything up to this commit is durable: stream on after it. Raises psycopg.Error."""
        self._casualties.forget(commit)
        # The server leaves out what commits before the position that it is asked for.
        self._progress.nothing_until(Lsn(commit.lsn + 1))
        with self._changed:
            self._stuck = None
            self._outage = None
            self._changed.notify_all()

    def reconnect(self) -> None:
        """Begin to stream again, after a look at slot and publication."""
        self._suspected = True
        self._bell.ring()

    def close(self, timeout: float = 5.0) -> None:
        """Report the last position and leave the slot."""
        self._stopping.set()
        self._closing.set()
        self._bell.ring()
        deadline = time.monotonic() + timeout
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(0.1)
            self._cancel_opening()
        if not self._thread.is_alive():
            self._casualties.close()
            self._bell.close()

    def _cancel_opening(self) -> None:
        """A slot that is being made may wait for long."""
        opening = self._opening
        if opening is not None:
            with suppress(psycopg.Error):
                opening.cancel_safe(timeout=1)

    @property
    def flushed(self) -> Lsn:
        """The position that was reported, or is about to be, as durable."""
        return self._progress.flushed

    @property
    def received(self) -> Lsn:
        """How far the stream has come."""
        return self._progress.received

    @property
    def empty(self) -> bool:
        """Whether nothing is waiting to be taken."""
        return not self._queue

    @property
    def outage(self) -> Outage | None:
        """What keeps the stream away; None while it flows and while another process has it."""
        return self._outage

    @property
    def is_standing_by(self) -> bool:
        """Whether another process reads the slot."""
        return self._standing_by

    @property
    def connections(self) -> int:
        """How often streaming has begun."""
        return self._connections

    @property
    def incomplete(self) -> bool:
        """Whether the slot may lack commits, so that a difference is to be polled."""
        return self._incomplete

    def complete(self, connections: int) -> None:
        """What the slot may have lacked after so many connections is polled; a later one may lack more."""
        with self._completing:
            if connections != self._connections:
                return
            if self._incomplete and self._recognition is not None:
                self._recognition.leave(None)
            self._incomplete = False

    def take(self, timeout: float) -> Batch | None:
        """Whole commits as they come: more under load, few when idle.

        None after `timeout` seconds, or `stop()`. Raises RelayError.
        """
        taken = self._take(timeout)
        if not taken:
            return None
        transactions = Transactions.joined(taken)
        self._batches += 1
        with self._changed:
            self._unapplied.append((self._batches, int(transactions.facts["ts"][0])))
        return Batch(
            number=self._batches,
            transactions=transactions,
            end=transactions.end,
            events=transactions.events,
            size=transactions.held,
            spooled=transactions.spooled is not None,
            source_epoch=self._epoch,
            next_xid=self.next_xid,
        )

    def has_ready(self, events: int) -> bool:
        """Whether `take` would return about so many events at once, or as many as the limits and the buffer allow."""
        with self._changed:
            if self._stopping.is_set() or not self._queue:
                return False
            ready = sum(each.events for each in self._queue)
            size = sum(each.held for each in self._queue)
            full = self._buffered + self._assembler.size >= self._budget
        # Of a buffer that is full, a small rest would make one job more.
        return ready >= events or size >= self._limits.max_bytes or (full and 2 * ready >= events)

    def ack(self, batch: Batch) -> None:
        """The batch is committed: its memory is free."""
        with self._changed:
            self._buffered -= batch.size
            self._buffered_events -= batch.events
            while self._unapplied and self._unapplied[0][0] <= batch.number:
                self._unapplied.popleft()
        self._bell.ring()

    def confirm(self, end: Lsn) -> None:
        """Everything up to a position is durable: PostgreSQL may recycle its WAL. Safe in any thread."""
        self._progress.ack(end)
        self._bell.ring()

    def _take(self, timeout: float) -> list[Transactions]:
        with self._changed:
            self._changed.wait_for(
                lambda: self._queue or self._error or self._stopping.is_set(), timeout
            )
            if self._stopping.is_set() or not (self._queue or self._error):
                return []
            if self._error is not None and not self._queue:
                raise self._error
            taken = [self._first_commits()]
            if not self._queue:
                return taken
            events, size = taken[0].events, taken[0].held
            # What came together stays together: cutting and joining copies, and a fuller batch does not pay for that.
            while self._queue and taken[0].joins(self._queue[0]):
                events += self._queue[0].events
                size += self._queue[0].held
                if events > self._limits.max_events or size > self._limits.max_bytes:
                    break
                taken.append(self._queue.popleft())
            return taken

    def _first_commits(self) -> Transactions:
        """The next commits within the limits of a batch; one that is larger comes alone."""
        head = self._queue.popleft()
        fitting = head.fitting(self._limits.max_events, self._limits.max_bytes)
        place = fitting or head.first_commit()
        if place == len(head):
            return head
        self._queue.appendleft(head.part(place, len(head)))
        return head.part(0, place)

    # The receiver's thread.

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                if self._stuck is None:
                    self._session()
                else:
                    self._wait_to_pass_over()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._closing.is_set():
            return
        if isinstance(error, ProtocolError):
            error = RelayError(f"the replication stream cannot be read: {error}")
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _session(self) -> None:
        """Connect and receive until the connection is lost."""
        stream = self._connect()
        if stream is None:
            return
        ended: psycopg.Error | MemoryError | Undigestible | None = None
        try:
            self._receive(stream)
        except (psycopg.Error, MemoryError, Undigestible) as error:
            # Without its traceback, which would keep what was being received in memory.
            ended = error.with_traceback(None)
        finally:
            self._last_heard = None
            stream.conn.close()
        if ended is None:
            self._casualties.survived()
        elif isinstance(ended, Undigestible):
            self._stop_before(ended)
        else:
            self._lose(ended)
            self._wait_to_reconnect()

    def _lose(self, error: psycopg.Error | MemoryError) -> None:
        """The connection is of no use any more. Raises RelayError where another one would be of none either."""
        if isinstance(error, MemoryError) or is_out_of_memory(error):
            # No outage: polling would read the same row.
            self._casualties.died(self._assembler.begun)
        else:
            self._casualties.survived()
            self._note_outage(error)
        log.warning("replication connection lost; reconnecting", extra={"fault": describe(error)})

    def _note_outage(self, error: psycopg.Error) -> None:
        if is_transient(error):
            self._suffer(f"replication connection lost: {describe(error)}", certain=False)
        elif self._recovery is None:
            raise _explained(error, self._settings) from error
        else:
            # The publication was not there yet where the slot stands: that WAL can never be decoded.
            self._undecodable = isinstance(error, psycopg.errors.UndefinedObject)
            self._suffer(str(_explained(error, self._settings)), certain=True)

    def _stop_before(self, error: Undigestible) -> None:
        self._stuck = error.commit
        reason = f"receiving the commit at {error.commit.lsn} failed {error.deaths} times for want of memory"
        log.error(reason, extra={"xid": error.commit.xid})
        self._suffer(reason, certain=True)

    def _wait_to_pass_over(self) -> None:
        self.pulse.beat("waits until a commit is polled that it cannot receive")
        with self._changed:
            self._changed.wait_for(lambda: self._stuck is None or self._closing.is_set(), 0.5)

    def _wait_to_reconnect(self) -> None:
        self.pulse.beat("waits to connect again", Due.LATE)
        first, longest = RECONNECT_SECONDS
        self._closing.wait(min(longest, first * 2.0 ** min(self._fruitless, 10)))
        self._fruitless += 1

    def _connect(self) -> _Stream | None:
        retrying = Retrying(
            retry=retry_if_exception(_worth_waiting),
            wait=_wait,
            stop=stop_when_event_set(self._closing),
            sleep=sleep_using_event(self._closing),
            before_sleep=self._note_why(),
            reraise=True,
        )
        try:
            return retrying(self._open)
        except (psycopg.Error, _SlotActive, Unavailable):
            if self._closing.is_set():
                return None
            raise

    def _open(self) -> _Stream:
        if self._closing.is_set():
            raise _SlotActive
        self.pulse.beat("connects", Due.LATE)
        source = self._settings.source
        conn = self._opening = open_replication(self._settings)
        try:
            pin_text_form(conn)
            return self._start_replication(conn, source.slot, source.publication)
        except BaseException as error:
            stranger = (
                self._stranger(conn) if isinstance(error, psycopg.errors.ObjectInUse) else None
            )
            conn.close()
            if isinstance(error, psycopg.errors.ObjectInUse):
                raise (Unavailable(stranger) if stranger else _SlotActive()) from error
            if isinstance(error, psycopg.Error) and not is_transient(error):
                explained = _explained(error, self._settings)
                if self._recovery is None:
                    raise explained from error
                raise Unavailable(str(explained)) from error
            raise
        finally:
            self._opening = None

    def _stranger(self, conn: psycopg.Connection[object]) -> str | None:
        """Who reads the slot, in words, if it is somebody else than a relay that may be waited for."""
        if self._recovery is None:
            return None
        try:
            reader = slot_reader(conn, self._settings.source.slot)
        except psycopg.Error:
            return None
        if reader is None or reader.startswith("relay"):
            return None
        return f"another client reads the slot: {reader or 'without a name'}"

    def _note_why(self) -> Callable[[RetryCallState], None]:
        """A callback that logs each change of the reason for waiting, once, and keeps it as the outage."""
        said: list[str] = [""]

        def note(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            if error is None:
                return
            self.pulse.beat("waits to connect again", Due.LATE)
            self._standing_by = isinstance(error, _SlotActive)
            if self._standing_by:
                self._outage = None
                reason = "another process reads the slot; standing by"
            else:
                certain = isinstance(error, Unavailable)
                reason = f"cannot stream yet: {error if certain else describe(error)}"
                self._suffer(reason, certain)
            if reason != said[0]:
                said[0] = reason
                log.warning(reason)

        return note

    def _creating(self, waits_for: str | None) -> None:
        self.pulse.beat("recreates the slot", Due.OPEN)
        oldest = f"; the oldest is {waits_for}" if waits_for else ""
        self._suffer(
            f"the slot is recreated, which waits for all transactions that run{oldest}",
            certain=True,
        )
        log.warning(
            "the slot is recreated as soon as all transactions that run have ended",
            extra={"waits_for": waits_for} if waits_for else {},
        )

    def _suffer(self, reason: str, certain: bool) -> None:
        before = self._outage
        self._outage = Outage(reason, before.since if before else time.monotonic(), certain)
        with self._changed:
            self._changed.notify_all()

    def _start_replication(
        self, conn: psycopg.Connection[object], slot: str, publication: str
    ) -> _Stream:
        system, sighting = self._look(conn)
        if sighting is not None and not _is_read(conn, slot):
            # A lost slot is not recreated where the stream would be refused.
            sighting.require_valid()
        recreated = False
        if self._recovery is not None:
            recreated = self._recovery.restore(conn, self._undecodable, self._creating)
            self._undecodable = False
        state = slot_state(conn, slot)
        if state is None and self._recovery is not None:
            raise TransientFault("the slot was dropped a moment ago")
        if state is None:
            raise ConfigurationError(
                f"source.slot: there is no replication slot {slot!r}: run `relay init` to create it"
            )
        self.pulse.beat("starts to stream", Due.LATE)
        require_ours(state, conn.info.dbname)
        self._require_published(conn)
        timeout = _sender_timeout(conn)
        encoding = Encoding.of(conn.info.parameter_status("server_encoding"))
        self._assembler.reset(encoding, is_partitioned(conn, self._settings.source))
        confirmed = Lsn.parse(state.confirmed_flush_lsn or "0/0")
        incomplete = recreated or self._is_incomplete(sighting, confirmed)
        if incomplete and self._recovery is None:
            raise RelayError(
                f"the slot {slot!r} does not go on where group {self._settings.group!r} has left it: somebody has "
                "advanced it, or the server is another one: set source.mode to auto, which polls what the slot does "
                "not have, or pass over it with `relay offsets seek`"
            )
        if recreated:
            self._progress = Progress()
        start = max(confirmed, self._progress.received)
        command = sql.SQL(
            "START_REPLICATION SLOT {} LOGICAL {} (proto_version '1', publication_names {}{})"
        ).format(
            sql.Identifier(slot),
            sql.SQL(str(start)),
            sql.Literal(sql.Identifier(publication).as_string(conn)),
            sql.SQL("" if self._settings.source.message_prefix is None else ", messages 'true'"),
        )
        text = command.as_string(conn)
        if encoding is not None:
            conn.execute(sql.SQL("set client_encoding to {}").format(encoding.name))
        result = conn.pgconn.exec_(text.encode(encoding.codec if encoding else "utf-8"))
        if result.status != ExecStatus.COPY_BOTH:
            raise server_error(result)
        with self._completing:
            if self._recognition is not None and sighting is not None:
                # Only who holds the slot touches the group's state.
                self._incomplete |= incomplete
                self._epoch = self._recognition.follow(sighting, self._incomplete)
            self.next_xid = system.next_xid
            self._progress.start(confirmed)
            self._system = system
            self._standing_by = False
            self._connections += 1
        self._tell()
        log.info("streaming", extra={"slot": slot, "lsn": str(start)})
        return _Stream(conn, start, timeout * STATUS_SHARE, timeout * 1.5)

    def _is_incomplete(self, sighting: Sighting | None, confirmed: Lsn) -> bool:
        """Whether the slot may lack commits: it is new to the group, another server's, or somebody has advanced it."""
        if sighting is None:
            return False
        left_at = sighting.origin.confirmed
        if left_at is None and self._connections:
            left_at = self._progress.flushed
        if not left_at:
            # Nobody knows: whoever has read it was killed, which alone leaves nothing out. Without polling, a group
            # begins with its slot.
            doubtful = left_at is not None or sighting.origin.identifier is None
            return sighting.foreign or (doubtful and self._recovery is not None)
        if confirmed > left_at:
            log.warning(
                "somebody else has advanced the slot; what it lacks is polled",
                extra={"from": str(left_at), "to": str(confirmed)},
            )
        return sighting.foreign or confirmed > left_at

    def _look(self, conn: psycopg.Connection[object]) -> tuple[System, Sighting | None]:
        sighting = self._recognition.look(conn) if self._recognition else None
        system = sighting.system if sighting else identify(conn)
        if self._system in (None, system):
            return system, sighting
        self._settle()
        self._system = None
        # More was applied meanwhile.
        return self._look(conn)

    def _require_published(self, conn: psycopg.Connection[object]) -> None:
        """Rather no stream than one that leaves out columns: their values would be null, silently."""
        try:
            require_published(conn, self._settings.source)
        except ConfigurationError as error:
            if self._recovery is None:
                raise
            raise Unavailable(str(error)) from None

    def _settle(self) -> None:
        """Another server or timeline: what was received from the former is applied before positions begin again."""
        log.warning("the source is another server or timeline; what was received before is applied")
        while not self._progress.settled and not self._closing.is_set():
            self.pulse.beat("waits until what was received before is applied")
            self._closing.wait(NAP_SECONDS * 10)
        self._progress = Progress()

    def _receive(self, stream: _Stream) -> None:
        pgconn = stream.conn.pgconn
        pgconn.nonblocking = 1
        began = last_heard = last_sent = last_asked = time.monotonic()
        self._reported = Lsn(0)
        self._suspected = self._heard = steady = False
        with selectors.DefaultSelector() as selector:
            selector.register(pgconn.socket, selectors.EVENT_READ, "stream")
            selector.register(self._bell, selectors.EVENT_READ, "bell")
            reading = True
            # libpq may have read the beginning of the stream together with the answer to START_REPLICATION.
            asked = self._gulp(pgconn)
            while not self._closing.is_set() and not self._suspected:
                self.pulse.beat("receives")
                # What is not read is no silence.
                self._last_heard = last_heard if reading else time.monotonic()
                if not steady and self._is_steady(stream, time.monotonic() - began):
                    steady = True
                    self._recovered()
                full = self._buffered + self._assembler.size >= self._budget
                if full is reading:
                    reading = not full
                    if full:
                        selector.unregister(pgconn.socket)
                    else:
                        selector.register(pgconn.socket, selectors.EVENT_READ, "stream")
                        last_heard = time.monotonic()
                owing = self._progress.flushed > self._reported
                wait = 0.0 if asked else IDLE_REPORT_SECONDS if owing else 1.0
                ready = {key.data for key, _ in selector.select(wait)}
                rung = "bell" in ready
                if rung:
                    self._bell.hush()
                if "stream" in ready:
                    last_heard = time.monotonic()
                    asked = self._gulp(pgconn) or asked
                    if not self._progress.settled:
                        # What comes now is not needed before, and to take it in would keep the service waiting.
                        self._bell.wait(NAP_SECONDS)
                now = time.monotonic()
                silent = now - last_heard if reading else 0.0
                if silent > stream.dead_after:
                    raise psycopg.OperationalError(f"no word from the server for {silent:.0f} s")
                due = now - last_sent > stream.status_every or (
                    owing and now - last_sent > IDLE_REPORT_SECONDS
                )
                asks = min(silent, now - last_asked) > min(ASK_SECONDS, stream.status_every / 2)
                if asked or rung or due or asks:
                    self._report(pgconn, reply=asks)
                    last_sent, asked = now, False
                    last_asked = now if asks else last_asked
            self._report(pgconn)
            if self._recognition is not None and self._closing.is_set() and not self._incomplete:
                self._recognition.leave(self._progress.flushed)
            self._leave(stream)

    def _is_steady(self, stream: _Stream, lasted: float) -> bool:
        """Whether the stream works: it has brought something new, or is quiet at the end of the WAL for a while."""
        if self._progress.received > stream.start:
            return True
        return lasted > STEADY_SECONDS and self._heard and not self._assembler.open

    def _recovered(self) -> None:
        """What kept the stream away is over."""
        self._fruitless = 0
        if self._outage is not None:
            self._outage = None
            self._tell()

    def _gulp(self, pgconn: psycopg.pq.abc.PGconn) -> bool:
        """Empty the socket, then take in what came; returns whether the server asks for a status.

        Waking the walsender's reader for every message is what slows the walsender down. So while the stream is behind,
        the socket is emptied and then left alone for some milliseconds; at the head of the stream there is no nap.
        """
        asked = False
        while True:
            size, wanted = self._drain(pgconn)
            asked = asked or wanted
            if size < BUSY_BYTES or asked:
                return asked
            if self._buffered + self._assembler.size >= self._budget or self._closing.is_set():
                return asked
            if self._progress.flushed > self._reported:
                self._report(pgconn)
            if size < GULP_BYTES:
                time.sleep(NAP_SECONDS)

    def _drain(self, pgconn: psycopg.pq.abc.PGconn) -> tuple[int, bool]:
        """Assemble what the socket holds, up to a limit; returns the bytes taken and whether a status is asked for."""
        size, before, length = 0, -1, 0
        asked = False
        reached = Lsn(0)
        messages: list[Buffer] = []
        # A guarded commit is noted before more is read.
        limit = 1 if self._casualties.guarding else GULP_BYTES
        try:
            # Until a look at the socket brings nothing more.
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
            # They tell which commit was open.
            self._assembler.feed(messages)
            raise
        self._heard = self._heard or size > 0
        passed = self._assembler.feed(messages) or Lsn(0)
        # Of what a keepalive speaks everything came before it, but for the transaction that is still open.
        self._finished(
            self._assembler.fetch(), passed if self._assembler.open else max(passed, reached)
        )
        self._casualties.took(size, self._assembler.begun)
        if foreign := self._assembler.foreign():
            log.warning(
                "rows are no new events, since their c_xid is that of another transaction: copies; polling applies "
                "them unless that transaction is applied",
                extra={"rows": foreign},
            )
        if self._assembler.ignored() and not self._ignores:
            self._ignores = True
            log.warning(
                "messages that belong to no transaction are not relayed: pass true to pg_logical_emit_message",
                extra={"prefix": self._settings.source.message_prefix},
            )
        if length < 0:
            raise _end_of_stream(pgconn)
        return size, asked

    def _finished(self, commits: list[Transactions], position: Lsn) -> None:
        """Commits came whole, and up to a position there is nothing else."""
        if commits:
            self._progress.commit(commits[-1].end)
            events = sum(received.events for received in commits)
            with self._changed:
                self._queue.extend(commits)
                self._buffered += sum(received.held for received in commits)
                self._buffered_events += events
                self._changed.notify_all()
        if position:
            self._progress.nothing_until(position)

    def _report(self, pgconn: psycopg.pq.abc.PGconn, reply: bool = False) -> None:
        clock = int((time.time() - _EPOCH_SECONDS) * 1_000_000)
        flushed = self._progress.flushed
        status = self._progress.status(clock, reply)
        if status is None:
            return
        pgconn.put_copy_data(status)
        pgconn.flush()
        self._reported = flushed

    def _leave(self, stream: _Stream) -> None:
        """End the copy and wait for the server's word, so that it has surely read the last status."""
        pgconn = stream.conn.pgconn
        pgconn.put_copy_end()
        pgconn.flush()
        deadline = time.monotonic() + 2.0
        with selectors.DefaultSelector() as selector:
            selector.register(pgconn.socket, selectors.EVENT_READ)
            while time.monotonic() < deadline:
                length, _ = pgconn.get_copy_data(1)
                if length < 0:
                    return
                if length == 0:
                    selector.select(max(0.0, deadline - time.monotonic()))
                    pgconn.consume_input()


def _emitted(settings: Settings) -> Emitted | None:
    source = settings.source
    if source.message_prefix is None:
        return None
    return Emitted(source.message_prefix, source.sql_types, _DATA_START)


def _is_read(conn: psycopg.Connection[object], slot: str) -> bool:
    state = slot_state(conn, slot)
    return state is not None and state.active


def commits_after(settings: Settings, lsn: Lsn, until: Lsn) -> Iterator[Transactions]:
    """The commits that end after `lsn`, up to `until`, as the slot has them. Reads the slot and confirms nothing.

    Raises RelayError if the slot cannot be read.
    """
    source = WalSource(settings, start=lsn)
    source.start()
    try:
        while source.received < until or not source.empty:
            batch = source.take(0.2)
            if batch is None:
                continue
            later = batch.transactions.facts["end_lsn"] > lsn
            if later.any():
                yield batch.transactions.take(np.flatnonzero(later))
            source.ack(batch)
    finally:
        source.close()


def _sender_timeout(conn: psycopg.Connection[object]) -> float:
    with conn.cursor(row_factory=scalar_row) as cursor:
        cursor.execute(
            "select setting::float8 / 1000 from pg_settings where name = 'wal_sender_timeout'"
        )
        return float(next(cursor)) or DEFAULT_SENDER_TIMEOUT


def _end_of_stream(pgconn: psycopg.pq.abc.PGconn) -> psycopg.Error:
    result = pgconn.get_result()
    if result is not None and result.status == ExecStatus.FATAL_ERROR:
        return server_error(result)
    return psycopg.OperationalError("the server ended the stream")


def _worth_waiting(error: BaseException) -> bool:
    return isinstance(error, _SlotActive | Unavailable) or is_transient(error)


_backoff = wait_exponential_jitter(multiplier=0.1, max=5.0, jitter=0.5)


def _wait(state: RetryCallState) -> float:
    outcome = state.outcome
    if outcome is not None and isinstance(outcome.exception(), _SlotActive):
        return ACTIVE_WAIT_SECONDS
    return float(_backoff(state))


def _explained(error: psycopg.Error, settings: Settings) -> RelayError:
    source = settings.source
    first = first_line(error)
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return ConfigurationError(
            f"source.dsn: {first}: give the role the REPLICATION attribute, or connect as one that has it"
        )
    if isinstance(error, psycopg.errors.UndefinedObject):
        return ConfigurationError(
            f"source.slot or source.publication: {first}: run `relay init` to create slot {source.slot!r} and "
            f"publication {source.publication!r}"
        )
    if isinstance(error, psycopg.errors.ObjectNotInPrerequisiteState):
        return RelayError(
            f"the slot {source.slot!r} cannot serve any more: {first}: set source.mode to auto, which recreates it "
            "and reads by polling what it lacks"
        )
    return RelayError(f"the server refuses to stream: {first}")
