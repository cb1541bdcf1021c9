# `didicm serve` in a container: slim, without root, with a health check and an init process.
# By default it serves ONNX models, without PyTorch; --build-arg EXTRAS=torch,serve serves runs.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:${PYTHON}-slim
ARG EXTRAS=onnx,serve
ENV PYTHONUNBUFFERED=1
RUN apt-get update && apt-get install --yes --no-install-recommends tini && rm -rf /var/lib/apt/lists/*
COPY --from=build /dist /dist
RUN python -m pip install --no-cache-dir "$(echo /dist/didicm-*.whl)[${EXTRAS}]" && rm -r /dist/*
RUN useradd --uid 10001 --create-home didicm
USER 10001
WORKDIR /home/didicm
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s --retries=3 \
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# Signals reach the server, and what it leaves behind is reaped.
ENTRYPOINT ["tini", "--", "didicm"]
CMD ["serve", "/model.onnx", "--host", "0.0.0.0", "--port", "8000"]
