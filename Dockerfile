# docker build --target cpu -t qerl-lab:cpu .        the embedded policy, reports, all commands that need no GPU
# docker build --target cuda -t qerl-lab:cuda .      training and rollouts with vLLM; run with --gpus all
# docker run --gpus all -v "$PWD/runs:/qerl-lab/runs" qerl-lab:cuda +experiment=nvfp4_aqn rollout=vllm
FROM python:3.12 AS source
WORKDIR /qerl-lab
COPY . .
ENTRYPOINT ["python", "-m", "qerl_lab"]

FROM source AS cpu
# PyTorch's CPU build first: the default one brings several GB of CUDA. What it needs comes from PyPI, as constrained.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN torch=$(grep '^torch==' constraints.txt) \
    && pip install --no-cache-dir --no-deps --index-url "$TORCH_INDEX" "$torch" \
    && pip install --no-cache-dir -c constraints.txt -e .

FROM source AS cuda
# Without constraints.txt: vLLM pins its own PyTorch, whose wheels bring CUDA. The host needs the driver only.
RUN pip install --no-cache-dir -e '.[vllm]'
