"""What the documents tell people to type can be typed."""

import re
from pathlib import Path

import httpx
import pytest

from litellm_mlx.launcher.ready_block import HealthReport, ready_block
from litellm_mlx.launcher.settings import Flags, load_settings
from litellm_mlx.served_models import parse_models
from sidecar.app import App

REPO = Path(__file__).parents[1]
README = (REPO / "README.md").read_text()
DOCUMENTS = [REPO / "README.md", REPO / "litellm_config.yaml", *REPO.glob("docs/*.md")]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_are_called_where_they_are(path: Path) -> None:
    """The venv's folder is not on PATH; its commands are named with it."""
    called = re.findall(
        r"(\S*)\b(?:mlx-sidecar|litellm)(?= (?:--|selftest|probe|diff|inspect|TOOL))",
        path.read_text(),
    )
    assert all(before.endswith(".venv/bin/") for before in called), called


def test_litellm_by_hand_fetches_no_prices() -> None:
    """Else it asks the internet while it starts, and warns three times without."""
    shown = [
        line
        for path in DOCUMENTS
        for line in path.read_text().splitlines()
        if ".venv/bin/litellm --" in line
    ]
    assert len(shown) == 2
    assert all("LITELLM_LOCAL_MODEL_COST_MAP=True" in line for line in shown)


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 900


def test_the_block_is_the_launchers(
    app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Line by line, but for what is this machine's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    listed = parse_models(httpx.get(f"{app.url}/v1/models", timeout=60).json())
    settings = load_settings(Flags(), tmp_path, {})
    health = HealthReport(16_700_000_000)
    block = ready_block(settings, listed, needs_key=False, health=health)
    shown = README.partition("\nReady.\n")[2].partition("```")[0].splitlines()
    said = block.splitlines()
    own = ("  agents", "  log", f"{'':11}a toy")  # they name folders of this machine
    for line in shown:
        if line.strip() != "..." and not line.startswith(own):
            assert line in said, line
    assert any(line.startswith("  agents") for line in said)
    assert max(map(len, shown)) <= 80


ELSEWHERE = {  # of the hub's library, of MLX, and of slow tests; a table of ours
    "CHAT_FIELDS",
    "FAULT_KILLS", "HTTP_PROXY", "HF_HOME", "HF_HUB_OFFLINE", "ORACLE_REQUESTS",
    "SOAK_MINUTES", "DATABASE_URL", "LITELLM_SALT_KEY", "OPENCLAW_CONFIG_PATH",
    "OPENCODE_CONFIG_CONTENT", "PI_CODING_AGENT_DIR", "OPENAI_API_KEY",
    "QWEN_CODE_SYSTEM_SETTINGS_PATH", "OPENAI_BASE_URL",
    "MLX_CUDA_GRAPH_CACHE_SIZE", "MLX_ENABLE_CACHE_THRASHING_CHECK",
}  # fmt: skip


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_settings_that_are_named_are_there(path: Path) -> None:
    """In the table, or among those that are refused with a reason."""
    text = (REPO / "docs" / "settings.md").read_text()
    text += (REPO / "sidecar" / "config" / "reasons.py").read_text()
    known = set(re.findall(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+", text)) | ELSEWHERE
    named = re.findall(
        r"`([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)(?:=[^`]*)?`", path.read_text()
    )
    assert set(named) <= known


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_pages_that_are_named_are_there(path: Path) -> None:
    """Paths from the top, and links between the pages."""
    text = path.read_text()
    folders = "sidecar|litellm_mlx|docs|tests|bench|tools|testkit"
    files = re.findall(rf"`((?:{folders})/[\w/.-]+\.\w+)`", text)
    assert [name for name in files if not (REPO / name).exists()] == []
    for target in re.findall(r"\]\(([\w./-]+\.\w+)(?:#[\w-]*)?\)", text):
        assert (path.parent / target).exists(), target
