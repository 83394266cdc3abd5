#!/usr/bin/env bash
# Two plain vLLM servers with our connector, prefill and decode, and a router in front of them.
# No Ray. Ctrl-C ends all three, and leaves nothing behind.
#
#   examples/plain_vllm.sh MODEL [any option of vLLM's OpenAI server ...]
#
# On CPU, with a small checkpoint:
#
#   disagg make-model .cache/models/tiny
#   VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 \
#     examples/plain_vllm.sh .cache/models/tiny --enforce-eager --block-size 128
set -euo pipefail
model=${1:?usage: examples/plain_vllm.sh MODEL [vLLM options]}
shift
bin=$(cd "$(dirname "$0")/.." && pwd)/.venv/bin

pids=()
# A worker that Ctrl-C ends leaves vLLM's sockets and the probe of shared_storage: they are in here.
TMPDIR=$(mktemp -d "${TMPDIR:-/tmp}/disagg-XXXXXX")
export TMPDIR
end() {
  trap '' INT TERM # a second one must not break this off
  kill "${pids[@]}" 2>/dev/null || true
  wait
  rm -rf "$TMPDIR"
}
trap end EXIT
trap 'exit 130' INT TERM

engine() { # port, role, options
  local port=$1 role=$2
  shift 2
  "$bin/python" -m vllm.entrypoints.openai.api_server --model "$model" --host 127.0.0.1 \
    --port "$port" --kv-transfer-config "{\"kv_connector\": \"DisaggConnector\",
      \"kv_connector_module_path\": \"disagg.connector\", \"kv_role\": \"$role\"}" \
    --middleware disagg.engine.routes.Routes "$@" &
  pids+=($!)
}

engine 8101 kv_producer "$@"
engine 8102 kv_consumer "$@"
for port in 8101 8102; do
  until curl -fs "http://127.0.0.1:$port/health"; do
    kill -0 "${pids[@]}" || exit 1 # an engine ended; its own lines above say why
    sleep 1
  done
done
"$bin/disagg" router --prefill http://127.0.0.1:8101 --decode http://127.0.0.1:8102 --port 8000 &
pids+=($!)
wait -n
