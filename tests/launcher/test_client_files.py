"""What doctor says of clients that are set up by hand."""

from pathlib import Path

import pytest

from litellm_mlx.launcher.doctor.client_files import check_clients
from litellm_mlx.launcher.settings import Flags, load_settings

_PI = """// of mine
{"providers": {"here": {"baseUrl": "http://127.0.0.1:4000/v1",
  "models": [{"id": "local", "contextWindow": %d}]}}}
"""


def found(home: Path, name: str, text: str) -> list[str]:
    settings = load_settings(Flags(), home, {})
    file = home / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    said = check_clients(settings, home, 32768)
    return [one.found for one in said if one.state != "ok"]


def test_a_context_that_is_too_large_is_found_in_pis_file(tmp_path: Path) -> None:
    """Comments and all; one that fits is fine."""
    name = ".pi/agent/models.json"
    (said,) = found(tmp_path, name, _PI % 32769)
    assert "says 32769 tokens for here, the model has 32768" in said
    assert found(tmp_path, name, _PI % 32768) == []


@pytest.mark.parametrize(
    "text",
    [
        '{"providers": [1]}',
        '{"providers": {"a": 5, "b": {"baseUrl": "http://[::1]:4000", "models": 3}}}',
        '{"providers": {"a": {"baseUrl": "http://127.0.0.1:none/v1", "models": []}}}',
        '{"providers": {"a": {"baseUrl": "http://[::1/v1", "models": []}}}',
        "{broken",
    ],
)
def test_what_pis_file_says_amiss_ends_nothing(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, ".pi/agent/models.json", text) == []


def test_an_address_that_is_none_is_elsewhere(tmp_path: Path) -> None:
    text = '{"env": {"ANTHROPIC_BASE_URL": "http://[::1:80"}}'
    (said,) = found(tmp_path, ".claude/settings.json", text)
    assert "sends Claude Code to http://[::1:80" in said
