"""The built-in model as an agent, nothing scripted."""

import json
import subprocess
from pathlib import Path
from typing import Any

from testkit.proxy import Proxy

STRING = {"type": "string"}


def tool(name: str, description: str, argument: str) -> Any:
    """A function with one text argument."""
    schema = {
        "type": "object",
        "properties": {argument: STRING},
        "required": [argument],
    }
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [
    tool("read", "Read the contents of a file.", "path"),
    tool("bash", "Execute a bash command. Returns stdout and stderr.", "command"),
]


def run_tool(name: str, arguments: dict[str, str], folder: Path) -> str:
    """What the tool really gives."""
    if name == "read":
        return (folder / arguments["path"]).read_text().strip()
    command = ["bash", "-c", arguments["command"]]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=20, check=True
    )
    return done.stdout.strip()


def test_reads_a_file_runs_a_command_and_answers(proxy: Proxy, tmp_path: Path) -> None:
    """Three requests, each one's prompt built from what the last one brought."""
    (tmp_path / "notes.txt").write_text("buy milk\nbuy bread\ncall Ann\n")
    messages: list[Any] = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "First read notes.txt, then run `wc -l notes.txt`"},
    ]
    done = []
    for _ in range(3):
        answer = proxy.openai.chat.completions.create(
            model="builtin", messages=messages, tools=TOOLS, temperature=0
        ).choices[0]
        messages.append(answer.message.model_dump(exclude_none=True))
        for call in answer.message.tool_calls or ():
            arguments = json.loads(call.function.arguments)
            result = run_tool(call.function.name, arguments, tmp_path)
            done.append((call.function.name, arguments))
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": result}
            )
    assert done == [
        ("read", {"path": "notes.txt"}),
        ("bash", {"command": "wc -l notes.txt"}),
    ]
    assert answer.finish_reason == "stop"
    assert answer.message.content == "Result: 3 notes.txt"
    assert answer.message.reasoning_content.strip()
