"""The scripted model itself: says what it is told, and does the runners' tasks."""

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.app import App
from testkit.scripted import Answer, Call, Switch, parse_prompt, render
from testkit.task_rules import TaskRules

TASKS = (
    "List the files in this directory, then read notes.txt "
    "and tell me the secret word.",
    "Create a file named result.txt that holds exactly the secret word on one line, "
    "then show it with cat.",
    "Fix the bug in calc.py so that test_calc.py passes, "
    "then run python3 test_calc.py.",
)


def tool(name: str, required: list[str], **properties: Any) -> Any:
    """A function as agents offer it."""
    schema = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": name, "parameters": schema}
    return {"type": "function", "function": function}


TEXT = {"type": "string"}
EDITS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"oldText": TEXT, "newText": TEXT},
        "required": ["oldText", "newText"],
    },
}
OFFERS = {
    "pi": [
        tool("bash", ["command"], command=TEXT, timeout={"type": "number"}),
        tool("read", ["path"], path=TEXT, offset={"type": "number"}),
        tool("write", ["path", "content"], path=TEXT, content=TEXT),
        tool("edit", ["path", "edits"], path=TEXT, edits=EDITS),
    ],
    "claude": [
        tool("Bash", ["command", "description"], command=TEXT, description=TEXT),
        tool("Read", ["file_path"], file_path=TEXT),
        tool("Write", ["file_path", "content"], file_path=TEXT, content=TEXT),
        tool(
            "Edit",
            ["file_path", "old_string", "new_string"],
            file_path=TEXT,
            old_string=TEXT,
            new_string=TEXT,
        ),
    ],
    "shell only": [tool("exec", ["command"], command=TEXT)],
}


def run(name: str, given: dict[str, Any], folder: Path) -> str:
    """What an agent would do for a call."""
    values = list(given.values())
    if "command" in given:
        done = subprocess.run(
            given["command"], shell=True, cwd=folder, capture_output=True, text=True
        )
        return done.stdout + done.stderr
    path = Path(values[0])
    if name.lower() == "write":
        path.write_text(given["content"])
    elif name.lower() == "edit":
        change = given["edits"][0] if "edits" in given else given
        old, new = [value for key, value in change.items() if key[:3] in ("old", "new")]
        path.write_text(path.read_text().replace(old, new))
    return path.read_text()


@pytest.mark.parametrize("offer", OFFERS)
def test_the_rules_do_the_tasks(
    scripted_sidecar: App, switch: Switch, tmp_path: Path, offer: str
) -> None:
    """With the tools of each agent, in one conversation, to the right files."""
    (tmp_path / "notes.txt").write_text("- the secret word is heron\n")
    (tmp_path / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (tmp_path / "test_calc.py").write_text(
        "from calc import add\n\nassert add(2, 3) == 5\nprint('OK')\n"
    )
    switch.script = TaskRules(str(tmp_path))
    messages: list[Any] = []
    answers = []
    for task in TASKS:
        messages.append({"role": "user", "content": task})
        message = {"tool_calls": [True]}
        while message.get("tool_calls"):
            message = _ask(scripted_sidecar, messages, OFFERS[offer])
            messages.append(message)
            for call in message.get("tool_calls") or ():
                given = json.loads(call["function"]["arguments"])
                result = run(call["function"]["name"], given, tmp_path)
                messages.append(
                    {"role": "tool", "tool_call_id": call["id"], "content": result}
                )
        answers.append(message["content"])
    assert "heron" in answers[0]
    assert (tmp_path / "result.txt").read_text().strip() == "heron"
    assert messages[-2]["content"].strip() == "OK"


def _ask(app: App, messages: list[Any], tools: list[Any]) -> Any:
    body = {"model": "local", "messages": messages, "tools": tools}
    answer = httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=60)
    return answer.json()["choices"][0]["message"]


def test_a_prompt_is_taken_apart(scripted_sidecar: App, switch: Switch) -> None:
    """System, user, past calls and results come back as they were sent."""
    switch.script = lambda prompt: render(Answer(text="done"), prompt)
    calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "exec", "arguments": '{"command": "ls"}'},
        }
        for number in range(2)
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_0", "content": "one"},
        {"role": "tool", "tool_call_id": "call_1", "content": "two\nlines"},
    ]
    answer = _ask(scripted_sidecar, messages, OFFERS["shell only"])
    assert answer["content"] == "done"
    prompt = parse_prompt(switch.prompts[-1].text)
    assert [turn.role for turn in prompt.turns] == [
        "system", "user", "assistant", "tool", "tool",
    ]  # fmt: skip
    assert prompt.turns[2].text == "I look."
    assert prompt.turns[2].calls == (Call("exec", {"command": "ls"}),) * 2
    assert prompt.tail == "one\ntwo\nlines"
    assert [offered["name"] for offered in prompt.tools] == ["exec"]
    assert prompt.thinking
