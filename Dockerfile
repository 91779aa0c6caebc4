# The trainer for GKE, Slurm with containers, or one machine:
#
#   docker build --build-arg EXTRA=tpu  -t mars-jax:tpu .
#   docker build --build-arg EXTRA=cuda -t mars-jax:cuda .
#   docker build --build-arg EXTRA=cpu  -t mars-jax:cpu .
#   docker run --rm mars-jax:cpu --config configs/paper/0p5b_mars_b4.yaml --print-config

FROM python:3.12-slim

ARG EXTRA=tpu
WORKDIR /mars_jax

# Dependencies first: they change less often than the code, and their layer is then reused.
COPY pyproject.toml README.md LICENSE ./
RUN mkdir mars_jax && touch mars_jax/__init__.py \
    && case "$EXTRA" in \
         cpu) extra=data,gcs ;; \
         tpu) extra=data,gcs,tpu ;; \
         cuda) extra=data,gcs,cuda ;; \
         *) echo "EXTRA=$EXTRA: expected cpu, tpu or cuda" >&2 && exit 2 ;; \
       esac \
    && pip install --no-cache-dir --editable ".[$extra]"

COPY mars_jax mars_jax
COPY configs configs
COPY launch launch

ENV PYTHON=python
# In exec form: worker.sh is process 1 and gets SIGTERM, which it hands on to the trainer.
ENTRYPOINT ["launch/worker.sh"]
