#!/usr/bin/env bash
# Serve on a running Ray cluster: the job runs on its head node, the engines where Ray finds the
# GPUs. `ray job logs` shows the progress, `ray job stop` ends it cleanly.
#
#   RAY_ADDRESS=http://HEAD:8265 examples/ray_job.sh serve_configs/gpu-1p1d.yaml
#
# disagg and vLLM must be installed on the nodes (docker/Dockerfile.cuda). Ray 2.60 asks for a token
# unless told otherwise: it is sent if it is in RAY_AUTH_TOKEN or ~/.ray/auth_token. Relative paths in the file start in this folder, which the
# nodes must have too; so a laptop's own Ray (`ray start --head`) runs serve_configs/cpu-1p1d.yaml.
set -euo pipefail
file=${1:?usage: examples/ray_job.sh FILE}
folder=$(cd "$(dirname "$file")" && pwd)
if [ -n "${RAY_AUTH_TOKEN:-}" ] || [ -f "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}" ]; then
    export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
fi
ray=$(cd "$(dirname "$0")/.." && pwd)/.venv/bin/ray
exec "$ray" job submit --no-wait --working-dir "$folder" \
    --runtime-env-json "{\"env_vars\": {\"DISAGG_FOLDER\": \"$PWD\"}}" \
    -- disagg serve "$(basename "$file")"
