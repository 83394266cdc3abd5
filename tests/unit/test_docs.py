"""What the documentation names exists: files, tests, settings, commands, metrics, patches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from disagg.cli import app
from disagg.config import AutoscaleSection, Deployment, LimitsSection
from disagg.connector.handoff.settings import ConnectorSettings
from disagg.connector.hidden_states.settings import HiddenStatesSettings
from disagg.connector.offload.settings import OffloadSettings
from disagg.engine.vllm_patches import plugin

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
_FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]*\.(?:py|md|yaml|sh|cu))(?:::\w+)?[`:]")
_CODE = re.compile(r"```.*?```", re.DOTALL)
_RESULTS = re.compile(r"<!-- results.*?<!-- /results -->", re.DOTALL)
SOURCES = {path: path.read_text() for path in ROOT.glob("disagg/**/*.py")}


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    heads = re.findall(r"^#+ (.+)$", _CODE.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", head.lower()) for head in heads)
    return {head.replace(" ", "-") for head in plain}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for target, anchor in _LINK.findall(_CODE.sub("", page.read_text())):
        if "://" in target:
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            wrong.append(f"{target}#{anchor}" if anchor else target)
    assert wrong == []


def places(name: str, page: Path) -> Iterator[Path]:
    for base in (ROOT, ROOT / "disagg", ROOT / "tests", page.parent):
        yield base / name
    # Under a folder that the sentence before has named.
    folders = [
        "connector",
        "connector/offload",
        "transport",
        "router",
        "cluster",
        "engine",
        "store",
    ]
    yield from (ROOT / "disagg" / folder / name for folder in folders)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_that_are_named_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # names what was
    named = set(_FILE.findall(_CODE.sub("", page.read_text())))
    named = {name for name in named if not name.startswith("vllm/")}
    assert [name for name in sorted(named) if not any(p.exists() for p in places(name, page))] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_modules_and_methods_that_are_named_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return
    text = _CODE.sub("", page.read_text())
    files = {path.name for folder in ("disagg", "tests", "examples") for path in
             (ROOT / folder).rglob("*.py")}  # fmt: skip
    modules = set(re.findall(r"`(\w+\.py)`", text))
    assert modules - files - {"gpu_model_runner.py"} == set()
    code = "".join(SOURCES.values())
    for owner, name in re.findall(r"`([A-Z]\w+)\.(\w+)", text):
        if f"class {owner}" in code:
            assert f"def {name}" in code or f"{name}:" in code, f"{owner}.{name}"
    # A file, and a name in it.
    for file, name in re.findall(r"`((?:\w+/)*\w+\.py)`:? `(?:\w+\.)?(\w+)`", text):
        texts = [path.read_text() for path in (ROOT / "disagg").rglob(Path(file).name)]
        texts += [path.read_text() for path in (ROOT / "tests").rglob(Path(file).name)]
        assert any(re.search(rf"\b{name}\b", each) for each in texts), f"{file}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_lines_fit(page: Path) -> None:
    text = _RESULTS.sub("", _CODE.sub("", page.read_text()))
    long = [line for line in text.splitlines() if len(line) > 100 and not line.startswith("|")]
    assert long == []


def test_tests_that_the_comparison_names_exist() -> None:
    text = (ROOT / "docs" / "comparison.md").read_text()
    sources = "".join(file.read_text() for file in ROOT.glob("tests/**/*.py"))
    named = set(re.findall(r"`(?:[\w/.]+::)?(test_\w+)(?:\[[^`]*)?`", text))
    assert len(named) > 40
    missing = {name for name in named if f"def {name}" not in sources}
    assert {name for name in missing if not list(ROOT.glob(f"tests/**/{name}.py"))} == set()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_patches_are_those_of_the_page() -> None:
    text = (ROOT / "docs" / "vllm_patches.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, re.MULTILINE))
    versions = {p.name: p.versions.removeprefix("==").removesuffix(".*") for p in plugin.ALL}
    assert rows == {name: version or "any" for name, version in versions.items()}


def test_yaml_in_pages_is_read() -> None:
    """Sections of a deployment, as readers copy them."""
    found = 0
    for page in PAGES:
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
            Deployment.model_validate({"model": {"path": "tiny"}, **yaml.safe_load(block)})
            found += 1
    assert found


def value_of(text: str) -> Any:
    """A default as a page writes it; what stands in brackets explains it."""
    text = re.sub(r" \(.*\)$", "", text)
    if found := re.fullmatch(r"([\d,]*\.?\d+)(?: (KiB|MiB|GiB|s))?", text):
        unit = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}.get(found[2], 1)
        return float(found[1].replace(",", "")) * unit
    return yaml.safe_load(text)


def rows(page: str) -> Iterator[tuple[str, str]]:
    """The keys of a table's first column, each with its part of the second column."""
    for line in (ROOT / "docs" / page).read_text().splitlines():
        if not line.startswith("| `"):
            continue
        first, second, *_ = line.removeprefix("| ").split(" | ")
        keys, text = re.findall(r"`([\w.]+)`", first), second.replace("`", "")
        texts = text.split(", ")
        yield from zip(keys, texts if len(texts) == len(keys) else [text] * len(keys), strict=True)


def settings_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each key with its default, as a path through the sections."""
    for name, field in model.model_fields.items():
        sections = [t for t in (field.annotation, *getattr(field.annotation, "__args__", ()))
                    if isinstance(t, type) and issubclass(t, BaseModel)]  # fmt: skip
        if prefix.endswith(".models.") and name in ("pairing", "limits"):
            yield f"{prefix}{name}", None  # keys of sections that the page has already
        elif sections and sections[0] not in (AutoscaleSection, LimitsSection):
            yield from settings_of(sections[0], f"{prefix}{name}.")
        elif sections and sections[0] is LimitsSection:
            continue  # in router.md
        elif field.default is PydanticUndefined and field.default_factory is None:
            yield f"{prefix}{name}", "required"
        else:
            yield f"{prefix}{name}", field.get_default(call_default_factory=True)


@pytest.mark.parametrize(
    ("page", "settings"),
    [
        ("deployment.md", {**dict(settings_of(Deployment)),
                           **dict(settings_of(AutoscaleSection, "autoscale."))}),
        ("router.md", dict(settings_of(LimitsSection))),
        ("connector.md", dict(settings_of(ConnectorSettings))),
        ("tiers.md", dict(settings_of(OffloadSettings))),
        ("hidden_states.md", dict(settings_of(HiddenStatesSettings))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_pages_have_all_settings_and_their_defaults(page: str, settings: Mapping[str, Any]) -> None:
    said = dict(rows(page))
    assert settings.keys() - said.keys() == set()
    if page == "deployment.md":
        assert said.keys() - settings.keys() == set()
    for key, default in settings.items():
        if default is not None:  # else the page says in words what it means
            assert value_of(said[key]) == default, key


def test_commands_that_are_named_exist() -> None:
    group = typer.main.get_command(app)
    commands: dict[str, Any] = group.commands  # type: ignore[attr-defined]
    for page in PAGES:
        for name, second in re.findall(r"\bdisagg ([a-z][a-z-]*)(?: ([a-z-]+))?", code_in(page)):
            if name in commands and hasattr(commands[name], "commands") and second:
                assert second in commands[name].commands, f"{page_id(page)}: {name} {second}"
            else:
                assert name in commands, f"{page_id(page)}: {name}"


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"\bmake ([a-z-]+)", code_in(page))}
    assert named - targets == set()


def code_in(page: Path) -> str:
    """What a page shows as code: spans, and blocks without their comments."""
    text = page.read_text()
    blocks = [re.sub(r"#.*", "", block) for block in _CODE.findall(text)]
    return "\n".join([*blocks, *re.findall(r"`[^`]+`", _CODE.sub("", text))])


def test_metrics_that_are_named_exist() -> None:
    code = "".join(SOURCES.values())
    for page in PAGES:
        for name in re.findall(r"(?<!\w)(?:ray_)?(disagg_[a-z]\w+)", page.read_text()):
            base = re.sub(r"_(total|bucket|count|sum)$", "", name)
            assert base.removeprefix("disagg_tier_") in code, f"{page_id(page)}: {name}"


def test_reasons_that_are_listed_exist() -> None:
    """Why decode computed a prompt."""
    code = "".join(SOURCES.values())
    for page, start in (("connector.md", "| reason |"), ("router.md", "| `disagg_router_local")):
        table = (ROOT / "docs" / page).read_text().split(start)[1].split("\n\n")[0]
        named = re.findall(r"`(\w+)\*?`", "".join(re.findall(r"^\| (`.*?) \|", table, re.M)))
        assert len(named) > 10
        assert [name for name in named if f'"{name}' not in code and f'{name}"' not in code] == []
