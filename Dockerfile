# A server of one model: docs/serving.md.
FROM python:3.11-slim AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
# The package index of PyTorch's CPU builds, which are much smaller; without it, pip's own index.
ARG PYTORCH_INDEX=""
WORKDIR /build
COPY constraints.txt ./
RUN python -m venv /opt/esolm \
    && if [ -n "$PYTORCH_INDEX" ]; then \
        /opt/esolm/bin/pip install --no-cache-dir -c constraints.txt --index-url "$PYTORCH_INDEX" torch; \
    fi
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY src src
RUN /opt/esolm/bin/pip install --no-cache-dir -c constraints.txt '.[serve,constraints]'

FROM python:3.11-slim
COPY --from=build /opt/esolm /opt/esolm
RUN useradd --system --create-home --uid 10001 esolm
ENV PATH=/opt/esolm/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
VOLUME /model
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["esolm", "serve"]
CMD ["/model", "--host", "0.0.0.0", "--port", "8000"]
