"""How a model's calls and thinking are read may be set, where nothing shows it."""

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from sidecar.config.sources import ConfigError
from sidecar.output.families import (
    FAMILY_ALIASES,
    REASONING_PARSERS,
    find_family,
    output_syntax,
)
from sidecar.output.reasoning_splitter import new_splitter
from sidecar.output.syntax_settings import NAMES, SyntaxSettings
from sidecar.output.tool_syntax import TOOL_PARSERS
from sidecar.residents.model_settings import read_settings
from testkit.call_texts import collect
from testkit.chat_templates import template_of, write_template
from testkit.raw_http import eventually
from testkit.scripted import Prompt, Switch, scripted
from testkit.servers import running_sidecar
from testkit.tiny_models import make_model
from tests.output.test_every_tool_format import EXAMPLES, TOOLS

# Of examples whose format has another name than the parser that reads it.
READ_BY = {
    "glm4_short": "glm4_native", "llama_xml": "llama", "llama_python": "llama",
    "python_tag": "llama", "openai_json": "llama", "liquid_positional": "liquid_python",
    "mistral_quotes": "mistral", "json_block": "nemotron",
    "deepseek_v4": "deepseek_v32", "deepseek_v41": "deepseek_v32",
    "lost_opener": "qwen3_coder_xml",
}  # fmt: skip
TALK = [{"role": "user", "content": "Where?"}]
LOOK = [{"type": "function", "function": {"name": "look"}}]
SAID = "<reasoning>I look.</reasoning>[TOOL_CALLS]look[ARGS]{}"


def test_each_parser_reads_its_examples_whatever_the_template_shows() -> None:
    read = set()
    for example in EXAMPLES:
        name = READ_BY.get(example.format, example.format)
        if name == "harmony":  # channels are no matter of a setting
            continue
        read.add(name)
        family, settings = find_family(None, "model", ""), SyntaxSettings(None, name)
        syntax = output_syntax(family, None, None, "[ARGS]", ("[ARGS]",), settings)
        splitter = new_splitter(syntax, "off", TOOLS)
        pieces = [piece for char in example.text for piece in splitter.feed(char)]
        found = collect([*pieces, *splitter.flush(is_cut=False)[0]])
        assert found.parsed == example.calls, example.format
    assert read == {*TOOL_PARSERS} - {"seed"}


def says(_prompt: Prompt) -> str:
    return SAID


def test_they_are_set_for_a_model_from_its_next_load_on(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, file = model_folder("dense"), tmp_path / "model-settings.json"
    settings = {"MODEL_PATH": str(folder), "MODEL_SETTINGS_PATH": str(file)}
    settings |= {"CACHE_SELFTEST": "off"}
    body = {"messages": TALK, "tools": LOOK, "enable_thinking": False}
    with (
        running_sidecar(settings, scripted(says)) as app,
        httpx.Client(base_url=app.url, timeout=60, trust_env=False) as http,
    ):

        def answer() -> dict[str, object]:
            told = http.post("/v1/chat/completions", json=body).json()
            message: dict[str, object] = told["choices"][0]["message"]
            return message

        assert answer()["content"] == SAID
        url = f"/admin/models/{folder.name}/settings"
        parsers = {"tool_parser": "devstral", "reasoning_parser": "reasoning"}
        assert http.post(url, json=parsers).status_code == 200
        kept = read_settings(file).models[folder.name].syntax
        assert kept == SyntaxSettings(None, "devstral", "reasoning")
        wrong = http.post(url, json={"tool_parser": "hermes"})
        assert wrong.status_code == 400
        assert "hermes_json, qwen3_coder_xml" in wrong.json()["detail"]
        http.post(f"/admin/models/{folder.name}/unload?force=true")
        body["enable_thinking"] = True
        assert eventually(lambda: bool(answer().get("tool_calls")), 30)
        assert answer()["reasoning_content"] == "I look."


@pytest.mark.parametrize("name", ["family", "tool_parser", "reasoning_parser"])
def test_an_unknown_one_in_the_file_is_named(tmp_path: Path, name: str) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"models": {"m": {name: "nope"}}}))
    with pytest.raises(ConfigError, match=f"{name} must be one of"):
        read_settings(file)


def test_the_names_are_those_of_the_tables_and_of_the_page() -> None:
    assert set(NAMES["family"]) == {*FAMILY_ALIASES}
    assert set(NAMES["tool_parser"]) == {*TOOL_PARSERS}
    assert set(NAMES["reasoning_parser"]) == {*REASONING_PARSERS}
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    for name in (*TOOL_PARSERS, *REASONING_PARSERS):
        assert f"`{name}`" in page, name


def test_a_template_that_prints_no_calls_is_told_of_them_in_the_format_that_is_set(
    tmp_path: Path,
) -> None:
    """It was told of Hermes' JSON, and what it wrote so was not read."""
    folder = make_model(tmp_path / "model", "dense")
    write_template(folder, template_of("no_tools"))
    file = tmp_path / "model-settings.json"
    models = {"model": {"tool_parser": "devstral"}}
    file.write_text(json.dumps({"models": models}))
    switch = Switch()
    switch.script = lambda _prompt: '[TOOL_CALLS]look[ARGS]{"at": "x"}'
    call = {"id": "call_1", "type": "function",
            "function": {"name": "look", "arguments": '{"at": "y"}'}}  # fmt: skip
    talk = [
        *TALK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Nothing."},
    ]
    settings = {"MODEL_PATH": str(folder), "MODEL_SETTINGS_PATH": str(file)}
    with running_sidecar(settings, scripted(switch)) as app:
        body = {"messages": talk, "tools": LOOK, "enable_thinking": False}
        url = f"{app.url}/v1/chat/completions"
        message = httpx.post(url, json=body, timeout=60).json()["choices"][0]["message"]
    prompt = switch.prompts[0].text
    assert '[TOOL_CALLS]NAME[ARGS]{"ARGUMENT": "VALUE"}' in prompt
    assert '[TOOL_CALLS]look[ARGS]{"at": "y"}' in prompt
    [found] = message["tool_calls"]
    assert json.loads(found["function"]["arguments"]) == {"at": "x"}
