"""inspect-cache against real servers."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from sidecar.__main__ import main
from sidecar.app import App
from sidecar.cli.cache_tree import draw_tree, size
from testkit.servers import running_sidecar

SYSTEM = "You sort the letters of a small harbour office. " * 20


@pytest.fixture(params=["dense", "hybrid"])
def server(
    request: pytest.FixtureRequest, model_folder: Callable[[str], Path]
) -> Iterator[App]:
    """A sidecar with an empty store."""
    with running_sidecar({"MODEL_PATH": str(model_folder(request.param))}) as app:
        yield app


def ask(
    app: App, system: str, session: str, text: str = "hello there", **more: object
) -> None:
    """One short answer."""
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": text},
    ]
    body = {"messages": messages, "max_tokens": 4, "session_id": session, **more}
    answer = httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200


def inspect(app: App, *arguments: str) -> int:
    """Run it."""
    return main(["inspect-cache", "--url", app.url, *arguments])


def test_an_empty_store_is_drawn(
    server: App, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect(server, "--check") == 0
    shown = capsys.readouterr().out
    assert "0 tokens in 0 nodes" in shown
    is_dense = "does not need checkpoints" in shown
    assert re.search(r"layers: (\d+ \w+( \(not cut\))?(, )?)+\n", shown)
    assert ("(not cut)" in shown) is not is_dense
    assert "problems: 0" in shown


def test_branches_are_indented_below_what_they_share(
    server: App, capsys: pytest.CaptureFixture[str]
) -> None:
    """One stretch for the system prompt, one below it for each conversation."""
    ask(server, SYSTEM, "one", "first letter")
    ask(server, SYSTEM, "two", "second letter")
    capsys.readouterr()
    assert inspect(server) == 0
    shown = capsys.readouterr().out
    lines = re.findall(r"^( +)(\d+)-(\d+)  [\d.]+ kB(.*)$", shown, re.MULTILINE)
    trunk, *branches = lines
    assert (trunk[0], trunk[1]) == ("  ", "0")
    assert len(branches) >= 2
    assert {indent for indent, *_ in branches} == {"    "}
    assert {start for _, start, *_ in branches} == {trunk[2]}
    assert {"one", "two"} == set(re.findall(r"session=(\w+)", shown))
    assert ("checkpoints=" in shown) == server_needs_checkpoints(server)
    assert "problems" not in shown  # it was not asked to look


def server_needs_checkpoints(app: App) -> bool:
    """As the server says itself."""
    report = httpx.get(f"{app.url}/admin/cache", timeout=5).json()
    return bool(report["needs_checkpoints"])


def test_the_nodes_bytes_are_those_of_the_store(server: App) -> None:
    """Shares of the buffers and checkpoints add up to what the store holds."""
    for number in range(4):
        ask(server, SYSTEM, f"s{number}", f"letter {number} " * number)
    report = httpx.get(f"{server.url}/admin/cache", timeout=5).json()
    told = sum(row["kv_bytes"] + row["checkpoint_bytes"] for row in report["tree"])
    assert told == pytest.approx(report["bytes"], rel=0.01)


def test_sessions_are_shown_with_their_parents(
    server: App, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one that was used last first; its names drive no terminal."""
    ask(server, SYSTEM, "root")
    ask(server, SYSTEM, "mid\x1b[2J", parent_session_id="root")
    ask(server, SYSTEM, "leaf", metadata={"origin_session_id": "mid\x1b[2J"})
    rows = httpx.get(f"{server.url}/admin/cache", timeout=5).json()["sessions"]
    assert [row["session"] for row in rows] == ["leaf", "mid\x1b[2J", "root"]
    assert rows[0]["parents"] == ["mid\x1b[2J", "root"]
    assert (rows[0]["threads"], rows[0]["messages"]) == (1, 2)
    assert inspect(server) == 0
    shown = capsys.readouterr().out
    assert "sessions (3" in shown
    assert re.search(r"^  leaf .* parents: mid\\x1b\[2J < root$", shown, re.MULTILINE)
    assert "\x1b" not in shown


def test_drift_and_counters_are_shown(
    server: App, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where prompts part, as text, and only counters that counted something."""
    ask(server, f"{SYSTEM} Revision alpha. {SYSTEM}", "one")
    ask(server, f"{SYSTEM} Revision omega. {SYSTEM}", "one")
    assert inspect(server) == 0
    shown = capsys.readouterr().out
    assert "drift (1 places" in shown
    assert re.search(r"before '.*alpha", shown)
    assert re.search(r"now    '.*omega", shown)
    assert "resumed_prefill_tokens" in shown
    assert "invariant_violation" not in shown


def test_a_broken_store_ends_with_1(
    server: App, capsys: pytest.CaptureFixture[str]
) -> None:
    """What must never be: a node that claims to begin elsewhere."""
    ask(server, SYSTEM, "one")
    with server.pool.lease("") as served:
        node = next(iter(served.engine.store._tree.nodes()))
        node.start += 1
    assert inspect(server) == 0
    assert inspect(server, "--check") == 1
    assert "does not begin where its parent ends" in capsys.readouterr().out


def test_what_runs_is_drawn_as_lent(
    server: App, capsys: pytest.CaptureFixture[str]
) -> None:
    """While an answer is being written its path belongs to it."""
    messages = [{"role": "user", "content": "Write until I go."}]
    body = {
        "messages": messages, "max_tokens": 4000, "temperature": 0,
        "stream": True, "session_id": "busy",
    }  # fmt: skip
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        events = (line for line in answer.iter_lines() if line.startswith("data:"))
        for _ in range(3):  # the role, and some of the answer
            next(events)
        assert inspect(server) == 0
    assert re.search(r"lent .*session=busy", capsys.readouterr().out)


def test_the_admin_token_is_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    """Without it the refusal is shown as the server words it."""
    with running_sidecar({"ADMIN_TOKEN": "secret"}) as app:
        assert inspect(app) == 1
        assert "401" in capsys.readouterr().err
        assert inspect(app, "--key", "secret", "--check") == 0


def test_a_deep_tree_is_drawn_without_recursion() -> None:
    """Five thousand forks, one below the other."""
    base = {
        "lent": False, "subagent": False, "session": "s", "hits": 0, "idle_s": 0.0,
        "leases": 0, "kv_bytes": 1, "checkpoint_bytes": 0,
    }  # fmt: skip
    rows = []
    for depth in range(5000):
        place = {"start": depth, "end": depth + 1, "parent": 2 * depth - 2}
        rows.append({**base, **place, "node": 2 * depth})
        rows.append({**base, **place, "node": 2 * depth + 1})
    lines = list(draw_tree(rows))
    assert len(lines) == 10000
    assert max(len(line) for line in lines) < 120


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 kB"), (3 << 20, "3.0 MB"),
     (5 << 30, "5.0 GB")],
)  # fmt: skip
def test_sizes_are_for_people(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text
