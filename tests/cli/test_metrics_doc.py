"""docs/metrics.md has a row for every metric there is."""

import re
from pathlib import Path

import httpx
import pytest

from sidecar.app import App
from sidecar.volatile.rules import load_rules

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


@pytest.fixture
def exposed(app: App) -> set[str]:
    """Names of all metrics of a running server, as families."""
    text = httpx.get(f"{app.url}/metrics", timeout=5).text
    return set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))


def test_every_metric_has_a_row(exposed: set[str]) -> None:
    """Counters of the cache under their short names, families by their pattern."""
    rows = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    for name in exposed:
        if name.endswith("_created"):
            continue  # the time a counter began
        short = name.removeprefix("mlx_cache_").removesuffix("_total")
        family = re.sub(r"^(pin_stop|pin|restate)_.*", r"\1_KIND", short)
        assert short in rows or family in rows, name


def test_every_row_is_a_metric(exposed: set[str]) -> None:
    """What is gone from the code leaves the page."""
    shorts = {n.removeprefix("mlx_cache_").removesuffix("_total") for n in exposed}
    for row in re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE):
        assert row in shorts or row.endswith("_KIND"), row


def test_every_kind_is_named() -> None:
    """Built-in rules only."""
    never_pinned = {"billing_header", "internal_context"}  # left out; moved
    kinds = set(load_rules().policies) - never_pinned
    assert kinds <= set(re.findall(r"`(\w+)`", PAGE))
