"""The keys of HiddenStatesConnector's `kv_connector_extra_config`. Every key has a default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from disagg.connector.extra_config import parse
from disagg.private_files import PrivateFolder, user_folder

# Further keys of vLLM's ExampleHiddenStatesConnector, and why they are not needed here.
_NOT_OURS = {
    "use_synchronization_lock": "remove it: a lock costs one system call here and is always held",
    "allow_custom_save_path": "remove it: clients never choose where this engine writes",
}


class HiddenStatesSettings(BaseModel):
    """The keys of `kv_connector_extra_config`; as in vLLM's example where they mean the same."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shared_storage_path: Path | None = Field(
        None, description="Folder of the files; this user's own in the temporary one if not given"
    )
    num_writer_threads: int = Field(8, ge=1, le=256, description="Files written at once")
    buffer_bytes: int = Field(
        16 << 20,
        ge=4096,
        description="Host memory of each thread, pinned with a GPU; longer files pass in pieces",
    )

    def folder(self) -> PrivateFolder:
        """Absolute: readers have another working directory. Hidden states reveal the prompts, so
        other users may read them only if whoever made the folder allowed it."""
        if self.shared_storage_path is None:
            return user_folder().sub("hidden-states")
        return PrivateFolder(self.shared_storage_path.expanduser().absolute(), others="read")


def read_settings(extra_config: dict[str, Any]) -> HiddenStatesSettings:
    """Parse the extra config; raises `ConfigError`."""
    return parse(HiddenStatesSettings, extra_config, _NOT_OURS)
