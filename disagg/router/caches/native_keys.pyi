# native_keys.c; block_keys.py says what these do.
from collections.abc import Sequence

def packed(ids: Sequence[int], /) -> bytes: ...
def chain(
    data: bytes, width: int, parent: int, extra: list[bytes] | None = None, /
) -> list[int]: ...
