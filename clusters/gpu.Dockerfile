# An image for NVIDIA GPUs (driver 580 or newer), of the versions that were tested:
# docker build -f clusters/gpu.Dockerfile -t registry.example.com/lmlib .
FROM python:3.12-slim
WORKDIR /lmlib
COPY pyproject.toml constraints.txt README.md ./
COPY lmlib lmlib
COPY runner runner
COPY data_tools data_tools
COPY experiments experiments
RUN pip install --no-cache-dir --constraint constraints.txt '.[cuda13,kubernetes]'
CMD ["python", "-m", "runner", "--help"]
