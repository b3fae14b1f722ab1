"""What a release consists of: archives that anybody can build again, and that work where nothing else is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from email import message_from_bytes
from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

import psycopg
import pytest
import yaml

import relay
from tests.process import ROOT

pytestmark = [pytest.mark.rare]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the archive of the source, built from this checkout."""
    return built(ROOT, tmp_path_factory.mktemp("dist"))


def built(source: Path, to: Path, umask: int = 0o022, **environment: str) -> Path:
    """Build both archives; needs no network."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(to)],
        cwd=source,
        env={**os.environ, **environment},
        capture_output=True,
        check=True,
        timeout=60,
        umask=umask,
    )
    return to


def digests(folder: Path) -> dict[str, str]:
    return {each.name: sha256(each.read_bytes()).hexdigest() for each in folder.iterdir()}


def wheel(folder: Path) -> Path:
    (found,) = folder.glob("*.whl")
    return found


def test_the_archives_are_reproducible(dist: Path, tmp_path: Path) -> None:
    """Built from the archive of the source, in another folder, at another time, with other modes: the same bytes."""
    (archive,) = dist.glob("*.tar.gz")
    subprocess.run(["tar", "-xzf", archive, "-C", tmp_path], check=True)
    (source,) = tmp_path.iterdir()
    for file in source.rglob("*.py"):
        file.chmod(0o600)
        os.utime(file, (1_000_000_000, 1_000_000_000))
    again = built(source, tmp_path / "again", umask=0o077)
    assert digests(again) == digests(dist)
    dated = [
        digests(built(ROOT, tmp_path / name, SOURCE_DATE_EPOCH="1700000000")) for name in ("a", "b")
    ]
    assert dated[0] == dated[1]
    assert dated[0].keys() == digests(dist).keys()


def test_an_index_takes_the_archives_and_shows_no_link_that_leads_nowhere(dist: Path) -> None:
    """By twine's own check, in an environment of its own that `make check-dist` shares."""
    makefile = (ROOT / "Makefile").read_text()
    (version,) = re.findall(r"^TWINE_VERSION := (.+)$", makefile, re.MULTILINE)
    tool = f"build/twine-{version}"
    subprocess.run(["make", "-s", tool], cwd=ROOT, check=True, timeout=300)
    archives = sorted(str(each) for each in dist.iterdir())
    subprocess.run([ROOT / tool / "bin/twine", "check", "--strict", *archives], check=True)
    with ZipFile(wheel(dist)) as packed:
        (name,) = (each for each in packed.namelist() if each.endswith("/METADATA"))
        metadata = message_from_bytes(packed.read(name))
    assert metadata["Version"] == relay.__version__
    text = metadata.get_payload()
    assert isinstance(text, str)
    assert text.lstrip().startswith("# relay\n")
    assert re.findall(r"\]\((?!https?:)[^)]*\)", text) == []
    # Without an extra it is the client, which needs nothing.
    assert all("extra ==" in each for each in metadata.get_all("Requires-Dist", []))


@pytest.fixture
def environment(dist: Path, tmp_path: Path) -> Path:
    """The folder of the programs of an environment that has the wheel and no other package, not even pip."""
    folder = tmp_path / "env"
    venv.create(folder, with_pip=False)
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    subprocess.run(
        [*command, "install", "-q", "--no-index", "--no-deps", str(wheel(dist))],
        capture_output=True,
        check=True,
        timeout=60,
    )
    return folder / "bin"


def run(program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program where no checkout is in sight."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(
        [program, *arguments],
        capture_output=True,
        text=True,
        cwd=program.parent,
        env={**kept, **environment},
        timeout=60,
        check=False,
    )


def test_the_wheel_alone_publishes_and_says_what_the_service_needs(environment: Path) -> None:
    program = (
        "import relay, relay.client, relay.client.testing; print(relay.__version__, relay.__file__)"
    )
    found = run(environment / "python", "-c", program)
    version, _, file = found.stdout.strip().partition(" ")
    assert version == relay.__version__, found.stderr
    assert Path(file).is_relative_to(environment.parent)
    assert run(environment / "relay", "--version").stdout == f"relay {relay.__version__}\n"
    refused = run(environment / "relay", "--help")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.endswith(": pip install 'relay-outbox[service]'\n")


def test_the_wheel_with_its_dependencies_runs_the_service(
    environment: Path, database: str, tmp_path: Path
) -> None:
    """Its packages are those of this environment, after the wheel's on the path: relay itself comes from the wheel."""
    (site,) = environment.parent.glob("lib/python*/site-packages")
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (site / "shared.pth").write_text("\n".join([*shared, sysconfig.get_path("purelib")]))
    assert run(environment / "relay", "--version").stdout == f"relay {relay.__version__}\n"
    config = tmp_path / "relay.yaml"
    handler = {"type": "sql", "statement": "select %(id)s"}
    config.write_text(
        yaml.safe_dump(
            {
                "source": {"dsn": database, "mode": "poll"},
                "handlers": {"orders": handler},
                "routes": [{"handlers": ["orders"]}],
            }
        )
    )
    for command in ("init", "check"):
        found = run(environment / "relay", command, "--config", str(config))
        assert found.returncode == 0, found.stderr
    applied = {
        f"{side}/{file.name}"
        for side in ("source", "both", "outbox", "target")
        for file in (ROOT / "sql" / side).glob("*.sql")
    }
    with psycopg.connect(database) as conn:
        assert {name for (name,) in conn.execute("select name from relay.migrations")} == applied
