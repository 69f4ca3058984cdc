"""A model is asked what it can do; what is found is used at its next load."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.app import App
from sidecar.cli.capabilities import main
from sidecar.core.requests import Tool
from sidecar.output.families import find_family, output_syntax
from sidecar.output.format_search import find_parser
from sidecar.output.tool_syntax import TOOL_PARSERS
from sidecar.output.written_calls import writer_of
from testkit.chat_templates import template_of, write_template
from testkit.scripted import Prompt, Switch, scripted
from testkit.servers import held_gpu, running_sidecar
from testkit.tiny_models import make_model

Json = dict[str, Any]
JSON_CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)
DEVSTRAL = '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}'
THOUGHT = "<think>\n1.10 less 1 is 0.10, half of it.\n</think>\n\n5 cents."
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def says(call: str, thought: str = THOUGHT) -> Switch:
    switch = Switch()

    def script(prompt: Prompt) -> str:
        wants_call = prompt.tools or "get_weather" in prompt.text
        return call if wants_call else thought

    switch.script = script
    return switch


@contextmanager
def served(
    folder: Path, switch: Switch, *, prints_calls: bool = True, **settings: str
) -> Iterator[App]:
    model = folder / "scripted"
    if not model.exists():
        make_model(model, "dense", layers=1, hidden=32)
    if not prints_calls:
        write_template(model, template_of("no_tools"))
    home = {"MLX_CACHE_HOME": str(folder / "home")}
    own = {"MODEL_PATH": str(model), **home, **settings}
    with running_sidecar(own, scripted(switch)) as app:
        yield app


def probed(app: App, name: str = "local") -> list[Json]:
    path = f"{app.url}/admin/models/{name}/capabilities"
    with httpx.stream("POST", path, timeout=300) as answer:
        answer.read()
        assert answer.status_code == 200, answer.text
    lines = answer.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def listed(app: App) -> Json:
    entry: Json = httpx.get(f"{app.url}/v1/models", timeout=60).json()["data"][0]
    return entry


def asked(app: App) -> Json:
    body = {
        "model": "local",
        "messages": [{"role": "user", "content": "Rome?"}],
        "tools": [TOOL],
    }
    answer = httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=120)
    message: Json = answer.json()["choices"][0]["message"]
    return message


def test_what_a_model_can_do_is_found_kept_and_shown(tmp_path: Path) -> None:
    with served(tmp_path, says(JSON_CALL)) as app:
        assert listed(app)["capabilities"] == "not probed"
        steps = probed(app)
        assert [s["step"] for s in steps if s["status"] == "completed"] == [
            "type", "load", "family", "tools", "thinking", "context", "store",
        ]  # fmt: skip
        record = steps[-1]["value"]
        assert record["supports_tools"] is True
        assert (record["tool_format"], record["tool_parser"]) == ("hermes_json", None)
        assert record["supports_thinking"] is True
        assert record["thinking_tag"] == "<think>"
        assert record["practical_max_tokens"] == listed(app)["max_input_tokens"]
        assert record["is_outdated"] is False
        assert listed(app)["capabilities"] == record
        admin = httpx.get(f"{app.url}/admin/models", timeout=60).json()["models"][0]
        assert admin["capabilities"] == record
    with served(tmp_path, says(JSON_CALL)) as app:  # it outlives the process
        assert listed(app)["capabilities"] == record


def test_a_format_that_no_template_shows_is_read_from_the_next_load_on(
    tmp_path: Path,
) -> None:
    """A person would have to set `tool_parser`; what is set by hand still wins."""
    with served(tmp_path, says(DEVSTRAL), prints_calls=False) as app:
        assert not asked(app).get("tool_calls")
        unload = f"{app.url}/admin/models/local/unload"
        for _ in range(3):  # the second time it is how its calls are read
            record = probed(app)[-1]["value"]
            found = (record["tool_format"], record["tool_parser"])
            assert found == ("devstral", "devstral")
            assert record["supports_tools"] is True
            assert httpx.post(unload, timeout=60).status_code == 200
            [call] = asked(app)["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
        path = f"{app.url}/admin/models/local/settings"
        httpx.post(path, json={"tool_parser": "hermes_json"}, timeout=60)
        httpx.post(f"{app.url}/admin/models/rescan", timeout=60)
        httpx.post(unload, timeout=60)
        assert not asked(app).get("tool_calls")


def test_one_slip_changes_nothing_of_how_calls_are_read(tmp_path: Path) -> None:
    """Neither where a template shows a format, nor where one answer is of another."""
    with served(tmp_path / "shown", says(DEVSTRAL)) as app:
        steps = probed(app)
        record = steps[-1]["value"]
        assert (record["tool_format"], record["tool_parser"]) == ("devstral", None)
        assert record["supports_tools"] is False
        [hint] = next(s for s in steps if s["diagnostics"])["diagnostics"]
        assert hint["category"] == "other_format"
    switch = says(DEVSTRAL)
    first = switch.script

    def script(prompt: Prompt) -> str:
        return first(prompt) if "Rome" in prompt.text else THOUGHT

    switch.script = script
    with served(tmp_path / "slip", switch, prints_calls=False) as app:
        record = probed(app)[-1]["value"]
        assert (record["supports_tools"], record["tool_parser"]) == (False, None)


def test_one_slip_of_a_later_probe_takes_nothing_away(tmp_path: Path) -> None:
    switch = says(DEVSTRAL)
    usual = switch.script
    with served(tmp_path, switch, prints_calls=False) as app:
        assert probed(app)[-1]["value"]["tool_parser"] == "devstral"
        httpx.post(f"{app.url}/admin/models/local/unload", timeout=60)
        asked(app)
        for slip in (THOUGHT, DEVSTRAL[:-4], JSON_CALL):
            for city in ("Rome", "Oslo"):

                def script(prompt: Prompt, slip: str = slip, city: str = city) -> str:
                    return slip if city in prompt.text else usual(prompt)

                switch.script = script
                record = probed(app)[-1]["value"]
                assert (record["supports_tools"], record["tool_parser"]) == (
                    True,
                    "devstral",
                )


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_the_format_is_the_one_that_was_written(parser: str) -> None:
    """Several readers take most texts."""
    write = writer_of(TOOL_PARSERS[parser])
    assert write is not None
    syntax = output_syntax(find_family(None, "model", ""), None, None)
    tool = Tool("get_weather", TOOL["function"]["parameters"], TOOL)
    said = f"I look.\n{write('get_weather', {'city': 'Rome'})}"
    assert find_parser(syntax, said, [tool]) == parser


@pytest.mark.parametrize(
    ("said", "parser"),
    [
        ('<tool_call>\n{"name": "get_weather", "parameters": {"city": "x"}}\n'
         "</tool_call>", "hermes_json"),
        ('<longcat_tool_call>\n{"name": "get_weather", "parameters": {}}\n'
         "</longcat_tool_call>", "longcat"),
        ('{"name": "get_weather", "arguments": {"city": "x"}}', "llama"),
    ],
)  # fmt: skip
def test_a_call_with_other_words_is_of_the_format_that_leaves_no_marks(
    said: str, parser: str
) -> None:
    """Another one read it too, and showed its tags to the user."""
    syntax = output_syntax(find_family(None, "model", ""), None, None)
    tool = Tool("get_weather", TOOL["function"]["parameters"], TOOL)
    assert find_parser(syntax, said, [tool]) == parser


def test_a_question_that_is_refused_leaves_what_was_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(tmp_path, says(JSON_CALL)) as app:
        record = probed(app)[-1]["value"]
    with served(tmp_path, says(JSON_CALL), MAX_KV_SIZE="64") as app:
        steps = probed(app)
        assert [s["status"] for s in steps if s["step"] == "tools"][-1] == "failed"
        assert (steps[-1]["step"], steps[-1]["status"]) == ("store", "skipped")
        assert listed(app)["capabilities"] == record
        assert main(["local", "--url", app.url]) == 1
        assert "what was known before stays" in capsys.readouterr().out


def test_a_model_that_thinks_long_before_its_call_is_heard_out(tmp_path: Path) -> None:
    long = f"<think>\n{'so it is ' * 300}\n</think>\n\n{JSON_CALL}"
    with served(tmp_path, says(long)) as app:
        assert probed(app)[-1]["value"]["supports_tools"] is True


@pytest.mark.parametrize("odd", ["[" * 900 + "]" * 900, "5", '{"kind": {"a": 1}}'])
def test_a_broken_record_is_none(tmp_path: Path, odd: str) -> None:
    with served(tmp_path, says(JSON_CALL)) as app:
        name = listed(app)["id"]
    file = tmp_path / "home" / "capabilities.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f'{{"{name}": {odd}}}')
    with served(tmp_path, says(JSON_CALL)) as app:
        assert listed(app)["capabilities"] == "not probed"


def test_other_weights_in_the_same_folder_are_not_what_was_probed(
    tmp_path: Path,
) -> None:
    with served(tmp_path, says(DEVSTRAL), prints_calls=False) as app:
        probed(app)
    shutil.rmtree(tmp_path / "scripted")
    make_model(tmp_path / "scripted", "dense", layers=1, hidden=64)
    with served(tmp_path, says(DEVSTRAL), prints_calls=False) as app:
        assert not asked(app).get("tool_calls")
        assert listed(app)["capabilities"] == "not probed"


def test_marks_that_no_format_knows_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd = "<|odd_call|>get_weather; city: Rome<|/odd_call|>"
    with served(tmp_path, says(odd, "5 cents.")) as app:
        steps = probed(app)
        tools = next(s for s in steps if s["step"] == "tools" and s["diagnostics"])
        assert tools["value"] is False
        [found] = tools["diagnostics"]
        assert (found["level"], found["category"]) == ("warning", "unknown_markers")
        assert "<|odd_call|>" in found["message"]
        assert listed(app)["supports_function_calling"] is False
        # Its template has a switch for thinking, and that counts.
        assert listed(app)["supports_reasoning"] is True
    assert "<|odd_call|>" in caplog.text


def test_one_probe_at_a_time_and_it_ends_when_its_client_leaves(
    tmp_path: Path,
) -> None:
    with served(tmp_path, says(JSON_CALL)) as app:
        path = f"{app.url}/admin/models/nobody/capabilities"
        assert httpx.post(path, timeout=60).status_code == 404
        path = f"{app.url}/admin/models/local/capabilities"
        with held_gpu(app), httpx.stream("POST", path, timeout=60) as first:
            lines = first.iter_lines()  # kept: its end would close the connection
            next(line for line in lines if '"tools"' in line)
            [refused] = probed(app)
            assert refused["status"] == "failed"
            assert "being probed" in refused["error"]
        deadline = time.monotonic() + 60
        while len(steps := probed(app)) == 1:  # until the first one's end is seen
            assert time.monotonic() < deadline
        assert steps[-1]["step"] == "store"


def test_a_block_of_its_own_format_that_broke_holds_no_unknown_marks(
    tmp_path: Path,
) -> None:
    broken = '<tool_call>\n{"name": "get_weather", "arguments": oops}\n</tool_call>'
    with served(tmp_path, says(broken)) as app:
        steps = probed(app)
    [found] = next(s for s in steps if s.get("diagnostics"))["diagnostics"]
    assert found["category"] == "no_call"


def test_all_models_that_were_loaded_are_probed_one_after_another(
    tmp_path: Path,
) -> None:
    """PROBE_ON_LOAD, and several are loaded at the start."""
    names = ["one", "two", "three"]
    for name in names:
        make_model(tmp_path / "models" / name, "dense", layers=1, hidden=32)
    own = {"MODEL_DIR": str(tmp_path / "models"), "PROBE_ON_LOAD": "true",
           "PRELOAD_MODELS": ",".join(names)}  # fmt: skip
    with served(tmp_path, says(JSON_CALL), **own) as app:

        def not_probed() -> list[str]:
            entries = httpx.get(f"{app.url}/v1/models", timeout=60).json()["data"]
            mine = [one for one in entries if one["id"] in names]
            assert len(mine) == len(names)
            return [m["id"] for m in mine if m["capabilities"] == "not probed"]

        deadline = time.monotonic() + 120
        while not_probed():
            assert time.monotonic() < deadline, not_probed()
            time.sleep(0.05)


def test_it_is_probed_once_when_it_was_loaded(tmp_path: Path) -> None:
    """PROBE_ON_LOAD: nobody waits for it, and the next load does not ask again."""
    for _ in range(2):
        switch = says(JSON_CALL)
        with served(tmp_path, switch, PROBE_ON_LOAD="true") as app:
            deadline = time.monotonic() + 120
            while listed(app)["capabilities"] == "not probed":
                assert time.monotonic() < deadline
                time.sleep(0.05)
            record = listed(app)["capabilities"]
            asked(app)
            num_prompts = len(switch.prompts)
    assert record["supports_tools"] is True
    assert num_prompts == 1  # the second time: the chat alone


def test_the_command_prints_what_was_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(tmp_path, says(JSON_CALL)) as app:
        assert main(["local", "--url", app.url]) == 0
        shown = capsys.readouterr().out
        assert "tools: completed (yes)" in shown
        assert "tool_format              hermes_json" in shown
        assert main(["nobody", "--url", app.url]) == 1
        assert "nobody" in capsys.readouterr().err
