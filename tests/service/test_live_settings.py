"""Settings that act while the server runs, are saved, and say who hides them."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from litellm_mlx.launcher.settings import Flags, load_settings
from sidecar.app import App, build, serve_in_thread
from sidecar.config.setting_sources import SettingSources
from testkit.raw_http import eventually
from testkit.servers import wait_ready
from testkit.sidecar_process import is_ready, started

Served = Callable[..., App]


@pytest.fixture
def served(tmp_path: Path, model_folder: Callable[[str], Path]) -> Iterator[Served]:
    """Starts a server with these lines of a `.env`, and flags."""
    apps: list[App] = []

    def start(**flags: str) -> App:
        names = {
            "MODEL_PATH": str(model_folder("dense")),
            "MLX_PORT": "0",
            "MODEL_DIR": "none",
            "CACHE_SELFTEST": "off",
            "ENABLE_REQUEST_LOGGING": "false",
        }
        environ = {**names, "MLX_CACHE_HOME": str(tmp_path / "home")}
        sources = SettingSources(flags, tmp_path / ".env", environ)
        app = build(sources.config(), sources=sources)
        serve_in_thread(app)
        wait_ready(app.url)
        apps.append(app)
        return app

    yield start
    for app in apps:
        app.stop_listening()
        app.close()


def rows(app: App) -> dict[str, Any]:
    found = httpx.get(f"{app.url}/admin/settings", timeout=60).json()["settings"]
    return {row["name"]: row for row in found}


def change(app: App, **values: Any) -> httpx.Response:
    return httpx.post(f"{app.url}/admin/settings", json=values, timeout=60)


def test_each_setting_says_who_set_it(served: Served, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("DEFAULT_TOP_P=0.5\nMAX_BODY_MB=5\n")
    app = served(LOG_LEVEL="WARNING")
    found = rows(app)
    assert found["LOG_LEVEL"]["origin"] == "flag"
    assert (found["MODEL_DIR"]["origin"], found["MODEL_DIR"]["value"]) == (
        "environment",
        [],
    )
    assert (found["DEFAULT_TOP_P"]["origin"], found["DEFAULT_TOP_P"]["value"]) == (
        ".env",
        0.5,
    )
    assert found["MAX_KV_SIZE"]["origin"] == "default"
    assert found["MAX_BODY_MB"]["acts"] == "at the next start"
    assert found["DEFAULT_TOP_P"]["acts"] == "now"
    assert found["PROXY_PORT"]["acts"] == "at the next start of LiteLLM"
    assert found["MLX_API_KEY"]["value"] is None


def test_a_live_name_acts_on_the_next_request(served: Served, tmp_path: Path) -> None:
    """And outlives the process; null takes it back."""
    app = served()
    answer = change(app, DEFAULT_TEMPERATURE=0, PROMPT_CACHE_MAX_BYTES="64MB")
    found = {one["name"]: one for one in answer.json()["changed"]}
    assert found["DEFAULT_TEMPERATURE"]["acts"] == "now"
    assert found["DEFAULT_TEMPERATURE"]["new"] == 0
    assert app.shared.stored.limits.max_bytes == 64 << 20
    assert app.core.services.chat._defaults.temperature == 0
    assert rows(app)["DEFAULT_TEMPERATURE"]["origin"] == "settings.json"
    again = served()
    assert again.config.generation.temperature == 0
    assert change(again, DEFAULT_TEMPERATURE=None).json()["changed"][0]["new"] is None
    assert rows(again)["DEFAULT_TEMPERATURE"]["origin"] == "default"
    kept = json.loads((tmp_path / "home" / "settings.json").read_text())
    assert kept == {"PROMPT_CACHE_MAX_BYTES": "64MB"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"DEFAULT_TOP_P": 2}, "DEFAULT_TOP_P must be a number 0..1"),
        ({"DEFAULT_TOP_P": 0.2, "MAX_MODELS": -1}, "MAX_MODELS must be"),
        ({"MLX_PORT": 1}, "MLX_PORT acts at the next start"),
        ({"NO_SUCH": 1}, "NO_SUCH is no setting"),
        ({"DEFAULT_TOP_P": " "}, "DEFAULT_TOP_P must be a value"),
        ({}, "must be an object"),
    ],
)
def test_a_bad_value_changes_nothing(
    served: Served, tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    app = served()
    answer = change(app, **values)
    assert answer.status_code == 400
    assert words in answer.text
    assert not (tmp_path / "home" / "settings.json").exists()
    assert rows(app)["DEFAULT_TOP_P"]["origin"] == "default"


def test_what_the_user_wrote_hides_what_was_saved(
    served: Served, tmp_path: Path
) -> None:
    (tmp_path / ".env").write_text("DEFAULT_TOP_P=0.5\n")
    app = served()
    (found,) = change(app, DEFAULT_TOP_P=0.25).json()["changed"]
    assert found["shadowed_by"] == ".env"
    row = rows(app)["DEFAULT_TOP_P"]
    assert (row["value"], row["origin"], row["saved"]) == (0.5, ".env", "0.25")
    # The file was edited meanwhile: what is told is who wins now.
    (tmp_path / ".env").write_text("DEFAULT_TOP_P=0.75\n")
    (found,) = change(app, DEFAULT_TOP_P=0.125).json()["changed"]
    assert (found["shadowed_by"], rows(app)["DEFAULT_TOP_P"]["value"]) == (".env", 0.75)
    # One that is out of range is refused, though it would be hidden.
    assert change(app, DEFAULT_TOP_P=7).status_code == 400


def test_files_are_read_again(served: Served, tmp_path: Path) -> None:
    """One bad value: nothing changes."""
    app = served()
    url = f"{app.url}/admin/reload-config"
    (tmp_path / ".env").write_text("PROMPT_CACHE_TTL_SECONDS=77\nMAX_KV_SIZE=4096\n")
    found = {o["name"]: o for o in httpx.post(url, timeout=60).json()["changed"]}
    assert found["PROMPT_CACHE_TTL_SECONDS"]["acts"] == "now"
    assert found["MAX_KV_SIZE"]["acts"] == "at the next start"
    assert app.shared.stored.limits.ttl_s == 77
    (tmp_path / ".env").write_text("PROMPT_CACHE_TTL_SECONDS=78\nMAX_KV_SIZE=x\n")
    answer = httpx.post(url, timeout=60)
    assert answer.status_code == 400
    assert "MAX_KV_SIZE" in answer.text
    assert app.shared.stored.limits.ttl_s == 77


def test_a_secret_that_changes_is_not_told(served: Served, tmp_path: Path) -> None:
    app = served()
    url = f"{app.url}/admin/reload-config"
    (tmp_path / ".env").write_text("ADMIN_TOKEN=of-the-house\nMLX_API_KEY=of-clients\n")
    answer = httpx.post(url, timeout=60)
    found = {one["name"]: one for one in answer.json()["changed"]}
    assert found.keys() == {"ADMIN_TOKEN", "MLX_API_KEY"}
    assert "of-the-house" not in answer.text
    assert "of-clients" not in answer.text


@pytest.mark.parametrize("damage", ["{", "[]", "[" * 100_000, "pipe", "folder"])
def test_a_damaged_file_is_said(served: Served, tmp_path: Path, damage: str) -> None:
    """And nothing hangs or changes; mended, it is used again."""
    app, file = served(), tmp_path / "home" / "settings.json"
    file.parent.mkdir(exist_ok=True)
    if damage == "pipe":
        os.mkfifo(file)
    elif damage == "folder":
        file.mkdir()
    else:
        file.write_text(damage)
    settings, reload = f"{app.url}/admin/settings", f"{app.url}/admin/reload-config"
    assert httpx.get(settings, timeout=20).status_code == 503
    assert change(app, DEFAULT_TOP_P=0.5).status_code == 503
    assert httpx.post(reload, timeout=20).status_code == 400
    file.rmdir() if damage == "folder" else file.unlink()
    assert change(app, DEFAULT_TOP_P=0.5).status_code == 200


def test_what_the_launcher_took_from_the_file_is_the_files(tmp_path: Path) -> None:
    """Its children's environment has it, too: the file is read anew all the same."""
    file = tmp_path / ".env"
    file.write_text("DEFAULT_TOP_P=0.5\nDEFAULT_MIN_P=0.1\n")
    own = {"MLX_CACHE_HOME": str(tmp_path), "DEFAULT_TOP_K": "5"}
    child_env = load_settings(Flags(), tmp_path, own).child_env
    assert child_env["DEFAULT_MIN_P"] == "0.1"
    sources = SettingSources({}, file, child_env)
    file.write_text("DEFAULT_TOP_P=0.25\n")
    config = sources.config()
    found = {row.name: row.origin for row in sources.rows(config)}
    assert (config.generation.top_p, found["DEFAULT_TOP_P"]) == (0.25, ".env")
    assert (config.generation.min_p, found["DEFAULT_MIN_P"]) == (None, "default")
    assert (config.generation.top_k, found["DEFAULT_TOP_K"]) == (5, "environment")


def test_a_time_to_live_acts_at_once(served: Served) -> None:
    """The thread that waits for the old one is woken."""
    app = served()
    body = {"model": "local", "prompt": "Many words. " * 50, "max_tokens": 1}
    httpx.post(f"{app.url}/v1/completions", json=body, timeout=60)
    assert app.shared.stored.num_bytes > 0
    change(app, PROMPT_CACHE_TTL_SECONDS=1)
    assert eventually(lambda: app.shared.stored.num_bytes == 0, 20)
    change(app, PROMPT_CACHE_TTL_SECONDS=0, PROMPT_CACHE_MAX_BYTES=0)
    httpx.post(f"{app.url}/v1/completions", json=body, timeout=60)
    assert app.shared.stored.num_bytes == 0


def test_a_hangup_reads_them_again(tmp_path: Path) -> None:
    """It ended the process once."""
    env_file = tmp_path / ".env"
    env_file.write_text("")
    with started(tmp_path, CACHE_SELFTEST="off") as (process, port):
        url = f"http://127.0.0.1:{port}"
        assert eventually(lambda: is_ready(port))
        env_file.write_text("DEFAULT_TOP_K=7\n")
        process.send_signal(signal.SIGHUP)

        def is_read() -> bool:
            found = httpx.get(f"{url}/admin/settings", timeout=60).json()
            row = next(r for r in found["settings"] if r["name"] == "DEFAULT_TOP_K")
            return bool(row["value"] == 7)

        assert eventually(is_read)
