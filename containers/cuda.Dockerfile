# dflash-serve on an NVIDIA GPU.
#     docker build -f containers/cuda.Dockerfile --build-arg ARCHITECTURES="90-real" -t dflash-ggml:cuda .
#     docker run --rm --gpus all -p 8080:8080 -v models:/models dflash-ggml:cuda -m /models/MODEL.gguf --api-key KEY

FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3-pip python3-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
# RTX 30, 40 and 50, A100, H100; fewer build faster
ARG ARCHITECTURES="80-real;86-real;89-real;90-real;120-real"
RUN pip wheel --no-cache-dir --no-deps -w /wheels . -C cmake.define.GGML_CUDA=ON -C cmake.define.DFLASH_PORTABLE=ON \
    -C "cmake.define.CMAKE_CUDA_ARCHITECTURES=${ARCHITECTURES}"

FROM nvidia/cuda:13.0.1-base-ubuntu24.04
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv libgomp1 && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/dflash/bin:$PATH
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python3 -m venv /opt/dflash && \
    pip install --no-cache-dir "$(echo /wheels/*.whl)[server,hub,grammar,selection]" "nvidia-cublas==13.*" "nvidia-cuda-runtime==13.*"
# Ubuntu's images have a user 1000 already
RUN install -d -o ubuntu /models
USER 1000
ENV HF_HOME=/models/hub
VOLUME /models
EXPOSE 8080
HEALTHCHECK --start-period=10m --interval=30s --timeout=5s \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health', timeout=4)"]
ENTRYPOINT ["dflash-serve", "--host", "0.0.0.0"]
CMD ["--help"]
