# jingu on CPUs, from a clone:
#
#     docker build -f docker/cpu.Dockerfile -t jingu:cpu .
#     docker run --rm -it -v "$PWD/work:/work" jingu:cpu quickstart
#
# TORCH_INDEX is the address of an index of PyTorch's builds for CPUs (see pytorch.org), which are much smaller than the
# default ones for CUDA.
FROM python:3.12-slim

ARG TORCH_INDEX
COPY pyproject.toml constraints.txt README.md LICENSE /jingu/
COPY examples /jingu/examples
COPY jingu /jingu/jingu
RUN pip install --no-cache-dir --constraint /jingu/constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
    && pip install --no-cache-dir --constraint /jingu/constraints.txt "/jingu[gguf,hub,serve,zstd]" \
    && useradd --create-home --uid 1000 jingu \
    && install --directory --owner jingu /work

USER jingu
WORKDIR /work
ENTRYPOINT ["jingu"]
CMD ["--help"]
