# An image for Cloud TPUs, of the versions that were tested:
# docker build -f clusters/tpu.Dockerfile -t registry.example.com/lmlib .
FROM python:3.12-slim
WORKDIR /lmlib
COPY pyproject.toml constraints.txt README.md ./
COPY lmlib lmlib
COPY runner runner
COPY data_tools data_tools
COPY experiments experiments
RUN pip install --no-cache-dir --constraint constraints.txt '.[tpu]'
CMD ["python", "-m", "runner", "--help"]
