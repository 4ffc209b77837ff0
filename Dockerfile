# Two images from one file: `--target gateway` (no torch) and `--target node` (the gateway's plus
# engine and node agent). TORCH_INDEX: another package index for torch alone, as for `make`.

FROM python:3.11-slim-bookworm AS gateway
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    HOME=/var/lib/kagari KAGARI_HOME=/var/lib/kagari KAGARI_MODELS=/var/cache/kagari/models
# The folders exist, owned by the user, so that a fresh volume mounted on one is writable.
RUN useradd --system --uid 10001 --home-dir /var/lib/kagari --shell /usr/sbin/nologin kagari \
    && install -d -o kagari -g kagari -m 0700 /var/lib/kagari /run/kagari \
    && install -d -o kagari -g kagari -m 0755 /var/cache/kagari /var/cache/kagari/models
WORKDIR /opt/kagari
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY policies policies
COPY gateway gateway
RUN pip install -c constraints.txt .
USER 10001
EXPOSE 8000 8001
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=5 CMD ["python", "-c", \
    "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/startupz', timeout=2)"]
ENTRYPOINT ["python", "-m", "gateway"]
CMD ["--host", "0.0.0.0"]

FROM gateway AS node
USER root
ARG TORCH_INDEX=""
RUN pip install -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY engine engine
COPY node_agent node_agent
RUN pip install -c constraints.txt '.[node]'
# The CPU kernels, compiled here for every CPU; the compiler stays out of the image.
ENV KAGARI_CACHE=/var/cache/kagari
RUN apt-get update && apt-get install -y --no-install-recommends g++ \
    && python -m engine.execute.kernels.cpu \
    && apt-get purge -y --auto-remove g++ && rm -rf /var/lib/apt/lists/*
USER 10001
# A node serves no port; it is healthy while an engine process runs under its agent.
HEALTHCHECK --interval=5s --timeout=3s --start-period=120s --retries=5 CMD ["python", "-c", \
    "import pathlib, sys; sys.exit(not any(b'\\0engine\\0serve\\0' in p.read_bytes() for p in pathlib.Path('/proc').glob('[0-9]*/cmdline')))"]
ENTRYPOINT ["python", "-m", "node_agent"]
CMD ["--help"]
