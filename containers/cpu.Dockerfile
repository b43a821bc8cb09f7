# dflash-serve on a CPU.
#     docker build -f containers/cpu.Dockerfile -t dflash-ggml:cpu .
#     docker run --rm -p 8080:8080 -v models:/models dflash-ggml:cpu -m /models/MODEL.gguf --api-key KEY

FROM python:3.13-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
# a build for the CPUs of most machines; leave the setting out to build for this one
RUN pip wheel --no-cache-dir --no-deps -w /wheels . -C cmake.define.DFLASH_PORTABLE=ON

FROM python:3.13-slim-bookworm
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/*.whl)[server,hub,grammar,selection]"
RUN useradd --create-home --uid 1000 dflash && install -d -o dflash /models
USER 1000
# weights, and what is fetched by name
ENV HF_HOME=/models/hub
VOLUME /models
EXPOSE 8080
HEALTHCHECK --start-period=10m --interval=30s --timeout=5s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health', timeout=4)"]
ENTRYPOINT ["dflash-serve", "--host", "0.0.0.0"]
CMD ["--help"]
