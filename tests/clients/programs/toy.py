"""What the SDK loops share: two toy tools, a long system text, prompts, a check."""

import os
import sys
from typing import Any

BASE = os.environ["BASE"]
MODEL = "local"
KEY = "any"
STREAM = os.environ.get("STREAM") == "1"
WIRE = os.environ.get("WIRE", "chat")
MAX_STEPS = 16
_RULE = (
    "Rule {n}: when a person asks about item {n}, look at shelf {m} first, tell them "
    "what you found there, and only then go on to the next of their questions.\n"
)
SYSTEM = (
    f"You are agent {os.environ.get('CASE')}. Use the tools, one step at a time.\n"
    + "".join(_RULE.format(n=n, m=n * 7 % 101) for n in range(90))
)
PROMPTS = (
    "Please do 8 steps with the tools, one after another, then report.",
    "Thank you. Now do 4 more steps, then report again.",
    "This is remark 7: just note it.",
)
WANTED = ("All 8 steps are done", "All 4 steps are done", "Noted 7")
WEATHER_TEXT = "Tell the weather of a city"
ADD_TEXT = "Add two numbers"
WEATHER_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "name of the city"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city"],
}
ADD_SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "number"},
        "b": {"type": "number"},
        "note": {"type": "string"},
    },
    "required": ["a", "b"],
}


def get_weather(city: str, unit: str = "celsius") -> str:
    """Tell the weather of a city."""
    return f"{city}: 22 degrees {unit}, light wind, no rain before the evening."


def add(a: float, b: float, note: str = "") -> str:
    """Add two numbers."""
    return f"{a} + {b} = {a + b} (note: {note})"


def call(name: str, arguments: dict[str, Any]) -> str:
    """Run a tool."""
    return {"get_weather": get_weather, "add": add}[name](**arguments)


def finish(answers: list[str]) -> None:
    """Say whether the answers are those that the script gives; ends the program."""
    pairs = zip(WANTED, answers, strict=False)
    bad = [f"{w!r} not in {a!r}" for w, a in pairs if w not in (a or "")]
    if len(answers) != len(WANTED):
        bad.append(f"{len(answers)} answers")
    print("\n".join(bad) or "OK")
    sys.exit(bool(bad))
