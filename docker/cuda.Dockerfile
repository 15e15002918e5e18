# jingu on NVIDIA GPUs, from a clone. The host needs a driver and the NVIDIA Container Toolkit:
#
#     docker build -f docker/cuda.Dockerfile -t jingu:cuda .
#     docker run --rm -it --gpus all --ipc host -v "$PWD/work:/work" jingu:cuda train run.yaml --processes 8
#
# PyTorch's builds for CUDA contain its libraries. TORCH_INDEX selects those of another CUDA version. The compiler is
# for compiled blocks (train.compile).
FROM python:3.12-slim

ARG TORCH_INDEX
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev openssh-client \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml constraints.txt README.md LICENSE /jingu/
COPY examples /jingu/examples
COPY jingu /jingu/jingu
RUN pip install --no-cache-dir --constraint /jingu/constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
    && pip install --no-cache-dir --constraint /jingu/constraints.txt "/jingu[bits,gguf,hub,serve,zstd]" \
    && useradd --create-home --uid 1000 jingu \
    && install --directory --owner jingu /work

ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER jingu
WORKDIR /work
ENTRYPOINT ["jingu"]
CMD ["--help"]
