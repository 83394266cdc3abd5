"""The sources that a router's section names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from disagg.config import EngineUrlsSection, Role
from disagg.router.discovery import dns
from disagg.router.discovery.dns import DnsName
from disagg.router.discovery.kubernetes import Pods, cluster
from disagg.router.discovery.registry import Registry
from disagg.router.discovery.source import Source
from disagg.router.discovery.watched_file import WatchedFile
from disagg.router.topology import EngineEndpoint, parse_endpoint


def open_registry(
    section: EngineUrlsSection,
    prefill: Sequence[str],
    decode: Sequence[str],
    *,
    drain_s: float,
    operators_add: bool,
) -> Registry:
    """The registry of the engines that a section names. `prefill`, `decode`: the URLs of the
    command line, in place of the section's. Raises ConfigError."""
    configured: list[EngineEndpoint] = []
    sources: list[Source] = []
    given = {"prefill": prefill, "decode": decode}
    for role in get_args(Role):
        setting = f"--{role}" if given[role] else f"engines.{role}"
        for url in given[role] or getattr(section, role):
            source = _dns(section, role, url, setting)
            if source is None:
                configured.append(parse_endpoint("", role, url, setting))
            elif source.name not in [one.name for one in sources]:
                sources.append(source)
    sources += _pods(section)
    file = WatchedFile(section.file, section.refresh_s) if section.file else None
    listed = file.first() if file else ()
    if file:
        sources.append(file)
    registry = Registry(configured, sources, drain_s=drain_s, operators_add=operators_add)
    if file:
        registry.report(file.name, listed)
    return registry


def _dns(section: EngineUrlsSection, role: Role, url: str, setting: str) -> DnsName | None:
    if not url.startswith(dns.SCHEME):
        return None
    return DnsName(role, url, setting, section.refresh_s, section.dns_keep_s)


def _pods(section: EngineUrlsSection) -> list[Source]:
    pods = section.kubernetes
    if pods is None:
        return []
    where = cluster(pods, "engines.kubernetes")
    labels: dict[Role, str | None] = {"prefill": pods.prefill, "decode": pods.decode}
    return [Pods(where, role, text) for role, text in labels.items() if text is not None]
