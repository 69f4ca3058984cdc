"""docs/grafana.json and docs/alerts.yml against a live exposition."""

import json
import re
from collections.abc import Iterator

import httpx
import yaml

from sidecar.app import App
from tools import write_dashboard

DOCS = write_dashboard.DOCS
_NAME = re.compile(r"\bmlx_\w+")
_LABELS = re.compile(r"(mlx_\w+)\{(\w+)=")


def expressions() -> Iterator[str]:
    board = json.loads((DOCS / "grafana.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${source}"
            yield target["expr"]
    rules = yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"][0]["rules"]
    yield from (rule["expr"] for rule in rules)


def test_the_files_are_those_of_the_tool() -> None:
    """Run `python -m tools.write_dashboard` after a change."""
    board = json.loads((DOCS / "grafana.json").read_text())
    assert board == write_dashboard.dashboard()
    assert (DOCS / "alerts.yml").read_text() == write_dashboard.alerts()


def test_each_name_is_exposed_after_a_conversation(app: App) -> None:
    """With data in it: a name that nobody writes would show an empty panel."""
    talk = [{"role": "user", "content": "Hello."}]
    for _ in range(2):
        body = {"model": "local", "messages": talk, "max_tokens": 4}
        url = f"{app.url}/v1/chat/completions"
        answer = httpx.post(url, json=body, timeout=60).json()
        said = answer["choices"][0]["message"]["content"] or ""
        talk += [{"role": "assistant", "content": said}]
        talk += [{"role": "user", "content": "And?"}]
    shown = httpx.get(f"{app.url}/metrics", timeout=60).text
    samples = {line.split("{")[0].split(" ")[0] for line in shown.splitlines()}
    found = list(expressions())
    assert len(found) > 15
    for expression in found:
        for name in _NAME.findall(expression):
            assert name in samples, name
        for name, label in _LABELS.findall(expression):
            assert re.search(rf"^{name}\{{[^}}]*{label}=", shown, re.MULTILINE), name
        assert expression.count("(") == expression.count(")")
