# Two images from one file: `gateway` (no torch, small) and `node` (adds the engine).
#   docker build --target gateway -t kagari/gateway .
#   docker build --target node -t kagari/node --build-arg TORCH_INDEX=URL .
FROM python:3.11-slim-bookworm AS gateway
WORKDIR /opt/kagari
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    KAGARI_HOME=/var/lib/kagari \
    KAGARI_MODELS=/var/cache/kagari/models
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY policies policies
COPY engine engine
COPY node_agent node_agent
COPY gateway gateway
RUN pip install --no-cache-dir -c constraints.txt . \
 && mkdir -p /var/lib/kagari /var/cache/kagari/models /join \
 && chown -R 10001:10001 /var/lib/kagari /var/cache/kagari /join
USER 10001
EXPOSE 8000 8001
HEALTHCHECK --interval=2s --timeout=2s --retries=15 \
  CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8002/livez', timeout=2)"]
ENTRYPOINT ["kagari"]
CMD ["gateway", "--host", "0.0.0.0"]

FROM gateway AS node
USER root
ARG TORCH_INDEX=
RUN pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--index-url $TORCH_INDEX} torch \
 && pip install --no-cache-dir -c constraints.txt '.[node]'
USER 10001
HEALTHCHECK NONE
CMD ["node", "--help"]
