"""A whole file: one deployment, or several behind one router."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import (
    Field,
)

from disagg.config.base import Role, Section
from disagg.config.engines import EngineSection, ModelSection, PoolSection
from disagg.config.requests import ModelLimitsSection, PairingSection
from disagg.config.router import RouterSection, ServedModelSection
from disagg.config.transfer import TiersSection, TransferSection
from disagg.config_file import show


class RaySection(Section):
    """The Ray cluster that the deployment joins."""

    without_token: bool = Field(
        False,
        description="Join a Ray that asks for no token although it listens on a network: whoever "
        "reaches it may run code on its machines",
    )


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

    @property
    def pairing(self) -> PairingSection:
        """How the router chooses among its engines."""
        own = next((one for one in self.router.models if one.name == self.name), None)
        return self.router.pairing if own is None else self.router.of_model(own).pairing

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
