"""Checks of `tiers.objects`, without asking the store."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from disagg.config import Deployment
from disagg.object_urls import MOONCAKE_INSTALL, S3_INSTALL
from disagg.private_files import read_own_file


def object_problems(deployment: Deployment, *, here: bool) -> Iterator[str]:
    """here: the engines run on this machine, so that their packages and files are here, too."""
    objects = deployment.tiers.objects
    if objects is None or not here:
        return
    if objects.parsed_url.kind == "s3" and find_spec("obstore") is None:
        yield f"tiers.objects.url: s3 — obstore is not installed here; {S3_INSTALL}"
    if objects.parsed_url.kind == "mooncake" and find_spec("mooncake") is None:
        yield f"tiers.objects.url: mooncake — its client is not installed here; {MOONCAKE_INSTALL}"
    if objects.credentials_file is not None:
        key = f"tiers.objects.credentials_file: {str(objects.credentials_file)!r}"
        try:
            read_own_file(objects.credentials_file, 1)
        except OSError as error:
            yield f"{key} — cannot be read ({error.strerror}); make it this user's, of mode 600"
    if objects.ca_file is not None and not objects.ca_file.is_file():
        yield f"tiers.objects.ca_file: {str(objects.ca_file)!r} — is no file; name a PEM file"


def object_warnings(deployment: Deployment) -> Iterator[str]:
    """What keeps engines from finding each other's objects."""
    objects, transfer = deployment.tiers.objects, deployment.transfer
    if objects is None or objects.checksum != "keyed":
        return
    if transfer.secret_file is None and transfer.secret_env is None:
        yield (
            "tiers.objects.checksum: keyed — by this user's secret on this host, so deployments "
            "started on other hosts do not find these objects; set transfer.secret_file"
        )
