"""The admin page in a real browser: every button pressed, states asserted."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from sidecar.app import App
from sidecar.server.page_files import page_files
from testkit.browser import Watched
from testkit.proxy import free_port
from testkit.raw_http import eventually
from testkit.servers import held_gpu
from testkit.sidecar_process import is_ready, started
from tests.admin_page.conftest import chat

WIDE, NARROW = (1280, 900), (320, 800)
PANELS = (
    "models",
    "memory",
    "requests",
    "why",
    "cache",
    "savings",
    "clients",
    "settings",
    "logs",
)


@pytest.fixture
def watched(chromium: Browser, app: App) -> Iterator[Watched]:
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    found = Watched(context.new_page())
    found.page.goto(f"{app.url}/admin/")
    expect(found.page.locator("#status")).to_contain_text("ok")
    yield found
    context.close()


@pytest.fixture
def page(watched: Watched) -> Page:
    return watched.page


def row(page: Page, panel: str, text: str) -> "Page":
    return page.locator(f"#{panel} tr", has_text=text)  # type: ignore[return-value]


def test_it_asks_nobody_else_and_says_nothing(watched: Watched, app: App) -> None:
    """U1: small, silent, and alone with its server."""
    chat(app, [{"role": "user", "content": "Hello."}])
    expect(watched.page.locator("#ended-body tbody tr").first).to_be_visible()
    assert watched.requests
    assert all(url.startswith(app.url) for url in watched.requests)
    assert watched.words == []
    files = {page.tag: len(page.body) for page in page_files().values()}
    assert sum(files.values()) <= 150_000


def test_a_script_in_the_page_itself_is_blocked(watched: Watched) -> None:
    watched.page.evaluate(
        "() => { const s = document.createElement('script');"
        " s.textContent = 'window.ran = 1'; document.body.append(s); }"
    )
    assert watched.page.evaluate("() => window.ran") is None
    assert any("Content Security Policy" in word for word in watched.words)


def test_models_by_mouse(page: Page, app: App) -> None:
    """U2: load, pin, a refusal, unpin, unload; the badge follows."""
    one = row(page, "models", "beside-one")
    badge = one.locator(".badge")
    expect(badge).to_have_text("unloaded")
    one.get_by_role("button", name="Load").click()
    expect(badge).to_have_text("loaded")
    one.get_by_role("button", name="Pin", exact=False).first.click()
    expect(badge).to_have_text("pinned")
    one.get_by_role("button", name="Unload").click()
    expect(page.locator("#message")).to_contain_text("pinned")
    expect(badge).to_have_text("pinned")
    one.get_by_role("button", name="Unpin").click()
    expect(badge).to_have_text("loaded")
    one.get_by_role("button", name="Unload").click()
    expect(badge).to_have_text("unloaded")
    expect(page.locator("#message")).to_contain_text("came back")


def test_models_by_keyboard_alone(page: Page) -> None:
    two = row(page, "models", "beside-two")
    button = two.get_by_role("button", name="Load")
    for _ in range(60):
        page.keyboard.press("Tab")
        if button.evaluate("node => node === document.activeElement"):
            break
    page.keyboard.press("Enter")
    expect(two.locator(".badge")).to_have_text("loaded")
    two.get_by_role("button", name="Unload").focus()
    page.keyboard.press("Space")
    expect(two.locator(".badge")).to_have_text("unloaded")


def test_a_model_leaves_after_idle_seconds(page: Page) -> None:
    page.on("dialog", lambda dialog: dialog.accept("120"))
    one = row(page, "models", "beside-one")
    one.get_by_role("button", name="Idle time").click()
    expect(one.locator("td").nth(7)).to_have_text("2 min")


def test_models_are_looked_for_anew(page: Page) -> None:
    page.click("#rescan")
    expect(page.locator("#message")).to_have_text("3 models.")


def test_what_runs_and_waits(page: Page, app: App) -> None:
    """U4: stages, the order of the queue, and a cancel that ends one."""
    answers: list[httpx.Response] = []

    def ask(number: int) -> None:
        body = {
            "model": "local",
            "messages": [{"role": "user", "content": f"Wait {number} " * 40}],
            "max_tokens": 8,
        }
        answers.append(
            httpx.post(
                f"{app.url}/v1/chat/completions",
                json=body,
                headers={"X-Request-ID": f"number-{number}"},
                timeout=120,
            )
        )

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(2)]
    with held_gpu(app):
        for thread in threads:
            thread.start()
            before = len(app.core.services.chat.running())
            assert eventually(lambda: len(app.core.services.chat.running()) > 0)
            assert before <= 1
        assert eventually(lambda: len(app.core.services.chat.running()) == 2)
        expect(page.locator("#running-body")).to_contain_text("queued #1")
        expect(page.locator("#running-body")).to_contain_text("queued #2")
        page.get_by_role("button", name="Cancel number-1").click()
        expect(page.locator("#message")).to_have_text("number-1 is cancelled.")
        expect(page.locator("#running-body tbody tr")).to_have_count(1)
    for thread in threads:
        thread.join(120)
    assert sorted(answer.status_code for answer in answers) == [200, 499]
    expect(page.locator("#running-body")).to_contain_text("Nothing runs.")
    expect(page.locator("#ended-body")).to_contain_text("cancelled")


def test_why_a_turn_was_not_warm(page: Page, app: App) -> None:
    """The cause, where, what it cost, and a remedy that can be copied."""
    talk = [
        {"role": "system", "content": "You help. " * 60},
        {"role": "user", "content": "Hello."},
    ]
    said = chat(app, talk, session_id="why")
    talk += [
        {"role": "assistant", "content": said},
        {"role": "user", "content": "And?"},
    ]
    talk[0] = {"role": "system", "content": "Build 7 helps. " + "You help. " * 60}
    chat(app, talk, session_id="why")
    line = row(page, "why-body", "text").first
    expect(line).to_contain_text("message 1 (system)")
    expect(line).to_contain_text("Build 7")
    line.get_by_role("button", name="Copy").click()
    expect(page.locator("#message")).to_have_text("Copied.")
    copied = page.evaluate("() => navigator.clipboard.readText()")
    assert copied == "CACHE_RULES_FILE"
    expect(page.locator("#causes-body")).to_contain_text("text")


def test_a_value_that_recurs_has_a_rule_to_copy(page: Page, app: App) -> None:
    """It stays open while the page goes on asking."""
    for number in range(4):
        talk = [
            {"role": "system", "content": f"Build stamp: {number}\n" + "Help. " * 90},
            {"role": "user", "content": "Hello."},
        ]
        talk += [
            {"role": role, "content": f"{role} {turn}"}
            for turn in range(number)
            for role in ("assistant", "user")
        ]
        chat(app, talk, session_id="recurs")
    line = row(page, "why-body", "Build stamp").first
    line.get_by_text("A rule for CACHE_RULES_FILE").click()
    expect(line.locator("pre")).to_contain_text('pattern = "Build stamp: .{1,200}"')
    for _ in range(2):
        with page.expect_response("**/admin/state"):
            pass
    line.get_by_role("button", name="Copy the rule").click()
    expect(page.locator("#message")).to_have_text("Copied.")
    copied = page.evaluate("() => navigator.clipboard.readText()")
    assert copied.lstrip().startswith("[[rule]]")


def test_the_cache_is_shown_and_forgotten(page: Page, app: App) -> None:
    """U5: a session goes, then all; what is kept falls to nothing."""
    chat(app, [{"role": "user", "content": "Keep this. " * 50}], session_id="kept")
    page.click("#show-cache")
    line = row(page, "cache-body", "kept").first
    line.get_by_role("button", name="Forget kept").click()
    page.locator("#ask").get_by_role("button", name="No").click()
    expect(line).to_be_visible()
    line.get_by_role("button", name="Forget kept").click()
    page.locator("#ask").get_by_role("button", name="Yes").click()
    expect(page.locator("#message")).to_contain_text("came back")
    expect(row(page, "cache-body", "kept")).to_have_count(0)
    # By the keyboard: rows that come above it may move it under a mouse's click.
    page.locator("#clear-cache").press("Enter")
    page.locator("#ask").get_by_role("button", name="Yes").click()
    expect(page.locator("#memory-body")).to_contain_text("KV kept for reuse: 0 kB")
    page.click("#clear-memory")
    expect(page.locator("#message")).to_contain_text("was given back")


def test_parts_of_memory_add_up(page: Page, app: App) -> None:
    now = httpx.get(f"{app.url}/admin/state", timeout=60).json()["memory"]
    widths = page.locator("#memory-body rect[x]").evaluate_all(
        "all => all.map(r => +r.getAttribute('width'))"
    )
    assert sum(widths) == pytest.approx(1000, abs=1)
    assert now["weights"] + now["stored_kv"] <= now["limit"]


def test_savings_are_those_of_the_server(page: Page, app: App) -> None:
    chat(app, [{"role": "user", "content": "Save me. " * 20}])
    total = httpx.get(f"{app.url}/admin/savings", timeout=60).json()["total"]
    expect(page.locator("#savings-body")).to_contain_text(f"{total['prompt_tokens']:,}")


def test_lines_of_clients_are_copied(page: Page) -> None:
    for name in ("claude", "openclaw", "pi", "codex", "opencode", "qwen"):
        page.get_by_role("button", name=f"Copy the line of {name}").click()
        expect(page.locator("#message")).to_have_text("Copied.")
        text = page.evaluate("() => navigator.clipboard.readText()")
        assert text == f".venv/bin/litellm-mlx launch {name}"


def test_a_setting_is_changed_and_taken_back(page: Page, app: App) -> None:
    page.fill("#settings-find", "DEFAULT_TOP_P")
    line = page.locator("#settings-body tbody tr")
    expect(line).to_have_count(1)
    field = line.get_by_label("Value of DEFAULT_TOP_P")
    field.fill("0.5")
    line.get_by_role("button", name="Save DEFAULT_TOP_P").click()
    expect(page.locator("#message")).to_contain_text("DEFAULT_TOP_P is 0.5 (acts now)")
    assert app.core.services.chat._defaults.top_p == 0.5
    expect(line).to_contain_text("settings.json")
    line.get_by_label("Value of DEFAULT_TOP_P").fill("7")
    line.get_by_role("button", name="Save DEFAULT_TOP_P").click()
    expect(page.locator("#message")).to_contain_text("must be a number 0..1")
    line.get_by_label("Value of DEFAULT_TOP_P").fill("")
    line.get_by_role("button", name="Save DEFAULT_TOP_P").click()
    expect(line).not_to_contain_text("settings.json")
    page.click("#reload")
    expect(page.locator("#message")).to_have_text("Nothing has changed.")


def test_lines_of_the_log(page: Page, app: App) -> None:
    """Newest last, by level and request; a paused one stays as it is."""
    app.core.services.lines.setLevel(0)
    import logging

    logger = logging.getLogger("sidecar.test")
    logger.error("first <b>line</b>\nforged")
    expect(page.locator("#logs-body")).to_contain_text("first <b>line</b>\\nforged")
    page.select_option("#logs-level", "ERROR")
    logger.warning("only a warning")
    logger.error("second")
    expect(page.locator("#logs-body")).to_contain_text("second")
    expect(page.locator("#logs-body")).not_to_contain_text("only a warning")
    page.select_option("#logs-level", "")
    page.fill("#logs-request", "no such id")
    expect(page.locator("#logs-body")).to_be_empty()
    page.fill("#logs-request", "")
    page.click("#logs-pause")
    expect(page.locator("#logs-pause")).to_have_attribute("aria-pressed", "true")


def test_words_of_strangers_are_text(page: Page, app: App) -> None:
    """U10: names and prompts full of HTML."""
    evil = "<img src=x onerror=window.ran=1><script>window.ran=1</script>"
    body = {
        "model": "local",
        "messages": [{"role": "system", "content": f"{evil} " * 9}],
        "max_tokens": 4,
        "session_id": evil,
    }
    body["messages"] = [
        {"role": "system", "content": "Old. " * 40},
        {"role": "user", "content": evil},
    ]
    for system in ("Old. " * 40, f"{evil} " * 20):
        body["messages"] = [
            {"role": "system", "content": system},
            {"role": "user", "content": evil},
        ]
        httpx.post(
            f"{app.url}/v1/chat/completions",
            json=body,
            headers={"User-Agent": evil},
            timeout=60,
        ).raise_for_status()
    expect(page.locator("#ended-body")).to_contain_text("<img src=x")
    page.click("#show-cache")
    expect(page.locator("#cache-body")).to_contain_text("<img src=x")
    assert page.evaluate("() => window.ran") is None
    assert page.locator("main img, main script").count() == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1280", "320"])
def test_it_can_be_used_by_all(
    chromium: Browser, app: App, theme: str, size: tuple[int, int], tmp_path: Path
) -> None:
    """U3: no violation that axe knows, nothing beyond the edge."""
    width, height = size
    context = chromium.new_context(
        viewport={"width": width, "height": height},
        color_scheme=theme,  # type: ignore[arg-type]
    )
    page = context.new_page()
    page.goto(f"{app.url}/admin/")
    chat(app, [{"role": "user", "content": "Show me."}])
    expect(page.locator("#settings-body tbody tr").first).to_be_visible()
    expect(page.locator("#ended-body tbody tr").first).to_be_visible()
    page.click("#show-cache")
    expect(page.locator("#cache-body tbody tr").first).to_be_visible()
    found = Axe().run(page)
    violations = found.response["violations"]
    assert violations == [], json.dumps(violations)[:3000]
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    for panel in PANELS:
        page.locator(f"#{panel}").scroll_into_view_if_needed()
        page.locator(f"#{panel}").screenshot(path=tmp_path / f"{panel}.png")
    context.close()


def test_dark_and_light_by_hand(page: Page) -> None:
    before = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    after = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert before != after
    page.reload()
    now = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert now == after


def test_a_server_that_is_gone_and_comes_back(
    chromium: Browser, tmp_path: Path
) -> None:
    """U12: greyed with the time, then live again by itself."""
    page, port = chromium.new_page(), free_port()
    with started(tmp_path, "--port", str(port), CACHE_SELFTEST="off"):
        assert eventually(lambda: is_ready(port))
        page.goto(f"http://127.0.0.1:{port}/admin/")
        expect(page.locator("#status")).to_contain_text("ok")
    expect(page.locator("body.stale")).to_have_count(1, timeout=60_000)
    expect(page.locator("#stale")).to_contain_text("no answer since")
    with started(tmp_path, "--port", str(port), CACHE_SELFTEST="off"):
        expect(page.locator("body.stale")).to_have_count(0, timeout=60_000)
        expect(page.locator("#status")).to_contain_text("ok", timeout=60_000)
    page.close()
