#!/usr/bin/env bash
# Our router in front of two plain vLLM servers whose KV cache moves by vLLM's own NixlConnector.
# No Ray; only the router is disagg's. Ctrl-C ends all three.
#
#   examples/nixl_vllm.sh MODEL [any option of vLLM's OpenAI server ...]
#
# NIXL must be installed beside vLLM: pip install --no-deps nixl==1.5.1 nixl-cu13==1.5.1. With GPUs,
# give each engine its own by CUDA_VISIBLE_DEVICES in `engine` below. On CPU, with a small
# checkpoint:
#
#   disagg make-model .cache/models/tiny
#   KV_BUFFER_DEVICE=cpu VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 \
#     examples/nixl_vllm.sh .cache/models/tiny --enforce-eager --block-size 128
#
# The router listens on PORT (8000), the engines on PORT + 101 and 102, NIXL on PORT + 201 and 202.
set -euo pipefail
model=${1:?usage: examples/nixl_vllm.sh MODEL [vLLM options]}
shift
bin=$(cd "$(dirname "$0")/.." && pwd)/.venv/bin
port=${PORT:-8000}

pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true; wait' EXIT
trap 'exit 130' INT TERM

engine() { # number, role, options
  local number=$1 role=$2
  shift 2
  VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT=$((port + 200 + number)) \
    "$bin/python" -m vllm.entrypoints.openai.api_server --model "$model" --host 127.0.0.1 \
    --port $((port + 100 + number)) --kv-transfer-config "{\"kv_connector\": \"NixlConnector\",
      \"kv_role\": \"$role\", \"kv_buffer_device\": \"${KV_BUFFER_DEVICE:-cuda}\"}" "$@" &
  pids+=($!)
}

engine 1 kv_producer "$@"
engine 2 kv_consumer "$@"
for number in 1 2; do
  until curl -fs "http://127.0.0.1:$((port + 100 + number))/health"; do
    kill -0 "${pids[@]}" || exit 1 # an engine ended; its own lines above say why
    sleep 1
  done
done
"$bin/disagg" router --connector nixl --port "$port" \
  --prefill "http://127.0.0.1:$((port + 101))" --decode "http://127.0.0.1:$((port + 102))" &
pids+=($!)
wait -n
