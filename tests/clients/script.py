"""
What the scripted model says to any agent: small tasks, with whatever tools it offers.

The tasks are done in rounds of tool calls, each with thinking before it. What comes
next follows from the prompt alone: the last user text that names a task, and how many
rounds came after it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from testkit.scripted import Answer, Call, Json, Prompt, Turn, render
from testkit.task_rules import Action, by_shell

_STEPS = re.compile(r"do (\d+) (?:more )?steps")
_SUMMARY = re.compile(r"<analysis>|(detailed|structured|concise) (\w+ )?summary")
_VOLATILE = "openclaw_internal_context"

_NAMES = {
    "shell": (
        "bash", "exec", "exec_command", "shell_command", "shell", "run_shell_command",
        "run_commands", "execute_command", "run_terminal_command", "local_shell",
    ),
    "read": ("read", "read_file", "read_files", "view"),
    "write": ("write", "write_file", "write_to_file", "create_new_file", "editor"),
    "edit": ("edit", "replace", "replace_in_file", "str_replace", "editor"),
    "task": ("task", "agent", "sessions_spawn", "spawn_agent", "use_subagents"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """Rounds of parallel acts and the answer after them."""

    rounds: tuple[tuple[Action, ...], ...]
    final: str


def _shell(command: str) -> tuple[Action, ...]:
    return (Action("shell", command=command),)


_TASKS: tuple[tuple[tuple[str, ...], Plan], ...] = (
    (
        ("count the lines of readme.md with wc",),
        Plan((_shell("wc -l README.md"),), "README.md has 3 lines."),
    ),
    (
        ("sub-agent",),
        Plan(
            (
                (
                    Action(
                        "task",
                        prompt="Count the lines of README.md with wc and report.",
                    ),
                ),
            ),
            "The sub-agent reported that README.md has 3 lines.",
        ),
    ),
    (
        ("list", "tell me the secret word"),
        Plan(
            (_shell("ls -la"), (Action("read", file="notes.txt"),)),
            "There are four files. The secret word is heron.",
        ),
    ),
    (
        ("create a file named result.txt",),
        Plan(
            (
                (Action("write", file="result.txt", content="heron\n"),),
                _shell("cat result.txt"),
            ),
            "result.txt now holds heron.",
        ),
    ),
    (
        ("fix the bug in calc.py",),
        Plan(
            (
                (Action("read", file="calc.py"), Action("read", file="test_calc.py")),
                (
                    Action(
                        "edit",
                        file="calc.py",
                        old="return a - b",
                        new="return a + b",
                        content="def add(a, b):\n    return a + b\n",
                    ),
                ),
                _shell("python3 test_calc.py"),
            ),
            "calc.py is fixed and the test prints OK.",
        ),
    ),
)
_AIDER = {
    "result.txt": "I create the file.\n\nresult.txt\n```\n<<<<<<< SEARCH\n=======\n"
    "heron\n>>>>>>> REPLACE\n```\n",
    "calc.py": "The sign is wrong.\n\ncalc.py\n```python\n<<<<<<< SEARCH\n"
    "    return a - b\n=======\n    return a + b\n>>>>>>> REPLACE\n```\n",
}


class ClientScript:
    """
    The script.

    Args:
        cwd: tells where the agent works now, for tools that want absolute paths.
    """

    def __init__(self, cwd: Callable[[], str]) -> None:
        self._cwd = cwd

    def __call__(self, prompt: Prompt) -> str:
        """Decide and write an answer."""
        return render(self.decide(prompt), prompt)

    def decide(self, prompt: Prompt) -> Answer:
        """What to say or call next."""
        found = _current(prompt.turns)
        if found is None:
            return _side_answer(prompt)
        at, plan = found
        asked = prompt.turns[at].text
        if "SEARCH/REPLACE" in prompt.text:
            return _aider_answer(asked, plan)
        done = sum(bool(turn.calls) for turn in prompt.turns[at + 1 :])
        if prompt.tools and done < len(plan.rounds):
            calls = self._calls(plan.rounds[done], prompt.tools, done)
            if calls:
                names = ", ".join(call.name for call in calls)
                thought = f"Step {done + 1} of the task.\n\nI should call {names} next."
                text = "" if done % 3 else f"Let me do step {done + 1}."
                return Answer(thought, text, calls)
        thought = "All steps are done, so I can answer." if prompt.tools else ""
        return Answer(thought, plan.final)

    def _calls(
        self, acts: Sequence[Action], tools: Sequence[Json], done: int
    ) -> tuple[Call, ...]:
        planned = [self._plan(act, tools, done) for act in acts]
        return tuple(call for call in planned if call)

    def _plan(self, act: Action, tools: Sequence[Json], done: int) -> Call | None:
        if act.kind == "step":
            return _step_call(tools, done)
        offered = {_plain(tool["name"]): tool for tool in tools}
        for name in _NAMES[act.kind]:
            if name in offered:
                tool = offered[name]
                filler = Filler(act, self._cwd())
                return Call(tool["name"], filler.fill(tool.get("parameters") or {}))
        instead = by_shell(act)
        return self._plan(instead, tools, done) if instead else None


def _plain(name: str) -> str:
    return re.sub(r"^.*(__|\.)", "", name).lower()


def _step_call(tools: Sequence[Json], done: int) -> Call | None:
    """The toy tools of the SDK loops, in turn; their arguments differ each time."""
    names = [tool["name"] for tool in tools]
    if "get_weather" not in names:
        return None
    if done % 2:
        return Call("add", {"a": done, "b": 0.5, "note": 'a "quoted" \\ word'})
    return Call("get_weather", {"city": f"Zürich {done}", "unit": "celsius"})


def _current(turns: Sequence[Turn]) -> tuple[int, Plan] | None:
    """The turn that asked for the task in hand, and its plan."""
    asked = [(i, _plan_in(t.text)) for i, t in enumerate(turns) if t.role == "user"]
    known = [(i, plan) for i, plan in asked if plan]
    if not known:
        return None
    at, plan = known[-1]
    assert plan is not None
    # An agent may repeat the prompt in a later message that it will not keep: rounds
    # count from its first mention since it was last answered.
    answers = [
        i
        for i, turn in enumerate(turns[:at])
        if turn.role == "assistant" and plan.final in turn.text
    ]
    since = answers[-1] if answers else -1
    first = next(i for i, other in known if i > since and other == plan)
    later = [turn.text for turn in turns[first:] if turn.role == "assistant"]
    is_answered = any(plan.final in text for text in later)
    return None if is_answered else (first, plan)


def _plan_in(text: str) -> Plan | None:
    text = text.lower()
    if _VOLATILE in text[:60]:
        return None  # OpenClaw's volatile last message quotes older prompts
    steps = [*_STEPS.finditer(text)]
    hits = [
        (text.rfind(words[-1]), plan)
        for words, plan in _TASKS
        if all(word in text for word in words)
    ]
    if steps:
        count = int(steps[-1][1])
        hits.append((steps[-1].start(), _steps_plan(count)))
    return max(hits, key=lambda hit: hit[0])[1] if hits else None


def _steps_plan(count: int) -> Plan:
    rounds = tuple(
        (Action("step"), Action("step")) if number == 2 else (Action("step"),)
        for number in range(count)
    )
    return Plan(rounds, f"All {count} steps are done; it was 22 degrees.")


def _aider_answer(asked: str, plan: Plan) -> Answer:
    for name, text in _AIDER.items():
        if name in asked:
            return Answer(f"Thinking about {name}", text)
    return Answer("Thinking.", plan.final)


def _side_answer(prompt: Prompt) -> Answer:
    """Titles, summaries and the like, which agents ask for beside the task."""
    if "<task-notification>" in prompt.tail:
        return Answer("The sub-agent is done.", "It says that README.md has 3 lines.")
    if _SUMMARY.search(prompt.tail):
        return Answer(text="<summary>\nnotes.txt was read.\n</summary>")
    hello = re.search(r"remark (\d+)", prompt.tail.lower())
    if hello:
        return Answer("A remark needs only a short answer.", f"Noted {hello[1]}.")
    return Answer(text="Scripted short answer")


class Filler:
    """Arguments of one act for a tool, from the tool's JSON schema."""

    def __init__(self, act: Action, cwd: str) -> None:
        self._act = act
        self._full = f"{cwd}/{act.file}" if act.file else None

    def fill(self, schema: Json) -> dict[str, Any]:
        """An object that the schema takes."""
        required = schema.get("required") or []
        filled = {}
        for name, part in (schema.get("properties") or {}).items():
            value = self._value(name.lower().replace("_", ""), part)
            if value is None and name in required:
                value = self._placeholder(name, part)
            if value is not None:
                filled[name] = value
        return filled

    def _value(self, name: str, part: Json) -> Any:
        act = self._act
        if name in ("filepath", "path", "absolutepath", "targetfile", "filename"):
            return self._full
        if name in ("files", "paths", "filepaths") and self._full:
            return self._items(part, self._full)
        if name in ("command", "cmd", "commands"):
            return self._command(name, part)
        return {
            **dict.fromkeys(("content", "contents", "filetext"), act.content),
            **dict.fromkeys(("oldstring", "oldtext", "oldstr"), act.old),
            **dict.fromkeys(("newstring", "newtext", "newstr"), act.new or act.content),
            **dict.fromkeys(("prompt", "task", "message", "instructions"), act.prompt),
            "edits": [self.fill(part.get("items") or {})] if act.old else None,
            "subagenttype": self._choice(part, "general-purpose"),
            "taskname": "count_lines" if act.prompt else None,
        }.get(name) or None

    def _command(self, name: str, part: Json) -> Any:
        if self._act.kind != "shell":
            if "enum" not in part:
                return None
            wanted = {"write": "create", "edit": "str_replace", "read": "view"}
            return wanted.get(self._act.kind)
        if name == "commands":
            return self._items(part, self._act.command)
        if part.get("type") == "array":
            return ["bash", "-lc", self._act.command]
        return self._act.command

    def _items(self, part: Json, value: str) -> list[Any]:
        items = part.get("items") or {}
        kinds = [items, *items.get("anyOf", ())]
        shaped = next((kind for kind in kinds if kind.get("type") == "object"), None)
        is_plain = any(kind.get("type") == "string" for kind in kinds)
        return [self.fill(shaped) if shaped and not is_plain else value]

    def _choice(self, part: Json, wanted: str) -> str | None:
        if not self._act.prompt:
            return None
        names = part.get("enum") or (wanted,)
        return wanted if wanted in names else str(names[0])

    def _placeholder(self, name: str, part: Json) -> Any:
        if name == "description":
            return "Count lines" if self._act.prompt else "Run a step"
        if part.get("enum"):
            return part["enum"][0]
        simple: dict[Any, Any] = {
            "array": [], "object": {}, "boolean": False, "integer": 1, "number": 1,
        }  # fmt: skip
        return simple.get(part.get("type"), "x")
