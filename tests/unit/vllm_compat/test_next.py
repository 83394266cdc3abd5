"""`make vllm-next`: what we use of vLLM's is read from our code, and looked for in any version."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from vllm_next import all_uses, compare, main
from vllm_sources import installed_source
from vllm_tree import Tree
from vllm_uses import Use, uses_of

OURS = """
    from vllm.engine import Base, Config, run
    from vllm.lazy import thing

    if MOVED.here:
        from vllm.new import moved
    else:
        from vllm.old import moved

    class Ours(Base):
        def step(self, work, extra=None): ...
        def own(self): ...

    def use(config: Config) -> None:
        cache = config.cache
        for group in cache.groups:
            group.size
        run(1, deep=True)
        config.cache.blocks
        moved()
"""
VLLM = """
    class Base:
        def step(self, work): ...
    class Group:
        size: int
    class Cache:
        blocks: int
        groups: list[Group]
    class Config:
        cache: Cache
    def run(count, *, deep=False): ...
"""


def tree(folder: Path, engine: str = VLLM) -> Tree:
    """A vLLM of these modules."""
    package = folder / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "engine.py").write_text(textwrap.dedent(engine))
    (package / "lazy.py").write_text('_MAP = {"thing": ".inner:thing"}\ndef __getattr__(name): ...')
    (package / "old.py").write_text("def moved(): ...")
    (package / "new.py").write_text("def moved(): ...")
    return Tree(folder)


@pytest.fixture
def uses(tmp_path: Path) -> list[Use]:
    package = tmp_path / "ours"
    package.mkdir()
    (package / "code.py").write_text(textwrap.dedent(OURS))
    return uses_of(package)


def problems(uses: list[Use], folder: Path, changed: str, to: str) -> set[tuple[str, str]]:
    known, other = tree(folder / "known"), tree(folder / "other", VLLM.replace(changed, to))
    assert compare(uses, known, "0.32.0", known) == []
    return {(str(use), problem) for use, problem, _ in compare(uses, other, "0.40.0", known)}


@pytest.mark.parametrize(
    ("changed", "to", "found"),
    [
        ("def run(", "def runs(", {("vllm.engine.run", "missing")}),
        ("deep=False", "wide=False", {("vllm.engine.run", "signature")}),
        ("def run(count,", "def run(count, more,", {("vllm.engine.run", "signature")}),
        ("def run(count,", "def run(count, more=1,", set()),
        ("def step(", "def stepped(", {("vllm.engine.Base.step", "missing")}),
        ("step(self, work)", "step(self, work, two)", set()),  # ours takes another
        ("step(self, work)", "step(self, a, b, c)", {("vllm.engine.Base.step", "signature")}),
        ("blocks: int", "num_blocks: int", {("vllm.engine.Config.cache.blocks", "missing")}),
        ("size: int", "sizes: int", {("vllm.engine.Config.cache.groups.[].size", "missing")}),
    ],
)
def test_what_is_gone_or_called_otherwise(
    uses: list[Use], tmp_path: Path, changed: str, to: str, found: set[tuple[str, str]]
) -> None:
    assert problems(uses, tmp_path, changed, to) == found


def test_the_installed_version_has_all_that_we_use() -> None:
    source, uses = installed_source(), all_uses()
    known = Tree(source.root)
    assert [one for one in compare(uses, known, source.version, known) if not one.cover] == []
    kinds = {use.kind for use in uses}
    assert kinds == {"name", "attribute", "call", "override", "file"}
    assert len(uses) > 500


@pytest.mark.slow
def test_it_says_so_by_its_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree(tmp_path)
    assert main([str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "missing" in said
    assert "NOTHING" in said
    assert main([]) == 0
