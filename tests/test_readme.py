"""What the documents tell people to type can be typed."""

import re
from pathlib import Path

import httpx
import pytest

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


def test_the_snippets_context_is_the_served_models(app: App) -> None:
    """What is pasted works with the model that is served by default."""
    listed = httpx.get(f"{app.url}/v1/models").json()["data"]
    context = str(listed[0]["max_input_tokens"])
    snippets = re.findall(r'(?:CONTEXT_TOKENS=|"contextWindow": )(\d+)', README)
    assert len(snippets) == 3
    assert set(snippets) == {context}
    assert f"context of {context} tokens" in README
