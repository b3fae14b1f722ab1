"""Writes batches to files below a path: each attempt stages its files, and one attempt's are moved there.

An attempt has a folder of its own, `.relay-<batch>/<attempt>` below the destination, which readers ignore. The first
attempt that stores the names of its files in `relay.spark_batches` decides the batch for good. Then any worker, and
several at once, may move these files: a name is unique, a file is moved once, and nothing is overwritten or removed but
staged files of the batch. So a worker that lost its claim, wherever it was suspended, changes nothing.

Source: Apache Spark documentation, "Parquet Files", dynamic partition overwrite. Hadoop documentation, "FileSystem",
`rename`: a rename onto an existing directory moves into it, so files are moved, not folders; Spark's readers ignore
names that begin with a dot.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from relay.config.handlers import SparkHandler
from relay.faults import ConfigurationError, NotNow, RelayError
from relay.spark.writers import BATCH_COLUMN, BatchId, Facts
from relay.spark.writers.arrow import MOST_NAME_BYTES, long_partition, require_partition_columns
from relay.store.positions.spark_batches import LastBatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class FilesWriter:
    """Writes folders whose last partition column is `relay_batch`, so that each batch has folders of its own."""

    kind = "files"

    def __init__(self, name: str, settings: SparkHandler) -> None:
        assert settings.path is not None  # noqa: S101
        self._name = name
        self._settings = settings
        self._path = settings.path

    def check(self, session: SparkSession) -> None:
        """Remove the staged files of drivers that died long ago. Raises ConfigurationError where the path is a file."""
        staging = StagedFiles.of(session, self._path)
        if staging is not None:
            if staging.are_below_file:
                raise ConfigurationError(
                    f"handlers.{self._name}.path: {self._path} is a file: name a folder"
                )
            staging.remove_stale()

    def write(self, frame: DataFrame, batch: BatchId) -> list[str] | None:
        """Stage the batch; through Spark Connect, replace the batch's own folders.

        Raises MissingPartition, ConfigurationError for a partition whose name is too long, and Spark's errors.
        """
        by = [*self._settings.partition_by, BATCH_COLUMN]
        require_partition_columns(f"handlers.{self._name}", by, frame.columns)
        options = self._settings.plain_options
        staging = StagedFiles.of(frame.sparkSession, self._path)
        with naming_long_partitions(f"handlers.{self._name}", frame, by):
            if staging is not None:
                return staging.write(frame, batch.id, self._settings.format, by, options)
            frame.write.save(
                self._path,
                self._settings.format,
                "overwrite",
                by,
                partitionOverwriteMode="dynamic",
                **options,
            )
        return None

    def publish(self, session: SparkSession, batch: BatchId, files: Sequence[str]) -> None:
        """Move the batch's files to their folders. Raises RelayError, and errors of the file system."""
        staging = StagedFiles.of(session, self._path)
        assert staging is not None  # noqa: S101
        staging.publish(batch.id, files)

    def left(
        self, session: SparkSession | None, batch: LastBatch, files: Sequence[str] | None
    ) -> Facts | None:
        """Some of the batch's folders; None for a batch without rows, nothing through Spark Connect."""
        return folders_of(batch, files)

    def lacks(self, session: SparkSession | None, last: LastBatch, facts: Facts) -> str | None:
        """Why none of these folders has a file any more, be it one that others have written there instead."""
        if session is None:
            return None
        staging = StagedFiles.of(session, self._path)
        if staging is None or staging.has_some(facts["folders"]):
            return None
        if not staging.is_there:
            return f"there is nothing at {self._path}"
        return f"{self._path} has no file of it"


_MOST_FOLDERS = 20
"""The most folders of a batch that are looked for."""


def folders_of(batch: LastBatch, files: Sequence[str] | None) -> Facts | None:
    """What tells that files of a batch are there: its folders, and its id. None if it wrote none."""
    if files is None:
        return {}
    folders = dict.fromkeys(published(name).rpartition("/")[0] for name in files)
    return {"batch": batch.id, "folders": list(folders)[:_MOST_FOLDERS]} if folders else None


STALE_SECONDS = 7 * 24 * 3600.0
"""The age at which a batch's folder of staged files is removed: its driver has died, or was too late."""
_OF_NAMES = (
    *("Mkdirs failed to create", "File name too long", "path component name limit"),
    "KeyTooLong",
)
"""What file systems say of a folder whose name is too long, beside other reasons: local ones, HDFS, S3."""
_LEVELS = 2
"""The folders of an attempt's name, which a file's name at its destination does not have."""


class StagedFiles:
    """The staged files below a path, through Hadoop's file systems, which resolve every path that Spark accepts."""

    def __init__(self, system: Any, path: Any, jvm: Any) -> None:
        self._system = system
        self._path = path
        self._jvm = jvm

    @classmethod
    def of(cls, session: SparkSession, path: str) -> StagedFiles | None:
        """The staged files below a path; None on Spark Connect, whose JVM is out of reach."""
        context = getattr(session, "_jsparkSession", None)
        if context is None:
            return None
        jvm: Any = session.sparkContext._jvm
        folder = jvm.org.apache.hadoop.fs.Path(path)
        return cls(folder.getFileSystem(context.sessionState().newHadoopConf()), folder, jvm)

    @property
    def are_below_file(self) -> bool:
        """Whether the path is a file, below which nothing can be written."""
        system = self._system
        return bool(
            system.exists(self._path) and not system.getFileStatus(self._path).isDirectory()
        )

    @property
    def is_there(self) -> bool:
        """Whether there is anything at the path."""
        return bool(self._system.exists(self._path))

    def has_some(self, folders: Sequence[str]) -> bool:
        """Whether one of some folders below the path has a file that readers see."""
        for name in folders:
            folder = self._under(name)
            if self._system.exists(folder) and self._files(folder):
                return True
        return False

    def write(
        self,
        frame: DataFrame,
        batch: str,
        kind: str,
        partition_by: Sequence[str],
        options: Mapping[str, str],
    ) -> list[str]:
        """Write the files of a new attempt in the format `kind`; returns their names, relative to the path.

        A failed attempt leaves no files. Raises Spark's errors.
        """
        attempt = f"{_folder(batch)}/{uuid4().hex}"
        folder = self._under(attempt)
        try:
            plain = {name: value for name, value in options.items() if name.lower() != "path"}
            frame.write.save(folder.toString(), kind, "error", list(partition_by), **plain)
            return [f"{attempt}/{name}" for name in self._files(folder)]
        except BaseException:
            with suppress(Exception):
                self._system.delete(folder, True)
            raise

    def publish(self, batch: str, files: Sequence[str]) -> None:
        """Move the files of a batch that are not at their destination yet, and remove its other staged files.

        Raises RelayError for a file that somebody has removed, and errors of the file system.
        """
        made: set[str] = set()
        for name in files:
            destination = self._under(published(name))
            parent = destination.getParent()
            if parent.toString() not in made:
                self._system.mkdirs(parent)
                made.add(parent.toString())
            self._move(self._under(name), destination)
        self._remove(_folder(batch))

    def remove_stale(self) -> None:
        """Remove what drivers staged that died, or came too late, more than STALE_SECONDS ago."""
        for pattern in (_folder("*"), ".spark-staging-*"):
            self._remove(pattern, STALE_SECONDS)

    def _move(self, source: Any, destination: Any) -> None:
        fault: Exception | None = None
        try:
            moved = self._system.rename(source, destination)
        except Exception as error:
            # Another worker has moved it, if it is there.
            moved, fault = False, error
        if moved or self._system.exists(destination):
            return
        if not self._system.exists(source):
            raise RelayError(
                f"{destination}: somebody removed this file of a batch before it was moved there: restore it, or "
                "deliver its events again with `relay sink seek`"
            )
        raise fault or NotNow(f"{destination}: the file system did not move a file there")

    def _files(self, folder: Any) -> list[str]:
        """The files below a folder that readers see, sorted."""
        base = folder.getFileSystem(self._system.getConf()).makeQualified(folder).toUri()
        names = []
        for path in _each(self._system.listFiles(folder, True)):
            name = str(base.relativize(path.toUri()).getPath())
            if not any(_is_hidden(part) for part in name.split("/")):
                names.append(name)
        return sorted(names)

    def _under(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._path, name)

    def _remove(self, pattern: str, older_than: float = 0.0) -> None:
        """Remove the folders below the path that match a glob and were not modified for `older_than` seconds."""
        for status in self._system.globStatus(self._under(pattern)) or ():
            if time.time() - status.getModificationTime() / 1000 >= older_than:
                self._system.delete(status.getPath(), True)


@contextmanager
def naming_long_partitions(key: str, frame: DataFrame, columns: Sequence[str]) -> Iterator[None]:
    """Turn an error about a folder whose name is too long into a ConfigurationError that names the column."""
    try:
        yield
    except Exception as error:
        is_of_name = any(words in str(error) for words in _OF_NAMES)
        name = _longest(frame, columns) if is_of_name else None
        if name is None:
            raise
        raise long_partition(key, name) from error


def _longest(frame: DataFrame, columns: Sequence[str]) -> str | None:
    """The first partition column with a value that is too long for the name of a folder. Raises Spark's errors."""
    from pyspark.sql.functions import max, octet_length

    texts = [frame[f"`{name.replace('`', '``')}`"].cast("string") for name in columns]
    (found,) = frame.agg(*(max(octet_length(text)) for text in texts)).collect()
    return next(
        (
            name
            for name, size in zip(columns, found, strict=True)
            if len(f"{name}=".encode()) + (size or 0) > MOST_NAME_BYTES
        ),
        None,
    )


def published(name: str) -> str:
    """The name at the destination of a staged file, relative to the path."""
    return "/".join(name.split("/")[_LEVELS:])


def _folder(batch: str) -> str:
    return f".relay-{batch}"


def _is_hidden(part: str) -> bool:
    """Whether Spark's readers ignore a file or a folder; a partition's name may begin with an underscore."""
    return part.startswith(".") or (part.startswith("_") and "=" not in part)


def _each(listed: Any) -> Iterator[Any]:
    while listed.hasNext():
        yield listed.next().getPath()
