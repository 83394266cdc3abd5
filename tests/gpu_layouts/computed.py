"""What an engine on a GPU would register, without one: `python -m gpu_layouts.computed hopper`.

Reads one line of JSON for each engine: `model`, the content of its `config.json`; `connector`,
vLLM's `kv_transfer_config`; `blocks`; and `args` of the engine. Prints one line for each. Must run
in a process of its own: it becomes that GPU.
"""

from __future__ import annotations

import json
import os
import sys

from gpu_layouts import description, registered, stand_in


def main() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("DISAGG_SECRET", "correct horse battery")
    mode = stand_in.install(stand_in.GPUS[sys.argv[1]])
    registered.start_parallel_groups()
    for line in sys.stdin:
        asked = json.loads(line)
        found = registered.registered(
            asked["model"], mode, asked["connector"], asked["blocks"], **asked["args"]
        )
        print(json.dumps(description.described(found.config, found.cache, found.caches)))
    sys.stdout.flush()
    os._exit(0)  # kernels that are not there cannot be taken down in order


if __name__ == "__main__":
    main()
