# The supervisor and the node watchdog, without torch:
#   docker build -t REGISTRY/resiliency:0.1.0 .
# This library on top of an image that has torch (and Lightning or NeMo), whose versions stay as they are:
#   docker build --target job --build-arg BASE=nvcr.io/nvidia/nemo:25.02 -t REGISTRY/train:1 .
ARG PYTHON=python:3.12-slim
ARG BASE=pytorch/pytorch:latest

FROM ${PYTHON} AS wheel
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY resiliency resiliency
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .
# What it needs beside torch, with the extra `supervisor`.
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*[r for r in p['dependencies'] if not r.startswith('torch')], *p['optional-dependencies']['supervisor'], sep='\n')" > /wheels/requirements.txt

FROM ${BASE} AS job
COPY --from=wheel /wheels /tmp/wheels
RUN PIP_BREAK_SYSTEM_PACKAGES=1 pip install --no-cache-dir -r /tmp/wheels/requirements.txt \
    && PIP_BREAK_SYSTEM_PACKAGES=1 pip install --no-cache-dir --no-deps /tmp/wheels/*.whl \
    && rm -r /tmp/wheels

FROM ${PYTHON} AS supervisor
COPY --from=wheel /wheels /tmp/wheels
# nvidia-ml-py counts ECC errors, for the watchdog.
RUN pip install --no-cache-dir -r /tmp/wheels/requirements.txt nvidia-ml-py \
    && pip install --no-cache-dir --no-deps /tmp/wheels/*.whl \
    && rm -r /tmp/wheels
ENV PYTHONUNBUFFERED=1
USER 65532:65532
CMD ["resiliency", "supervisor", "--help"]
