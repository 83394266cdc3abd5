"""About how many tokens an image, a recording, a video or a file has, from its first bytes.

Nothing is fetched: media behind a URL, or of an unknown format, count as the settings say for their
kind.
"""

from __future__ import annotations

import base64
import binascii
import io
import wave

import imagesize

from disagg.config import MediaSection
from disagg.router.api.prompt_parts import Kind, Media

# An image's size is within its first bytes, behind its colour profile and its thumbnail at worst.
_HEAD = 128 << 10
_BYTES_PER_S = 16_000  # of compressed sound, at 128 kbit/s


def tokens(media: Media, settings: MediaSection) -> int:
    """About how many tokens the model reads for it."""
    match media.kind:
        case Kind.IMAGE:
            return _image(media, settings)
        case Kind.AUDIO:
            seconds = _seconds(media)
            if seconds is None:
                return settings.audio_tokens
            return max(1, round(seconds * settings.audio_tokens_per_s))
        case Kind.VIDEO:
            return settings.video_tokens
        case Kind.FILE:
            return settings.file_tokens


def _image(media: Media, settings: MediaSection) -> int:
    if settings.pixels_per_token is None:
        return settings.image_tokens
    data = _decoded(media.source, _HEAD)
    if data is None or data.startswith(b"<"):  # no XML of strangers is parsed here
        return settings.image_tokens
    try:
        width, height = map(int, imagesize.get(io.BytesIO(data)))
    except Exception:  # noqa: BLE001 - of any file that a client invents
        return settings.image_tokens
    if width <= 0 or height <= 0:
        return settings.image_tokens
    return min(settings.max_image_tokens, max(1, width * height // settings.pixels_per_token))


def _seconds(media: Media) -> float | None:
    """How long a recording plays; None if only its address is known."""
    data = _decoded(media.source, 4096)
    if data is None:
        return None
    size = len(_base64(media.source)) * 3 // 4
    try:
        with wave.open(io.BytesIO(data)) as recording:
            frame = recording.getnchannels() * recording.getsampwidth()
            rate = frame * recording.getframerate()
    except (wave.Error, EOFError, RuntimeError):
        return size / _BYTES_PER_S
    return size / rate if rate > 0 else None


def _decoded(source: str, most: int) -> bytes | None:
    """The first bytes, if they are here."""
    encoded = _base64(source)[: most // 3 * 4]
    try:
        return base64.b64decode(encoded[: len(encoded) // 4 * 4], validate=True) or None
    except (binascii.Error, ValueError):
        return None


def _base64(source: str) -> str:
    """What may be base64: a data URL's, or all of it."""
    return source.partition(",")[2] if source.startswith("data:") else source
