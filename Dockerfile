# lmscale for NVIDIA GPUs, with a driver for CUDA 13 on the host:
#
#   docker build --tag lmscale .
#   docker run --gpus all --ipc=host --volume "$PWD/runs:/lmscale/runs" lmscale python src/train.py model=gpt_355m ...
#
# It has not been built, because the machine where it was written has no Docker and no access to a registry of images.
# hadolint accepts it. The base has the CUDA version of PyPI's torch 2.11 to 2.13, which apex needs; without apex any
# base with a C compiler would do, because torch brings its CUDA libraries.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# gcc and Python's headers are for torch.compile. Ubuntu 24.04 has one version of each, Python 3.12.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git make gcc g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /lmscale
ENV PATH=/lmscale/.venv/bin:$PATH PIP_NO_CACHE_DIR=1
COPY . .
RUN python3 -m venv .venv && python -m pip install torch==2.13.0 && make setup

# NVIDIA's fused LayerNorm, `kernels=apex`: docker build --build-arg APEX_COMMIT=<commit of github.com/NVIDIA/apex> .
ARG APEX_COMMIT=""
RUN if [ -n "$APEX_COMMIT" ]; then \
      python -m pip install setuptools==80.9.0 packaging==25.0 ninja==1.13.0 \
      && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 python -m pip install --no-build-isolation \
        "git+https://github.com/NVIDIA/apex@$APEX_COMMIT"; \
    fi
CMD ["make", "check-gpus"]
