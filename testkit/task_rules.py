"""
A model that can do four small tasks with whatever tools an agent offers.

The tasks are those of the client runners: list and read, write and show, read, edit
and run, count with a sub-agent. What to do next follows from the prompt alone: the
last user text that names a task, and how many rounds of calls came after it.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from testkit.scripted import Answer, Call, Json, Prompt, Turn, render

Kind = Literal["shell", "read", "write", "edit", "task", "step"]


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do, in no tool's terms."""

    kind: Kind
    file: str = ""
    command: str = ""
    content: str = ""
    old: str = ""
    new: str = ""
    prompt: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """
    A task, the rounds of parallel actions that do it, and what to say at the end.

    Args:
        words: all must be in the user's text; the last one gives its place.
    """

    words: tuple[str, ...]
    rounds: tuple[tuple[Action, ...], ...]
    final: str


def _shell(command: str) -> Action:
    return Action("shell", command=command)


TASKS = (
    Task(
        ("count the lines of readme.md with wc",),
        ((_shell("wc -l README.md"),),),
        "README.md has 3 lines.",
    ),
    Task(
        ("sub-agent",),
        (
            (
                Action(
                    "task",
                    prompt="Count the lines of README.md with wc and report the number",
                ),
            ),
        ),
        "The sub-agent reported that README.md has 3 lines.",
    ),
    Task(
        ("list", "tell me the secret word"),
        ((_shell("ls -la"),), (Action("read", file="notes.txt"),)),
        "There are four files. The secret word is heron.",
    ),
    Task(
        ("create a file named result.txt",),
        (
            (Action("write", file="result.txt", content="heron\n"),),
            (_shell("cat result.txt"),),
        ),
        "result.txt now holds heron.",
    ),
    Task(
        ("fix the bug in calc.py",),
        (
            (Action("read", file="calc.py"), Action("read", file="test_calc.py")),
            (Action("edit", file="calc.py", old="return a - b", new="return a + b"),),
            (_shell("python3 test_calc.py"),),
        ),
        "calc.py is fixed and the test prints OK.",
    ),
)

_TOOL_NAMES: dict[Kind, tuple[str, ...]] = {
    "shell": ("Bash", "bash", "exec", "run_shell_command", "shell"),
    "read": ("Read", "read", "read_file"),
    "write": ("Write", "write", "write_file"),
    "edit": ("Edit", "edit", "replace"),
    "task": ("Task", "Agent", "task", "agent", "sessions_spawn"),
}


class TaskRules:
    """
    The script of that model.

    Args:
        cwd: where the agent works, for tools that want absolute paths.
    """

    def __init__(self, cwd: str) -> None:
        self._cwd = cwd

    def __call__(self, prompt: Prompt) -> str:
        """Decide and write an answer."""
        return render(self.decide(prompt), prompt)

    def decide(self, prompt: Prompt) -> Answer:
        """What to say or call next."""
        found = _current_task(prompt.turns)
        if found is None:
            return _side_answer(prompt)
        at, task = found
        done = _num_rounds(prompt.turns[at + 1 :])
        if prompt.tools and done < len(task.rounds):
            planned = [self._plan(action, prompt) for action in task.rounds[done]]
            calls = tuple(call for call in planned if call)
            if calls:
                names = ", ".join(call.name for call in calls)
                return Answer(
                    f"Step {done + 1} of the task: I should call {names} next.",
                    "" if done else "Let me do step 1.",
                    calls,
                )
        thought = "All steps are done, so I can answer." if prompt.tools else ""
        return Answer(thought, task.final)

    def _plan(self, action: Action, prompt: Prompt) -> Call | None:
        tools = {tool["name"]: tool for tool in prompt.tools}
        for name in _TOOL_NAMES[action.kind]:
            if name in tools:
                schema = tools[name].get("parameters") or {}
                return Call(name, _Filler(action, self._cwd).fill(schema))
        instead = by_shell(action)
        return self._plan(instead, prompt) if instead else None


def by_shell(action: Action) -> Action | None:
    """What a shell does instead of a tool that is not offered; None for no such."""
    if action.kind == "read":
        return _shell(f"cat {action.file}")
    if action.kind == "write":
        return _shell(f"printf '%s\\n' '{action.content.strip()}' > {action.file}")
    if action.kind == "edit":
        return _shell(f"sed -i 's/{action.old}/{action.new}/' {action.file}")
    return None


def _current_task(turns: tuple[Turn, ...]) -> tuple[int, Task] | None:
    """The task in hand and the turn that asked for it."""
    asked = [(i, _task_in(t.text)) for i, t in enumerate(turns) if t.role == "user"]
    asked = [(i, task) for i, task in asked if task]
    if not asked:
        return None
    at, task = asked[-1]
    assert task is not None
    # Some agents repeat the prompt in a later message that they will not keep: the
    # rounds count from the first time it was asked since it was last answered.
    answers = [
        i
        for i, turn in enumerate(turns[:at])
        if turn.role == "assistant" and task.final in turn.text
    ]
    since = answers[-1] if answers else -1
    return next(i for i, other in asked if i > since and other == task), task


def _task_in(text: str) -> Task | None:
    text = text.lower()
    if "openclaw_internal_context" in text[:60]:
        return None  # OpenClaw's volatile last message quotes older prompts
    hits = [task for task in TASKS if all(word in text for word in task.words)]
    return max(hits, key=lambda task: text.rfind(task.words[-1]), default=None)


def _num_rounds(turns: tuple[Turn, ...]) -> int:
    return sum(bool(turn.calls) for turn in turns)


def _side_answer(prompt: Prompt) -> Answer:
    """Titles, summaries and the like, which agents ask for beside the task."""
    if re.search(
        r"<summary>|(detailed|structured|concise) (\w+ )?summary", prompt.tail
    ):
        return Answer(text="<summary>\nnotes.txt was read.\n</summary>")
    return Answer(text="Scripted short answer")


class _Filler:
    """Arguments of one action for a tool, from the tool's JSON schema."""

    def __init__(self, action: Action, cwd: str) -> None:
        full = os.path.join(cwd, action.file) if action.file else None
        command = action.command or None
        is_write, is_edit = action.kind == "write", action.kind == "edit"
        prompt = action.prompt or None
        self._is_task = action.kind == "task"
        self._values: dict[str, Any] = {
            **dict.fromkeys(("filepath", "path", "absolutepath", "filename"), full),
            **dict.fromkeys(("command", "cmd"), command),
            **dict.fromkeys(
                ("content", "filetext"), action.content if is_write else None
            ),
            **dict.fromkeys(("oldstring", "oldtext"), action.old if is_edit else None),
            **dict.fromkeys(("newstring", "newtext"), action.new if is_edit else None),
            **dict.fromkeys(("prompt", "task", "message"), prompt),
            "subagenttype": "general-purpose" if prompt else None,
            "taskname": "count_lines" if prompt else None,
        }

    def fill(self, schema: Json) -> dict[str, Any]:
        """An object that the schema takes."""
        required = schema.get("required") or []
        filled = {}
        for name, part in (schema.get("properties") or {}).items():
            value = self._value(name, part)
            if value is None and name in required:
                value = self._placeholder(name, part)
            if value is not None:
                filled[name] = value
        return filled

    def _value(self, name: str, part: Json) -> Any:
        plain = name.lower().replace("_", "")
        if plain == "edits" and self._values["oldtext"]:
            return [self.fill(part.get("items") or {})]
        value = self._values.get(plain)
        if value is not None and part.get("enum") and value not in part["enum"]:
            return part["enum"][0]
        return value

    def _placeholder(self, name: str, part: Json) -> Any:
        if name == "description":
            return "Count lines" if self._is_task else "Run a step"
        if part.get("enum"):
            return part["enum"][0]
        simple: dict[Any, Callable[[], Any]] = {
            "array": list,
            "object": dict,
            "boolean": bool,
            "integer": lambda: 1,
            "number": lambda: 1,
        }
        return simple.get(part.get("type"), lambda: "x")()
