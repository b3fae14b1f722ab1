# relay with Spark and a Java runtime from PyPI, for amd64 and arm64. Builds with BuildKit and without.
#   docker build -t relay .
#   docker run --rm --init -v "$PWD/relay.yaml:/etc/relay/relay.yaml:ro" -e RELAY_SOURCE__DSN=postgresql://… relay
# BASE can be an image of your registry, with its digest: --build-arg BASE=registry.example/python:3.13-slim@sha256:…

ARG BASE=python:3.13-slim

FROM ${BASE} AS dependencies
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY requirements-build.lock requirements-runtime.lock ./
# Spark comes as an archive of source; packing it without compression halves the time. The tools stay behind in
# /opt/build, so that the environment of the final image holds what runs and nothing else.
RUN printf '[bdist_wheel]\ncompression = stored\n' >build.cfg \
 && python3 -m venv /opt/build \
 && /opt/build/bin/pip install -q --require-hashes -r requirements-build.lock \
 && DIST_EXTRA_CONFIG=/build/build.cfg /opt/build/bin/pip wheel -q --no-deps --no-build-isolation --require-hashes \
      --wheel-dir wheels -r requirements-runtime.lock \
 && python3 -m venv --without-pip /opt/relay \
 && /opt/build/bin/pip --python /opt/relay/bin/python install -q --no-index --no-deps wheels/*.whl \
 && rm -rf wheels

FROM dependencies AS package
COPY . .
# Installed under /package: a layer of its own, small, above the large one that changes rarely.
# Spark's scripts and relay run Java through a folder that leaves out what this runtime does not know, see relay/spark/jvm.py.
RUN /opt/build/bin/pip wheel -q --no-deps --no-build-isolation --wheel-dir dist . \
 && /opt/build/bin/pip --python /opt/relay/bin/python install -q --no-warn-script-location --no-index --no-deps --root /package dist/*.whl \
 && PYTHONPATH=$(echo /package/opt/relay/lib/python3*/site-packages) /opt/relay/bin/python -c \
      "import shutil; from relay.spark.jvm import java_home; shutil.copytree(java_home(), '/package/opt/relay/java')" \
 && chmod -R a+rX /package

FROM ${BASE}
LABEL org.opencontainers.image.title="relay" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.description="Carries committed outbox events from PostgreSQL's WAL to handlers" \
      org.opencontainers.image.licenses="Apache-2.0"
# Spark asks for the name of its user, so the account has to exist.
RUN useradd --uid 10001 --user-group --create-home --shell /usr/sbin/nologin relay
COPY --from=dependencies /opt/relay /opt/relay
COPY --from=package /package /
COPY LICENSE NOTICE /usr/share/doc/relay/
ENV PATH=/opt/relay/bin:$PATH \
    JAVA_HOME=/opt/relay/java \
    PYSPARK_PYTHON=/opt/relay/bin/python \
    PYTHONUNBUFFERED=1 \
    RELAY_CONFIG=/etc/relay/relay.yaml
USER 10001:10001
WORKDIR /home/relay
# Healthy while an instance of the group reads the slot: this one or, for a standby, the one it waits for.
HEALTHCHECK --interval=30s --timeout=15s --start-period=60s --retries=3 CMD ["relay", "status", "--check"]
ENTRYPOINT ["relay"]
CMD ["run"]
