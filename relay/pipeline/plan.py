"""Plans a batch: assigns its transactions to tasks by the partitions that they touch."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from relay.model import keys
from relay.model.batch import Batch, Range, Share, Task, Window, Work
from relay.model.transactions import Int64Array, Transactions

Hashes = Callable[[Sequence[bytes]], NDArray[np.int32]]
"""PostgreSQL's `hashtext` of each text, given as bytes."""

CACHED_HOSTS = 100_000


def partition_of(hash_value: int, partitions: int) -> int:
    """The partition of a host with a hash, as `relay.source.outbox.table` computes it in SQL."""
    return abs(hash_value) % partitions


class Planner:
    """Splits batches into tasks. Remembers the partitions of recent hosts.

    Of a window it plans only the ranges whose lowest partition is in `own`.
    """

    def __init__(
        self,
        partitions: int,
        own: Collection[int] | None = None,
        hashes: Hashes = keys.hashes,
    ) -> None:
        self._partitions = partitions
        self._hashes = hashes
        self._own = range(partitions) if own is None else own
        self._codec = "utf-8"
        self._known: OrderedDict[str, int] = OrderedDict()

    def work(self, batch: Batch, workers: int | None) -> Sequence[Work]:
        """The tasks of a batch: at most one for each worker, or the ranges of its window."""
        if batch.window:
            return self.ranges(batch.window)
        if batch.codec != self._codec:
            self._codec = batch.codec
            self._known.clear()
        return [
            replace(task, source_epoch=batch.source_epoch, next_xid=batch.next_xid)
            for task in self.plan(batch.transactions, workers)
        ]

    def ranges(self, window: Window) -> list[Range]:
        """Ranges that share no partition, in random order, so that instances rarely claim the same one at once."""
        root = _joined([share.partitions for share in window.shares])
        joined: dict[int, list[Share]] = {}
        for share in window.shares:
            joined.setdefault(root(share.partitions[0]), []).append(share)
        found = []
        for shares in joined.values():
            partitions = tuple(sorted({p for share in shares for p in share.partitions}))
            if partitions[0] not in self._own:
                continue
            lower_bounds = {partition: window.lower_bounds[partition] for partition in partitions}
            events = sum(share.events for share in shares)
            found.append(
                Range(
                    partitions,
                    window.snapshot_id,
                    window.upto,
                    shares,
                    lower_bounds,
                    events,
                    window.by_reference,
                )
            )
        random.shuffle(found)
        return found

    def plan(self, transactions: Transactions, workers: int | None = None) -> list[Task]:
        """Split transactions into tasks: at most `workers`, about equally large, without a common partition.

        Each task keeps commit order. A transaction whose hosts are in several partitions joins these into one task,
        which keeps both its atomicity and the order of each host.

        Example: transactions touch the partitions (0), (1), (1, 2), (2), (3) and there are two workers. Partitions 1
        and 2 are joined, with three transactions: one task gets these, the other those of partitions 0 and 3.
        """
        self._learn(transactions.distinct_hosts)
        there = transactions.touching
        touched: list[tuple[int, ...]] = [()] * len(transactions.hosts)
        for index in there:
            touched[index] = self._touched(transactions.hosts[index])
        if workers == 1:
            return [_task(transactions, touched)]
        root = _joined([touched[index] for index in there])
        roots = np.array([root(each[0]) if each else -1 for each in touched], np.int64)
        members = roots[transactions.facts["hosts"]]
        return [
            _task(transactions.take(np.flatnonzero(np.isin(members, members_of_worker))), touched)
            for members_of_worker in _distribute(members, workers or self._partitions)
        ]

    def _touched(self, hosts: tuple[str, ...]) -> tuple[int, ...]:
        if len(hosts) == 1:
            return (self._known[hosts[0]],)
        return tuple(sorted({self._known[host] for host in hosts}))

    def _learn(self, hosts: Collection[str]) -> None:
        unknown = []
        for host in hosts:
            if host in self._known:
                self._known.move_to_end(host)
            else:
                unknown.append(host)
        if not unknown:
            return
        # What cannot be encoded is dead-lettered: any partition is good for it.
        values = self._hashes([host.encode(self._codec, "replace") for host in unknown])
        for host, value in zip(unknown, values.tolist(), strict=True):
            self._known[host] = partition_of(value, self._partitions)
        # The hosts of this batch are the newest: dropping the oldest never removes one of them.
        while len(self._known) > max(CACHED_HOSTS, len(hosts)):
            self._known.popitem(last=False)


def _task(transactions: Transactions, touched: Sequence[tuple[int, ...]]) -> Task:
    partitions = set().union(*(touched[index] for index in transactions.touching))
    return Task(tuple(sorted(partitions)), transactions, touched)


def _distribute(members: Int64Array, workers: int) -> list[list[int]]:
    """The roots of each worker: in descending size, each goes to the worker with the fewest transactions."""
    roots, counts = np.unique(members, return_counts=True)
    joined: list[list[int]] = [[] for _ in range(min(workers, len(roots)))]
    loads = [0] * len(joined)
    for index in np.argsort(-counts, kind="stable"):
        least = loads.index(min(loads))
        joined[least].append(int(roots[index]))
        loads[least] += int(counts[index])
    return joined


def _joined(touched: Iterable[tuple[int, ...]]) -> Callable[[int], int]:
    """Union-find over the partitions that transactions tie together; returns the finder."""
    parent: dict[int, int] = {}

    def root(partition: int) -> int:
        found = partition
        while (above := parent.get(found, found)) != found:
            found = above
        if found != partition:
            parent[partition] = found
        return found

    for partitions in touched:
        first = root(partitions[0])
        for other in partitions[1:]:
            parent[root(other)] = first
    return root
