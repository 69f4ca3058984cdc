"""The generated LiteLLM config: what is replaced and what is kept."""

import copy
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from litellm_mlx.launcher.proxy_config import (
    ProxyConfigError,
    build_config,
    has_master_key,
    read_user_config,
    write_config,
)
from litellm_mlx.served_models import (
    NoModelList,
    SidecarModel,
    Upstream,
    entries,
    parse_models,
)
from testkit.proxy import free_port

SHIPPED = Path(__file__).parents[2] / "litellm_config.yaml"
UPSTREAM = Upstream("http://127.0.0.1:8080/v1", 1200.0)
TINY = SidecarModel("openai/mlx-tiny-agent", ("local",), "llm", 32768, True, False)
PERMIT = "dangerously_permit_weak_or_unset_master_key"
CLOUD = {"model_name": "cloud", "litellm_params": {"model": "anthropic/claude"}}


def build(user: dict[str, Any], *, permit_no_key: bool = True) -> dict[str, Any]:
    before = copy.deepcopy(user)
    config = build_config(user, [TINY], UPSTREAM, permit_no_key=permit_no_key)
    assert user == before, "the user's config was changed"
    return config


def names(config: dict[str, Any]) -> list[str]:
    return [entry["model_name"] for entry in config["model_list"]]


def test_each_name_of_a_model_has_an_entry() -> None:
    """Id and aliases lead to the same model, with what LiteLLM should know of it."""
    config = build({})
    assert names(config) == ["openai/mlx-tiny-agent", "local", "mlx/*"]
    entry = config["model_list"][1]
    assert entry["litellm_params"] == {
        "model": "mlx/openai/mlx-tiny-agent",
        "api_base": "http://127.0.0.1:8080/v1",
        "timeout": 1200.0,
    }
    assert entry["model_info"].pop("id").startswith("mlx-")
    assert entry["model_info"] == {
        "mode": "chat",
        "max_input_tokens": 32768,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "cache_creation_input_token_cost": 0,
        "cache_read_input_token_cost": 0,
        "supports_function_calling": True,
        "supports_reasoning": False,
        "supported_endpoints": ["/v1/messages", "/v1/responses"],
        "cache_control_ttl": True,
        "cooldown_time": 0,
    }


def test_the_users_own_entries_and_settings_stay() -> None:
    """An `mlx/` entry of no served model goes; other models and settings are kept."""
    old = {"model_name": "old", "litellm_params": {"model": "mlx/old", "rpm": 1}}
    user = {
        "model_list": [old, CLOUD],
        "router_settings": {"fallbacks": [{"local": ["cloud"]}]},
        "litellm_settings": {"drop_params": False, "callbacks": ["mine.logger"]},
        "general_settings": {"cancel_on_disconnect": False, "master_key": "sk-1"},
        "environment_variables": {"A": "b"},
    }
    config = build(user, permit_no_key=False)
    assert config["model_list"][-1] == CLOUD
    assert "old" not in names(config)
    assert config["router_settings"] == user["router_settings"]
    assert config["litellm_settings"]["callbacks"] == ["mine.logger"]
    assert config["general_settings"] == user["general_settings"]
    assert config["environment_variables"] == {"A": "b"}


def test_a_name_the_user_gave_away_is_not_taken_back() -> None:
    """No two entries share a name: half of the requests would leave the machine."""
    mine = {**CLOUD, "model_name": "local"}
    assert names(build({"model_list": [mine]})).count("local") == 1


def test_the_handler_is_always_there() -> None:
    """The plugin is registered once, beside other providers of the user."""
    other = {"provider": "other", "custom_handler": "a.b"}
    old = {"provider": "mlx", "custom_handler": "old.place"}
    config = build({"litellm_settings": {"custom_provider_map": [old, other]}})
    handlers = config["litellm_settings"]["custom_provider_map"]
    assert [item["custom_handler"] for item in handlers] == [
        "litellm_mlx.provider.mlx_llm",
        "a.b",
    ]


def test_running_without_a_key_is_never_left_on() -> None:
    """The permission of the user's file holds only where the launcher gives it too."""
    user = {"general_settings": {PERMIT: True}}
    assert build(user)["general_settings"][PERMIT] is True
    assert PERMIT not in build(user, permit_no_key=False)["general_settings"]


@pytest.mark.parametrize(
    ("key", "env", "expected"),
    [
        (None, {}, False),
        ("sk-1", {}, True),
        ("os.environ/MY_KEY", {}, False),
        ("os.environ/MY_KEY", {"MY_KEY": "sk-1"}, True),
        (None, {"LITELLM_MASTER_KEY": "sk-1"}, True),
    ],
)
def test_a_master_key_is_found(
    key: str | None, env: dict[str, str], expected: bool
) -> None:
    """A key counts in the config, behind a reference, or in the environment."""
    assert has_master_key({"general_settings": {"master_key": key}}, env) is expected


def test_the_shipped_config_is_a_good_start() -> None:
    """The file in the repository yields no entry twice and keeps its settings."""
    config = build(read_user_config(SHIPPED, required=True))
    assert names(config) == ["openai/mlx-tiny-agent", "local", "mlx/*"]
    router = {"num_retries": 0, "disable_cooldowns": True}
    assert config["router_settings"] == router
    assert config["litellm_settings"]["request_timeout"] == 1200


def test_a_missing_config_is_empty_unless_asked_for(tmp_path: Path) -> None:
    """Without a config of the user's, the generated one stands alone."""
    assert read_user_config(tmp_path / "none.yaml", required=False) == {}
    with pytest.raises(ProxyConfigError, match=r"none\.yaml"):
        read_user_config(tmp_path / "none.yaml", required=True)


@pytest.mark.parametrize("text", ["- a list", "model_list: [", "just text", "\x00"])
def test_a_broken_config_is_named(tmp_path: Path, text: str) -> None:
    """A config that cannot be read stops the start with its path."""
    path = tmp_path / "litellm_config.yaml"
    path.write_text(text)
    with pytest.raises(ProxyConfigError, match=r"litellm_config\.yaml"):
        read_user_config(path, required=False)


def test_includes_still_point_beside_the_users_file(tmp_path: Path) -> None:
    """The generated config lies elsewhere, so relative includes become absolute."""
    path = tmp_path / "litellm_config.yaml"
    path.write_text("include: [more.yaml]")
    config = read_user_config(path, required=True)
    assert config["include"] == [str(tmp_path.resolve() / "more.yaml")]


def test_the_file_is_private_and_whole(tmp_path: Path) -> None:
    """The config is written for the user alone, and a second writing replaces it."""
    path = tmp_path / "run" / "litellm_config-4000.yaml"
    for _ in range(2):
        write_config(path, build({}))
    assert yaml.safe_load(path.read_text()) == build({})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_a_model_list_is_read() -> None:
    """Only the id is a must; what the sidecar does not say is taken as absent."""
    (model,) = parse_models({"data": [{"id": "a"}]})
    assert model == SidecarModel("a", (), "llm", None, False, False)


@pytest.mark.parametrize("body", [[], {}, {"data": [{}]}, {"data": ["a"]}])
def test_a_strange_model_list_is_refused(body: object) -> None:
    """An answer that is no model list is an error, not an empty config."""
    with pytest.raises(NoModelList):
        parse_models(body)


@pytest.mark.parametrize(
    ("kind", "model", "mode"),
    [
        ("llm", "mlx/m", "chat"),
        ("vlm", "mlx/m", "chat"),
        ("embedding", "hosted_vllm/m", "embedding"),
        ("reranker", "hosted_vllm/m", "rerank"),
        ("tts", "openai/m", "audio_speech"),
        ("stt", "openai/m", "audio_transcription"),
    ],
)
def test_each_kind_of_model_is_reached_its_own_way(
    kind: str, model: str, mode: str
) -> None:
    """Where LiteLLM has no hook for us, as an OpenAI server with the sidecar's key."""
    served = SidecarModel("m", (), kind, None, False, False)
    (entry,) = entries([served], Upstream("http://h/v1", 9.0, has_key=True))
    params = entry["litellm_params"]
    assert (params["model"], entry["model_info"]["mode"]) == (model, mode)
    key = None if model.startswith("mlx/") else "os.environ/MLX_API_KEY"
    assert params.get("api_key") == key


@pytest.mark.parametrize(
    "text",
    ["litellm_settings: 7", "general_settings: [a]", "model_list: {a: b}",
     "router_settings: x"],
)  # fmt: skip
def test_a_section_of_the_wrong_kind_is_named(tmp_path: Path, text: str) -> None:
    """Not a traceback."""
    path = tmp_path / "litellm_config.yaml"
    path.write_text(text)
    with pytest.raises(ProxyConfigError, match=text.partition(":")[0]):
        read_user_config(path, required=True)


def test_what_an_mlx_entry_asks_for_is_kept() -> None:
    """Address and time limit are ours; the rest is the user's."""
    params = {
        "model": "mlx/local",
        "api_base": "http://127.0.0.1:1/v1",
        "timeout": 5,
        "mlx_max_ttft_s": 20,
    }
    info = {"max_input_tokens": 1000}
    own = {"model_name": "local", "litellm_params": params, "model_info": info}
    entry = build({"model_list": [own]})["model_list"][1]
    assert entry["litellm_params"] == {
        "model": "mlx/openai/mlx-tiny-agent",
        "api_base": "http://127.0.0.1:8080/v1",
        "timeout": 1200.0,
        "mlx_max_ttft_s": 20,
    }
    assert entry["model_info"]["max_input_tokens"] == 1000
    assert entry["model_info"]["supports_function_calling"]


def test_an_entry_that_asks_for_nothing_more_follows_the_sidecar() -> None:
    """That of the config that comes along: its context is known after the load."""
    config = read_user_config(SHIPPED, required=True)
    plain = {entry["model_name"]: entry for entry in build({})["model_list"]}
    followed = {entry["model_name"]: entry for entry in build(config)["model_list"]}
    assert followed["local"] == plain["local"]
    assert followed["local"]["model_info"]["id"].startswith("mlx-")


def test_a_further_name_for_a_served_model() -> None:
    """With wishes of its own; the usual name is left as it is."""
    params = {"model": "mlx/openai/mlx-tiny-agent", "mlx_max_ttft_s": 3}
    config = build(
        {"model_list": [{"model_name": "hurried", "litellm_params": params}]}
    )
    assert names(config) == ["openai/mlx-tiny-agent", "local", "mlx/*", "hurried"]
    usual, hurried = (config["model_list"][i]["litellm_params"] for i in (1, 3))
    assert hurried == {**usual, "mlx_max_ttft_s": 3}
    assert "mlx_max_ttft_s" not in usual


def test_pings_come_as_often_as_the_user_wants() -> None:
    """KEEPALIVE_SECONDS holds for both servers; the user's own config wins."""
    upstream = Upstream("http://127.0.0.1:8080/v1", 1200.0, keepalive_s=4)
    for name in (
        "sse_keepalive_ping_interval_seconds",
        "anthropic_sse_ping_interval_seconds",
    ):
        for user, seconds in (({}, 4), ({"litellm_settings": {name: 9}}, 9)):
            config = build_config(user, [TINY], upstream, permit_no_key=True)
            assert config["litellm_settings"][name] == seconds


def test_the_shipped_file_alone_lets_nobody_in(tmp_path: Path) -> None:
    """LiteLLM started with it as it is, on all interfaces: it refuses without a key."""
    shutil.copy(SHIPPED, tmp_path)
    env = {k: v for k, v in os.environ.items() if not k.startswith("LITELLM_")}
    env |= {"PYTHONPATH": str(SHIPPED.parent), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    ended = subprocess.run(
        [Path(sys.executable).with_name("litellm"), "--config", SHIPPED.name,
         "--host", "127.0.0.1", "--port", str(free_port())],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ended.returncode != 0
    assert "refused to start: no master key is set" in ended.stdout + ended.stderr


def test_what_the_shipped_file_says_to_run_is_safe() -> None:
    """The command names loopback; the launcher still permits no key on its own."""
    text = SHIPPED.read_text()
    commands = re.findall(r"litellm .*--config litellm_config.yaml", text)
    assert commands == ["litellm --host 127.0.0.1 --config litellm_config.yaml"]
    shipped = read_user_config(SHIPPED, required=True)
    assert PERMIT not in shipped["general_settings"]
    assert build(shipped)["general_settings"][PERMIT] is True
