# relay, in two images, for amd64 and arm64: with Spark and a Java runtime from PyPI, and, by --target slim, without. Builds
# with BuildKit and without.
#   docker build -t relay .
#   docker build -t relay:slim --target slim .
#   docker run --rm --init -v "$PWD/relay.yaml:/etc/relay/relay.yaml:ro" -e RELAY_SOURCE__DSN=postgresql://… relay
# BASE can be an image of your registry, with its digest: --build-arg BASE=registry.example/python:3.13-slim@sha256:…

ARG BASE=python:3.13-slim

# The tools stay behind in /opt/build, so that the environment of the final image holds what runs and nothing else.
FROM ${BASE} AS tools
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY requirements-build.lock ./
RUN python3 -m venv /opt/build \
 && /opt/build/bin/pip install -q --require-hashes -r requirements-build.lock \
 && python3 -m venv --without-pip /opt/relay

FROM tools AS wheel
COPY . .
RUN /opt/build/bin/pip wheel -q --no-deps --no-build-isolation --wheel-dir /dist .

FROM ${BASE} AS runtime
LABEL org.opencontainers.image.title="relay" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.description="Carries committed outbox events from PostgreSQL's WAL to handlers" \
      org.opencontainers.image.licenses="Apache-2.0"
# Spark asks for the name of its user, so the account has to exist.
RUN useradd --uid 10001 --user-group --create-home --shell /usr/sbin/nologin relay
COPY LICENSE NOTICE /usr/share/doc/relay/
ENV PATH=/opt/relay/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    RELAY_CONFIG=/etc/relay/relay.yaml
WORKDIR /home/relay
# Healthy while an instance of the group reads the slot: this one or, for a standby, the one it waits for.
HEALTHCHECK --interval=30s --timeout=15s --start-period=60s --retries=3 CMD ["relay", "status", "--check"]
ENTRYPOINT ["relay"]
CMD ["run"]

# relay is installed under /package: a layer of its own, small, above the large one that changes rarely.
FROM tools AS slim-dependencies
COPY requirements-slim.lock ./
RUN /opt/build/bin/pip --python /opt/relay/bin/python install -q --no-deps --only-binary :all: --require-hashes \
      -r requirements-slim.lock \
 && find /opt/relay/lib/python3*/site-packages/numpy -type d -name tests -prune -exec rm -r {} +

FROM slim-dependencies AS slim-package
COPY --from=wheel /dist /dist
RUN /opt/build/bin/pip --python /opt/relay/bin/python install -q --no-warn-script-location --no-index --no-deps --root /package /dist/*.whl \
 && chmod -R a+rX /package

FROM runtime AS slim
COPY --from=slim-dependencies /opt/relay /opt/relay
COPY --from=slim-package /package /
ARG REVISION=unknown
LABEL org.opencontainers.image.revision="$REVISION"
USER 10001:10001

FROM tools AS dependencies
COPY requirements-runtime.lock ./
# Spark comes as an archive of source; packing it without compression halves the time.
RUN printf '[bdist_wheel]\ncompression = stored\n' >build.cfg \
 && DIST_EXTRA_CONFIG=/build/build.cfg /opt/build/bin/pip wheel -q --no-deps --no-build-isolation --require-hashes \
      --wheel-dir wheels -r requirements-runtime.lock \
 && /opt/build/bin/pip --python /opt/relay/bin/python install -q --no-index --no-deps wheels/*.whl \
 && cd /opt/relay/lib/python3*/site-packages && find numpy pandas pyarrow -type d -name tests -prune -exec rm -r {} + \
 && rm -rf /build/wheels

FROM dependencies AS package
COPY --from=wheel /dist /dist
# Spark's scripts and relay run Java through a folder that leaves out what this runtime does not know, see relay/spark/jvm.py.
RUN /opt/build/bin/pip --python /opt/relay/bin/python install -q --no-warn-script-location --no-index --no-deps --root /package /dist/*.whl \
 && PYTHONPATH=$(echo /package/opt/relay/lib/python3*/site-packages) /opt/relay/bin/python -c \
      "import shutil; from relay.spark.jvm import java_home; shutil.copytree(java_home(), '/package/opt/relay/java')" \
 && chmod -R a+rX /package

FROM runtime
COPY --from=dependencies /opt/relay /opt/relay
COPY --from=package /package /
ENV JAVA_HOME=/opt/relay/java \
    PYSPARK_PYTHON=/opt/relay/bin/python
ARG REVISION=unknown
LABEL org.opencontainers.image.revision="$REVISION"
USER 10001:10001
