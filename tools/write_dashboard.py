"""
Writes docs/grafana.json and docs/alerts.yml: what to look at, and what to be woken for.

    python -m tools.write_dashboard

The dashboard is imported as it is: its data source is a variable, and it needs no
plug-in.
"""

import json
from pathlib import Path
from typing import Any

from sidecar.infra.metrics import HEALTHY_AT_ZERO

DOCS = Path(__file__).parents[1] / "docs"
_TOKENS = "mlx_token_throughput_total"
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_WIDTH, _HEIGHT = 12, 8

# Title, unit, and each line's name and expression.
PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Reused share of prompt tokens", "percentunit", {
        "reused": f'sum(rate({_TOKENS}{{kind="cached"}}[10m])) / '
                  f'sum(rate({_TOKENS}{{kind="prompt"}}[10m]))'}),
    ("Prefill time not spent", "s", {
        "saved each hour": "increase(mlx_prefill_seconds_saved_total[1h])"}),
    ("Time to the first token", "s", {
        f"p{q}": f"histogram_quantile(0.{q}, "
                 "sum by (le) (rate(mlx_ttft_seconds_bucket[10m])))"
        for q in (50, 95)}),
    ("Wait in the queue", "s", {
        f"p{q}": f"histogram_quantile(0.{q}, "
                 "sum by (le) (rate(mlx_queue_seconds_bucket[10m])))"
        for q in (50, 95)}),
    ("Between an answer's tokens", "s", {
        f"p{q}": f"histogram_quantile(0.{q}, "
                 "sum by (le) (rate(mlx_inter_token_seconds_bucket[10m])))"
        for q in (50, 95)}),
    ("Requests that waited for a load", "short", {
        "waited": "increase(mlx_pool_cache_misses_total[1h])"}),
    ("Tokens a second", "short", {
        "{{kind}}": f"sum by (kind) (rate({_TOKENS}[5m]))"}),
    ("Requests that run or wait", "short", {"active": "mlx_active_requests"}),
    ("Memory", "bytes", {
        "in use": "mlx_active_memory_bytes",
        "most so far": "mlx_peak_memory_bytes",
        "KV kept": "mlx_prefix_cache_bytes",
        "weights of {{model}}": "mlx_model_memory_bytes"}),
    ("Why prompts were not warm", "short", {
        "{{cause}}": "sum by (cause) (increase(mlx_warmth_total[1h]))"}),
    ("Tokens computed again", "short", {
        "{{cause}}": "sum by (cause) (increase(mlx_lost_tokens_total[1h]))"}),
    ("Tokens of KV let go", "short", {
        "evicted": "increase(mlx_cache_evicted_tokens_total[1h])"}),
    ("Ends", "short", {
        "{{reason}}": "sum by (reason) (increase(mlx_jobs_ended_total[1h]))"}),
    ("Should stay at 0", "short", {
        name: f"increase(mlx_cache_{name}_total[1h])" for name in HEALTHY_AT_ZERO}),
)  # fmt: skip

ALERTS: tuple[tuple[str, str, str], ...] = (
    *((
        "MlxReuse" + "".join(word.capitalize() for word in name.split("_")),
        f"increase(mlx_cache_{name}_total[1h]) > 0",
        f"{name} should stay at 0: docs/metrics.md",
    ) for name in HEALTHY_AT_ZERO),
    ("MlxModelFailed", 'mlx_model_state{state="failed"} == 1',
     "a model cannot be loaded: litellm-mlx doctor"),
    ("MlxErrors", 'increase(mlx_requests_total{status="500"}[15m]) > 0',
     "the sidecar answered 500: see servers.log"),
    ("MlxAuditRowsLost", "increase(mlx_audit_dropped_total[1h]) > 0",
     "rows of the audit are lost: docs/audit.md"),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    """As Grafana imports it."""
    panels = [_panel(number, *panel) for number, panel in enumerate(PANELS)]
    source = {"name": "source", "type": "datasource", "query": "prometheus"}
    return {
        "title": "litellm-mlx",
        "uid": "litellm-mlx",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }


def _panel(number: int, title: str, unit: str, lines: dict[str, str]) -> dict[str, Any]:
    place = {
        "x": number % 2 * _WIDTH,
        "y": number // 2 * _HEIGHT,
        "w": _WIDTH,
        "h": _HEIGHT,
    }
    targets = [
        {"refId": f"L{at}", "datasource": _SOURCE, "expr": expr, "legendFormat": name}
        for at, (name, expr) in enumerate(lines.items())
    ]
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": targets,
    }


def alerts() -> str:
    """Rules as Prometheus reads them."""
    lines = ["groups:", "  - name: litellm-mlx", "    rules:"]
    for name, expr, text in ALERTS:
        lines += [
            f"      - alert: {name}",
            f"        expr: {json.dumps(expr)}",
            f"        annotations: {{summary: {json.dumps(text)}}}",
        ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Write both files."""
    text = json.dumps(dashboard(), indent=1)
    (DOCS / "grafana.json").write_text(f"{text}\n")
    (DOCS / "alerts.yml").write_text(alerts())


if __name__ == "__main__":
    main()
