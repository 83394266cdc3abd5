"""The sections of a router: where it listens, and which engines and models it serves."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Annotated, Literal, TypeVar

from pydantic import (
    AfterValidator,
    Field,
    model_validator,
)

from disagg.config.base import ConnectorName, LocalPath, Section
from disagg.config.requests import LimitsSection, ModelLimitsSection, PairingSection, ShareSection
from disagg.config_units import Seconds


def _networks(networks: list[str]) -> list[str]:
    for network in networks:
        try:
            ip_network(network)
        except ValueError as error:
            raise ValueError(f"{error}; write an address or a network, as 10.0.0.0/8") from error
    return networks


def _not_an_api(root_path: str) -> str:
    # A path below it would have two meanings.
    if root_path.split("/")[:2] in (["", "v1"], ["", "v2"]):
        raise ValueError("is where the API's own paths begin; choose another prefix")
    return root_path


_ZMQ = r"^(tcp|ipc)://\S+$"
_Section = TypeVar("_Section", bound=Section)


def _replaced(section: _Section, own: Section) -> _Section:
    """The section with the keys that `own` sets."""
    return section.model_copy(update={key: getattr(own, key) for key in own.model_fields_set})


class CorsSection(Section):
    """Which web pages may use the API from a browser, as vLLM's options of these names. Without
    allowed origins, none."""

    allowed_origins: list[str] = Field(
        default_factory=list, description='Origins such as https://chat.example.com; "*": any'
    )
    allowed_methods: list[str] = Field(default=["*"], description='HTTP methods; "*": any')
    allowed_headers: list[str] = Field(default=["*"], description='Request headers; "*": any')
    allow_credentials: bool = Field(
        False, description="Browsers may send cookies and the user's TLS certificate"
    )


class ProxiesSection(Section):
    """Proxies and load balancers in front of the router."""

    networks: Annotated[list[str], AfterValidator(_networks)] = Field(
        default_factory=list,
        description="Networks whose addresses are trusted proxies, such as 10.0.0.0/8. With one, "
        "the access log has the client's address",
    )
    header: Literal["x-forwarded", "forwarded"] = Field(
        "x-forwarded",
        description="The header that they set: X-Forwarded-For and X-Forwarded-Proto, or Forwarded",
    )


class KubernetesSection(Section):
    """Engines in pods, found by their labels. Inside a cluster, the API server, the namespace and
    the credentials are those of the router's own pod."""

    api: str | None = Field(
        None, pattern=r"^https?://[^\s?#]+$", description="URL of the API server"
    )
    namespace: str | None = Field(
        None, pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$", description="Of the pods"
    )
    prefill: str | None = Field(
        None, min_length=1, description="Label selector of the prefill engines' pods"
    )
    decode: str | None = Field(
        None, min_length=1, description="Label selector of the decode engines' pods"
    )
    port: int = Field(8000, ge=1, le=65535, description="Port of the engines in their pods")
    token_file: LocalPath | None = Field(
        None, description="File with the bearer token, which is read anew for each request"
    )
    ca_file: LocalPath | None = Field(
        None, description="PEM certificates to trust for the API server"
    )

    @model_validator(mode="after")
    def _selects(self) -> KubernetesSection:
        if self.prefill is None and self.decode is None:
            raise ValueError("selects no pods; set decode (and prefill) to labels such as app=vllm")
        return self


class KvEventsSection(Section):
    """Where an engine publishes its KV events: the endpoints of its --kv-events-config."""

    endpoint: str = Field(
        pattern=_ZMQ, description="ZMQ address of the events; {host} is the host of the URL"
    )
    replay_endpoint: str | None = Field(
        None, pattern=_ZMQ, description="ZMQ address that sends the last events again"
    )


class EngineListSection(Section):
    """The engines of `disagg router`, which run elsewhere.

    A URL is `http://USER:PASSWORD@HOST:PORT/PREFIX`: everything but scheme and host may be left
    out. `dns://HOST:PORT` stands for an engine at each address of that name.
    """

    prefill: list[str] = Field([], repr=False, description="URLs of the prefill engines")
    decode: list[str] = Field([], repr=False, description="URLs of the decode engines")
    kv_events: dict[str, KvEventsSection] = Field(
        {},
        repr=False,
        description="Where engines publish their KV events, by the engine's URL; *: all others. "
        "For pairing by cache_aware",
    )


class EngineUrlsSection(EngineListSection):
    """The engines of `disagg router`, and where it finds those that come and go."""

    file: LocalPath | None = Field(
        None, description="YAML or JSON file with the keys prefill and decode, which is watched"
    )
    kubernetes: KubernetesSection | None = Field(None, description="Pods with these labels")
    refresh_s: Seconds = Field(
        2.0, gt=0, description="Seconds between two looks at the file, and at names of dns:// URLs"
    )
    dns_keep_s: Seconds = Field(
        10.0,
        ge=0,
        description="Seconds for which an address stays that a name's answers lack. A look-up that "
        "fails changes nothing",
    )

    @property
    def is_empty(self) -> bool:
        """Whether it names no engine, and nothing that may name one later."""
        return not (self.prefill or self.decode or self.file or self.kubernetes)


def _each_model_once(models: list[ModelRouteSection]) -> list[ModelRouteSection]:
    names = [model.name for model in models]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"names the model {twice!r} twice; name the engines of a model together")
    return models


class ModelRouteSection(Section):
    """One of several models behind a router: its engines and its own policies and limits."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_.:@+-]+(/[A-Za-z0-9_.:@+-]+)*$",
        max_length=200,
        description="The model's name in requests. The names of its adapters, and other names that "
        "its engines serve, are read from the engines",
    )
    engines: EngineListSection
    connector: ConnectorName | None = Field(
        None, description="The KV connector of its engines; default: --connector"
    )
    pairing: PairingSection = Field(
        PairingSection(), description="Keys that differ from router.pairing"
    )
    limits: ModelLimitsSection = Field(
        ModelLimitsSection(), description="Keys that differ from router.limits"
    )

    @property
    def model(self) -> str:
        """The model's name in requests."""
        return self.name

    @property
    def is_strict(self) -> bool:
        """Whether a prompt that could not be handed off is an error."""
        return False


class ServedModelSection(ModelRouteSection):
    """A model that `disagg serve` serves beside others. No file has it. name: the deployment's."""

    engines: EngineListSection = EngineListSection()
    served_name: str
    strict: bool

    @property
    def model(self) -> str:
        return self.served_name

    @property
    def is_strict(self) -> bool:
        return self.strict


class RouterSection(Section):
    """The OpenAI endpoint."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535, description="0 takes any free port")
    api_keys_env: str | None = Field(
        None,
        description="Environment variable with the clients' keys: NAME=KEY or bare keys, separated "
        "by commas",
    )
    api_keys_file: LocalPath | None = Field(
        None, description="File with the clients' keys, separated by commas or lines"
    )
    admin_keys_env: str | None = Field(
        None,
        description="Environment variable with the operators' keys, written as api_keys_env. "
        "Clients' keys only infer",
    )
    admin_keys_file: LocalPath | None = Field(
        None, description="File with the operators' keys, separated by commas or lines"
    )
    admin_socket: LocalPath | None = Field(
        None,
        description="Unix socket on which every request is an operator's; {port} stands for the "
        "port. Its folder must have mode 0700. Default of `disagg serve`: router-{port}.sock in "
        "this user's folder",
    )
    tls_cert_file: LocalPath | None = Field(
        None, description="PEM certificate; with tls_key_file, the router serves https"
    )
    tls_key_file: LocalPath | None = Field(None, description="PEM key of the certificate")
    engines: EngineUrlsSection = EngineUrlsSection()
    models: Annotated[list[ModelRouteSection], AfterValidator(_each_model_once)] = Field(
        default_factory=list,
        description="Several models behind this router, in place of engines",
    )
    engine_tls_ca_file: LocalPath | None = Field(
        None,
        description="PEM certificates of the authorities to trust for engines with https. Default: "
        "those of the system",
    )
    engine_tls_cert_file: LocalPath | None = Field(
        None,
        description="PEM certificate that the router shows to engines with https; with "
        "engine_tls_key_file",
    )
    engine_tls_key_file: LocalPath | None = Field(
        None, description="PEM key of engine_tls_cert_file"
    )
    processes: int = Field(
        1, ge=1, le=64, description="Number of router processes that share the port"
    )
    probe_interval_s: Seconds = Field(
        2.0, gt=0, description="Seconds between two health probes of an engine"
    )
    migration_limit: int = Field(
        1, ge=0, description="How often a stream continues on another engine after a death"
    )
    root_path: Annotated[str, AfterValidator(_not_an_api)] = Field(
        "",
        pattern=r"^(/[A-Za-z0-9._~-]+)*$",
        description="Prefix of all paths under which a proxy publishes the router, such as /llm",
    )
    cors: CorsSection = CorsSection()
    proxies: ProxiesSection = ProxiesSection()
    access_log: bool = Field(
        True, description="Write one line of JSON per request to standard output"
    )
    peers: list[Annotated[str, Field(pattern=r"^(https?|dns)://[^/?#@\s]+/?$")]] = Field(
        default_factory=list,
        description="URLs of other routers for the same engines; dns://HOST:PORT is one at each "
        "address. They tell each other loads and prompts, to choose as one router would. Needs an "
        "operator's key, which all have",
    )
    shares: dict[str, ShareSection] = Field(
        default_factory=dict,
        description="What clients are entitled to, by the name of their key; *: all others",
    )
    stream_keep_alive_s: Seconds | None = Field(
        None,
        gt=0,
        description="Seconds of silence after which a stream gets a comment, so that load "
        "balancers keep its connection. Default: never",
    )
    pairing: PairingSection = PairingSection()
    limits: LimitsSection = LimitsSection()

    def of_model(self, model: ModelRouteSection) -> RouterSection:
        """The settings for the requests of one model."""
        return self.model_copy(
            update={
                "pairing": _replaced(self.pairing, model.pairing),
                "limits": _replaced(self.limits, model.limits),
                "engines": EngineUrlsSection(kv_events=model.engines.kv_events),
            }
        )
