# asyncrl with everything that pyproject.toml pins, on CUDA's development image.  docs/start/container.md describes it.
#
#   docker build -t asyncrl .
#   docker build -t asyncrl --build-arg EXTRAS="wandb trackio" .
#
# The development image has nvcc and CUDA's headers: SGLang compiles kernels when it first needs them.  Its version is
# the one of the CUDA packages that torch brings (cuda-toolkit in pyproject.toml).
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04
FROM ${CUDA_IMAGE}

# g++ and ninja compile kernels; Triton also needs Python's headers.  SGLang's kernels load libnuma, its radix tree and
# NCCL over InfiniBand load the rdma libraries.  tini ends what a run leaves to process 1.
ARG PYTHON_VERSION=3.12
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        "python${PYTHON_VERSION}" "python${PYTHON_VERSION}-dev" "python${PYTHON_VERSION}-venv" \
        ca-certificates g++ git libibverbs1 libnuma1 librdmacm1 ninja-build tini \
    && rm -rf /var/lib/apt/lists/*

ARG UV_VERSION=0.13.9
RUN "python${PYTHON_VERSION}" -m venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir "uv==${UV_VERSION}"

# UV_PYTHON_DOWNLOADS: only the Python from above.  PYTHON: what the scripts in configs/ run instead of "uv run python".
ENV PATH=/opt/asyncrl/.venv/bin:/opt/uv/bin:${PATH} \
    UV_PYTHON_DOWNLOADS=never \
    UV_LINK_MODE=copy \
    PYTHON=python

# First the packages, which take minutes, in a layer that a change of the sources leaves alone.  uv takes every version
# from pyproject.toml: exact ones for dependencies and extras, constraint-dependencies for what these bring.
WORKDIR /opt/asyncrl
COPY pyproject.toml README.md ./
ARG EXTRAS=""
RUN uv sync --no-cache --no-dev --no-install-project --python "python${PYTHON_VERSION}" \
        $(for extra in ${EXTRAS}; do echo "--extra ${extra}"; done)
COPY asyncrl ./asyncrl
COPY benchmarks ./benchmarks
COPY configs ./configs
COPY docs ./docs
COPY train.py train_async.py LICENSE ./
RUN uv sync --no-cache --no-dev --python "python${PYTHON_VERSION}" \
        $(for extra in ${EXTRAS}; do echo "--extra ${extra}"; done)

# Any user may run the image (docker run --user): caches of compiled kernels go to a home directory that all can write,
# and libraries that ask for the user's name find one.
RUN mkdir --mode=1777 /home/asyncrl /workspace
ENV HOME=/home/asyncrl \
    USER=asyncrl \
    LOGNAME=asyncrl
WORKDIR /workspace
ENTRYPOINT ["tini", "-g", "--"]
CMD ["bash"]
