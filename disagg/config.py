"""The YAML that describes one deployment or several: one pydantic model per section, its loading.

Imports neither torch, vLLM nor Ray, so reading a file takes milliseconds. It must never check
anything that depends on the machine: `disagg.preflight.checks` checks ports, the rights of folders
and vLLM's argument names, and `disagg.credentials` reads secrets. Unknown keys are refused. A wrong
value is never replaced by a default.

A relative path in the file is relative to the folder in which `disagg` was started, as on the
command line, or to `DISAGG_FOLDER`. Loading makes it absolute: engines run in other folders.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from disagg.checksums import ChecksumName
from disagg.config_file import changed, explain, read_mapping, show
from disagg.config_units import Bytes, Seconds
from disagg.errors import ConfigError
from disagg.transport.names import PREFERENCE, TransportName

Role = Literal["prefill", "decode"]
# The KV connector of the engines behind a router, which defines their `kv_transfer_params`.
ConnectorName = Literal["disagg", "nixl", "example"]

FOLDER_ENV = "DISAGG_FOLDER"
"""The variable with the folder in which relative paths start. A Ray job runs in a folder of Ray's,
while its paths are those of whoever submitted it."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_local(checkpoint: str) -> bool:
    """Whether a checkpoint is a folder, existing or not, and not a name on a model hub."""
    return _HUB_NAME.fullmatch(checkpoint) is None or absolute(Path(checkpoint)).is_dir()


def absolute(path: Path) -> Path:
    """Where a path of the file is; see `FOLDER_ENV`."""
    return Path(os.environ.get(FOLDER_ENV, "")).absolute() / path.expanduser()


def _absolute_checkpoint(checkpoint: str) -> str:
    return str(absolute(Path(checkpoint))) if is_local(checkpoint) else checkpoint


def _numbers_as_text(env: Any) -> Any:
    # YAML reads `OMP_NUM_THREADS: 1` as a number. A bool is refused: its spelling is ambiguous.
    if not isinstance(env, dict):
        return env
    return {
        name: str(value) if type(value) in (int, float) else value for name, value in env.items()
    }


def _each_once(names: list[TransportName]) -> list[TransportName]:
    if len(set(names)) != len(names):
        raise ValueError("names a transport twice; keep the first one")
    return names


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


MAX_REPLICAS = 10_000  # of a pool; Ray is tested up to 40,000 actors
LocalPath = Annotated[Path, AfterValidator(absolute)]
Checkpoint = Annotated[str, Field(min_length=1), AfterValidator(_absolute_checkpoint)]
_ENVIRONMENT = {"type": "object", "additionalProperties": {"type": ["string", "number"]}}
Environment = Annotated[
    dict[str, str], BeforeValidator(_numbers_as_text), WithJsonSchema(_ENVIRONMENT)
]


class Section(BaseModel):
    """Base of all sections: frozen, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """Which checkpoint to serve."""

    path: Checkpoint = Field(description="Checkpoint folder, or a name on a model hub")
    served_name: str | None = Field(None, description="The model's name in the API; default: path")
    tokenizer: Checkpoint | None = None
    revision: str | None = None
    trust_remote_code: bool = False


class ResourcesSection(Section):
    """The resources that one engine requests from Ray."""

    num_cpus: float = Field(1.0, ge=0)
    num_gpus: float = Field(0.0, ge=0)
    custom: dict[str, float] = Field(default_factory=dict, description="Ray's custom resources")
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="Labels that the engine's Ray node must have, as Ray's label selectors",
    )


class EngineSection(Section):
    """Settings of all engines. A pool's own values override them."""

    args: dict[str, Any] = Field(
        default_factory=dict, repr=False, description="vLLM engine arguments, by vLLM's names"
    )
    env: Environment = Field(
        default_factory=dict, repr=False, description="Environment variables of engines"
    )
    startup_timeout_s: Seconds = Field(
        600.0, gt=0, description="Seconds in which an engine must start"
    )
    hang_timeout_s: Seconds = Field(
        120.0,
        gt=3,
        description="An engine that makes no progress for this many seconds is restarted",
    )
    max_restarts: int = Field(
        5, ge=0, description="Restarts in a row, after which an engine that dies is given up"
    )
    drain_timeout_s: Seconds = Field(
        300.0, ge=0, description="Seconds that an engine which drains may finish its requests"
    )
    placement: Literal["near", "spread"] = Field(
        "near", description="near: prefill and decode share nodes where there is room"
    )


class AutoscaleSection(Section):
    """How the number of engines of a pool follows its load."""

    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(ge=1, le=MAX_REPLICAS)
    target_queue: float = Field(
        8.0, gt=0, description="Requests that one engine should have, running and waiting"
    )
    target_kv_usage: float = Field(
        0.8, gt=0, le=1, description="Share of its KV cache that one engine should use"
    )
    cooldown_s: Seconds = Field(
        60.0, ge=0, description="The pool shrinks when an engine was not needed for these seconds"
    )

    @model_validator(mode="after")
    def _in_order(self) -> AutoscaleSection:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas ({self.min_replicas}) is above max_replicas ({self.max_replicas})"
            )
        return self


class PoolSection(Section):
    """The engines of one role."""

    replicas: int = Field(
        1,
        ge=1,
        le=MAX_REPLICAS,
        description="Number of engines, or of groups of data_parallel_size engines; with "
        "autoscale, at the start",
    )
    autoscale: AutoscaleSection | None = None
    resources: ResourcesSection = ResourcesSection()
    args: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,
        description="vLLM engine arguments; override engine.args",
    )
    env: Environment = Field(
        default_factory=dict,
        repr=False,
        description="Environment variables; override engine.env",
    )

    @model_validator(mode="after")
    def _within(self) -> PoolSection:
        scale = self.autoscale
        if scale and not scale.min_replicas <= self.replicas <= scale.max_replicas:
            raise ValueError(
                f"replicas ({self.replicas}) is not within autoscale.min_replicas and "
                f"max_replicas ({scale.min_replicas} to {scale.max_replicas})"
            )
        return self


class StorageSection(Section):
    """The folder for handoff files of the transport shared_storage."""

    path: LocalPath | None = Field(
        None, description="Default: this user's folder in the temporary directory"
    )
    max_bytes: Bytes = Field(
        8 << 30, gt=0, description="Limit of all files; a handoff that would exceed it is refused"
    )
    fsync: bool = False
    checksum: ChecksumName = Field(
        "keyed",
        description="keyed: files that another user put there are refused; fast: found damage only",
    )


class NixlSection(Section):
    """NIXL, of the transport nixl."""

    backend: str = Field("UCX", min_length=1, description="NIXL's plugin")
    params: Environment = Field(
        default_factory=dict, description="Parameters that NIXL's plugin is given"
    )
    num_threads: int = Field(0, ge=0, le=64, description="The plugin's own threads in each worker")
    tcp: bool = Field(
        False,
        description="Whether blocks may go over UCX's TCP too; there a consumer that dies or gives "
        "up while it fetches can end the producer's process",
    )


class TransferSection(Section):
    """How KV blocks move."""

    transports: Annotated[list[TransportName], AfterValidator(_each_once)] = Field(
        default=list(PREFERENCE), min_length=1
    )
    storage: StorageSection = StorageSection()
    nixl: NixlSection = NixlSection()
    staging_bytes: Bytes = Field(
        64 << 20,
        gt=0,
        description="On GPUs: bytes that each rank reserves on its GPU for transfers; it pins as "
        "many bytes of host memory",
    )
    lease_s: Seconds = Field(
        30.0, gt=0, le=3600, description="Seconds that prefill keeps a prompt's blocks for decode"
    )
    lease_limit_s: Seconds = Field(
        600.0,
        gt=0,
        le=86400,
        description="Seconds that prefill keeps a prompt's blocks at most, while decode's queue "
        "renews their lease",
    )
    load_deadline_s: Seconds = Field(
        30.0, gt=0, le=3600, description="Seconds after which a load of KV blocks fails"
    )
    host: str | None = Field(
        None, description="Address of the control channel; default: the node's address"
    )
    secret_env: str | None = Field(
        None, description="Environment variable with the deployment's secret"
    )
    secret_file: LocalPath | None = Field(None, description="File with the deployment's secret")
    strict: bool = Field(False, description="Refuse a request whose KV cache cannot be loaded")


class RaySection(Section):
    """The Ray cluster that the deployment joins."""

    without_token: bool = Field(
        False,
        description="Join a Ray that asks for no token although it listens on a network: whoever "
        "reaches it may run code on its machines",
    )


class HostTierSection(Section):
    """Tier of KV blocks in host memory."""

    max_bytes: Bytes = Field(
        4 << 30, gt=0, description="Bytes that each worker rank allocates at its start"
    )
    eviction: Literal["lru", "arc"] = "lru"


class DirectoryTierSection(Section):
    """Tier of KV blocks in files, which engines share and which outlive them."""

    path: LocalPath = Field(description="A folder that all engines can read and write")
    max_bytes: Bytes = Field(
        64 << 30, gt=0, description="Limit of all files in the folder together"
    )
    checksum: ChecksumName = Field(
        "keyed",
        description="keyed: only files of engines with the same secret are used; fast: all "
        "undamaged files are used",
    )
    reset_keeps_files: bool = Field(
        False,
        description="Use the files also after a reset of the prefix cache; only for weights that "
        "never change",
    )


class TiersSection(Section):
    """Tiers for KV blocks outside the GPU. Blocks that no tier has are computed again."""

    host: HostTierSection | None = None
    directory: DirectoryTierSection | None = Field(
        None, description="Needs the host tier; without one, a small host tier is made"
    )
    blocks_per_chunk: int = Field(1, ge=1, description="Blocks that are stored and moved together")


class ModelLimitsSection(Section):
    """Limits of the requests for one model. Each router process counts on its own."""

    max_prompt_tokens: int | None = Field(
        None,
        gt=0,
        description="Longest prompt. Texts and media are estimated, token ids counted",
    )
    max_in_flight: int = Field(4096, gt=0, description="Running requests; further requests wait")
    max_in_flight_per_engine: int = Field(
        512, gt=0, description="Running requests of one engine; further requests wait"
    )
    max_queued: int = Field(
        1024, ge=0, description="Waiting requests; further requests get status 429"
    )
    queue_timeout_s: Seconds = Field(
        30.0, gt=0, description="Seconds that a request may wait; then it gets status 429"
    )
    connect_timeout_s: Seconds = Field(5.0, gt=0, description="Seconds to connect to an engine")
    prefill_timeout_s: Seconds = Field(300.0, gt=0, description="Seconds of the prefill leg")
    first_byte_timeout_s: Seconds = Field(
        600.0, gt=0, description="Seconds until an engine's first byte"
    )
    between_bytes_timeout_s: Seconds = Field(
        120.0, gt=0, description="Seconds between two reads from an engine"
    )


class LimitsSection(ModelLimitsSection):
    """Limits of the router. Each router process counts on its own."""

    max_body_bytes: Bytes = Field(32 << 20, gt=0, description="Largest body of a request")
    max_receiving_bytes: Bytes = Field(
        256 << 20,
        gt=0,
        description="Bytes of the bodies over 64 KiB of all open requests together; a body that "
        "would exceed it gets status 503",
    )
    max_json_elements: int = Field(
        2_000_000,
        gt=0,
        description="Most values in a JSON body; a tenth of it is the most strings, arrays and "
        "objects",
    )
    receive_timeout_s: Seconds = Field(
        60.0, gt=0, description="Seconds in which a client must send its request"
    )
    keep_alive_s: Seconds = Field(
        75.0,
        gt=0,
        description="Seconds for which a client's connection without a request stays open; more "
        "than a load balancer in front keeps it",
    )
    unread_timeout_s: Seconds = Field(
        120.0, gt=0, description="Seconds for which a client may read nothing of its answer"
    )
    drain_s: Seconds = Field(
        30.0, ge=0, description="Seconds that running requests may go on after SIGTERM"
    )

    @model_validator(mode="after")
    def _holds_one_body(self) -> LimitsSection:
        if self.max_receiving_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_receiving_bytes ({self.max_receiving_bytes}) is below max_body_bytes "
                f"({self.max_body_bytes}); raise it, or lower max_body_bytes"
            )
        return self


PolicyName = Literal["round_robin", "least_loaded", "prefix_affinity", "session_affinity"]


class MediaSection(Section):
    """About how many tokens media count in a prompt. It depends on the model."""

    pixels_per_token: int | None = Field(
        784,
        gt=0,
        description="Pixels of an image for each token. null: every image counts image_tokens",
    )
    image_tokens: int = Field(1024, ge=0, description="Tokens of an image of unknown size")
    max_image_tokens: int = Field(16384, gt=0, description="Most tokens of one image")
    audio_tokens_per_s: float = Field(25.0, ge=0, description="Tokens for each second of sound")
    audio_tokens: int = Field(750, ge=0, description="Tokens of a recording of unknown length")
    video_tokens: int = Field(4096, ge=0, description="Tokens of a video")
    file_tokens: int = Field(2048, ge=0, description="Tokens of a file")


class PairingSection(Section):
    """How the router chooses the prefill and the decode engine of a request."""

    prefill: PolicyName = "least_loaded"
    decode: PolicyName = "least_loaded"
    session_header: str = Field(
        "x-session-id",
        pattern=r"^[A-Za-z0-9-]+$",
        description="HTTP header with the session's id, for session_affinity",
    )
    local_prefill_tokens: int = Field(
        64, ge=0, description="Decode computes prompts of up to this many tokens itself"
    )
    media: MediaSection = Field(default_factory=MediaSection)
    prefill_wait_share: float | None = Field(
        None,
        ge=0,
        description="Also prefill on decode if the prompt's wait at prefill exceeds its wait at "
        "decode by a threshold. The threshold is this share of the prompt's compute time, for each "
        "request that the decode engine has. A request outside the slowest 10 % moves only above "
        "four times the threshold. Default: never",
    )
    first_token: Role = Field(
        "decode",
        description="The role whose first token begins a stream. Prefill's token comes earlier, by "
        "the time of the handoff",
    )
    first_token_hold_s: Seconds = Field(
        0.0,
        ge=0,
        description="Longest time, in seconds, that prefill's first token is held until decode "
        "answers. It shortens the pause after that token. A request whose first token is among the "
        "slowest 10 % is not held",
    )

    @model_validator(mode="after")
    def _holds_prefills(self) -> PairingSection:
        if self.first_token_hold_s and self.first_token != "prefill":
            raise ValueError(
                f"first_token_hold_s ({self.first_token_hold_s:g}) holds prefill's first token, "
                "but streams begin with decode's; set first_token: prefill, or remove it"
            )
        return self


OTHERS = "*"
"""The share of all clients that have none of their own."""


class ShareSection(Section):
    """What a client is entitled to. A client is known by the name of its key."""

    weight: float = Field(
        1.0, gt=0, description="Its share of the tokens while requests wait, beside other clients"
    )
    priority: int = Field(
        0,
        ge=-(1 << 31),
        lt=1 << 31,
        description="Lower numbers come first, whatever the shares. Engines that schedule by "
        "priority get it",
    )
    requests_per_minute: int | None = Field(None, gt=0, description="Most requests a minute")
    prompt_tokens_per_minute: int | None = Field(
        None, gt=0, description="Most tokens of prompts a minute, as the router estimates them"
    )
    output_tokens_per_minute: int | None = Field(
        None, gt=0, description="Most tokens of answers a minute"
    )


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


class EngineListSection(Section):
    """The engines of `disagg router`, which run elsewhere.

    A URL is `http://USER:PASSWORD@HOST:PORT/PREFIX`: everything but scheme and host may be left
    out. `dns://HOST:PORT` stands for an engine at each address of that name.
    """

    prefill: list[str] = Field([], repr=False, description="URLs of the prefill engines")
    decode: list[str] = Field([], repr=False, description="URLs of the decode engines")


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
            }
        )


_Section = TypeVar("_Section", bound=Section)


def _replaced(section: _Section, own: Section) -> _Section:
    """The section with the keys that `own` sets."""
    return section.model_copy(update={key: getattr(own, key) for key in own.model_fields_set})


class ModelAndEngines(Section):
    """A model, its engines, and how they exchange KV blocks."""

    model: ModelSection
    engine: EngineSection = EngineSection()
    prefill: PoolSection = PoolSection()
    decode: PoolSection = PoolSection()
    transfer: TransferSection = TransferSection()
    tiers: TiersSection = TiersSection()


class Deployment(ModelAndEngines):
    """The whole file; or one of several deployments, with the router and the Ray of all."""

    name: str = Field("disagg", pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")
    ray: RaySection = RaySection()
    router: RouterSection = RouterSection()

    @property
    def group(self) -> str:
        """Its name at a router that it shares with other deployments; empty at a router of its
        own."""
        return self.name if self.router.models else ""

    def pool(self, role: Role) -> PoolSection:
        """The section of this role's pool."""
        return self.prefill if role == "prefill" else self.decode

    def args(self, role: Role) -> dict[str, Any]:
        """The user's engine arguments for a role. The pool's own override the common ones."""
        return {**self.engine.args, **self.pool(role).args}

    def spreads_ranks(self, role: Role) -> bool:
        """Whether Ray places each rank of an engine, on several nodes if necessary."""
        return self.args(role).get("distributed_executor_backend") == "ray"

    def data_parallel_size(self, role: Role) -> int:
        """Engines of one replica: the data parallel ranks of a group."""
        given = self.args(role).get("data_parallel_size")
        return given if isinstance(given, int) and given > 1 else 1

    def with_replicas(self, replicas: Mapping[Role, int]) -> Deployment:
        """The same deployment with these numbers of replicas."""
        pools: dict[str, Any] = {
            role: self.pool(role).model_copy(update={"replicas": count})
            for role, count in replicas.items()
        }
        return self.model_copy(update=pools)


class DeploymentSection(ModelAndEngines):
    """One of several deployments behind a router."""

    name: str = Field(
        pattern=r"^[a-z0-9]([a-z0-9-]{0,39}[a-z0-9])?$",
        description="For commands, and of its engines at the router",
    )
    pairing: PairingSection = Field(
        PairingSection(), description="Keys that differ from router.pairing"
    )
    limits: ModelLimitsSection = Field(
        ModelLimitsSection(), description="Keys that differ from router.limits"
    )

    @property
    def served_name(self) -> str:
        """Its model's name in requests."""
        return self.model.served_name or self.model.path

    def of_router(self) -> ServedModelSection:
        """The router's settings for its model."""
        return ServedModelSection(
            name=self.name,
            pairing=self.pairing,
            limits=self.limits,
            served_name=self.served_name,
            strict=self.transfer.strict,
        )


class SeveralDeployments(Section):
    """A whole file with several deployments behind one router."""

    deployments: list[DeploymentSection] = Field(min_length=1)
    ray: RaySection = RaySection()
    router: RouterSection = RouterSection()

    def doubles(self) -> Iterator[str]:
        """One line for each deployment with the name, or the model's name, of one before it."""
        names: dict[str, int] = {}
        models: dict[str, int] = {}
        for number, one in enumerate(self.deployments):
            if (first := names.setdefault(one.name, number)) != number:
                yield (
                    f"deployments.{number}.name: {show(one.name)} — deployments.{first} has it "
                    "too; give each deployment a name of its own"
                )
            if (first := models.setdefault(one.served_name, number)) != number:
                yield (
                    f"deployments.{number}.model.served_name: {show(one.served_name)} — requests "
                    f"for deployments.{first} name this model too; set another name"
                )

    def each(self) -> list[Deployment]:
        """The deployments. Each has the router with the models of all."""
        models = [one.of_router() for one in self.deployments]
        router = self.router.model_copy(update={"models": models})
        return [
            Deployment(
                name=one.name,
                ray=self.ray,
                router=router,
                **{name: getattr(one, name) for name in ModelAndEngines.model_fields},
            )
            for one in self.deployments
        ]


def load_router(path: Path | None, options: Mapping[str, Any]) -> RouterSection:
    """The settings of a router without a deployment. The file has the keys of `router`; `options`
    override them. Raises ConfigError with one line for each problem."""
    content = read_mapping(path) if path is not None else {}
    merged = {**content, **options}
    for name in ("pairing", "cors"):
        section = content.get(name, {})
        if isinstance(section, dict):
            merged[name] = {**section, **options.get(name, {})}
        else:
            merged[name] = section  # refused below
    try:
        return RouterSection.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(explain(error, RouterSection)) from error


def load(path: str | Path) -> Deployment:
    """Read the file of one deployment. Raises ConfigError with one line for each problem."""
    deployments = load_all(path)
    if deployments[0].group:
        raise ConfigError("deployments: several are not possible here; name a file with one")
    return deployments[0]


def load_all(path: str | Path, changes: Sequence[str] = ()) -> list[Deployment]:
    """Read a file with one deployment or several; see `Deployment.group`. `changes`: words such as
    `router.port=0`, made before the file is judged. Raises ConfigError with one line for each
    problem."""
    return read(read_mapping(Path(path)), changes)


def read(content: Mapping[Any, Any], changes: Sequence[str] = ()) -> list[Deployment]:
    """As `load_all`, of what a file holds."""
    content = changed(content, changes)
    several = "deployments" in content
    if several and (alone := [key for key in content if key in _OF_ONE]):
        raise ConfigError(
            [
                f"{key}: belongs to one deployment, but the file has a list of them; move it into "
                "an entry of deployments, or remove deployments"
                for key in alone
            ]
        )
    try:
        if several:
            found = SeveralDeployments.model_validate(content)
            if doubles := list(found.doubles()):
                raise ConfigError(doubles)
            router, deployments = found.router, found.each()
        else:
            deployment = Deployment.model_validate(content)
            router, deployments = deployment.router, [deployment]
    except ValidationError as error:
        raise ConfigError(explain(error, SeveralDeployments if several else Deployment)) from error
    given = "models" if router.engines.is_empty else "engines"
    if given == "engines" or router.models:
        raise ConfigError(
            f"router.{given}: names engines that run already, but a deployment starts its own — "
            "remove it, or run `disagg router`"
        )
    return deployments


_OF_ONE = {"name", *ModelAndEngines.model_fields}


def schema() -> dict[str, Any]:
    """The JSON Schema of a file, for editors."""
    kinds = TypeAdapter[Any](Deployment | SeveralDeployments)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A file for disagg serve",
        **kinds.json_schema(),
    }


def replicas_of(words: Sequence[str]) -> dict[Role, int]:
    """The numbers of engines in words such as `prefill=3`. Raises ConfigError."""
    found: dict[Role, int] = {}
    for word in words:
        role, _, count = word.partition("=")
        if role not in ("prefill", "decode"):
            raise ConfigError(f"{word!r}: write prefill=N or decode=N")
        if not count.isdecimal() or int(count) < 1:
            raise ConfigError(f"{role}: {count!r} — must be a whole number, at least 1")
        if int(count) > MAX_REPLICAS:
            raise ConfigError(f"{role}: {count} — must be at most {MAX_REPLICAS}; set less")
        if role in found:
            raise ConfigError(f"{role}: given twice; keep one")
        found["prefill" if role == "prefill" else "decode"] = int(count)
    return found
