"""
Asks a running server like an agent and judges how much it reuses.

    mlx-sidecar probe [--scenario normal|drift|...|all] [--turns N]
    mlx-sidecar probe --quality [--model MODEL] [--questions N]
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator

from sidecar.cli.scenarios import IMAGES, SCENARIOS, Checked, Scenario, Setup
from sidecar.cli.server import (
    Json,
    Server,
    ServerError,
    add_server_flags,
    at_least,
    server_of,
)

_MIN_TURNS, _MIN_TOKENS = 3, 24
_QUALITY = "--quality"
_COLUMNS = f"  {'turn':<12}{'prompt':>8}{'cached':>8}{'prefilled':>11}{'TTFT':>10}"


def main(argv: list[str]) -> int:
    """Exit codes: 0 all kept, 1 a scenario failed or no answer, 2 bad usage."""
    if _QUALITY in argv:
        from sidecar.cli import quality  # takes seconds: it starts servers of its own

        return quality.main([each for each in argv if each != _QUALITY])
    options = _parser().parse_args(argv)
    server = server_of(options)
    failed = []
    try:
        setup = _setup(server, options)
        names = _names(options.scenario, sees=setup.sees)
        before = _retreats(server)
        for name in names:
            if not _judge(name, SCENARIOS[name], setup):
                failed.append(name)
        if _retreats(server) > before:
            _say("FAIL a match ended within a picture (vlm_retreat)")
            failed.append("retreats")
    except ServerError as error:
        sys.stderr.write(f"probe: {error}\n")
        return 1
    if len(names) > 1:
        outcome = f"failed: {', '.join(failed)}" if failed else "all passed"
        _say(f"\n{len(names)} scenarios, {outcome}")
    return 1 if failed else 0


def _setup(server: Server, options: argparse.Namespace) -> Setup:
    models: list[Json] = server.get("/v1/models")["data"]
    asks = {
        "model": options.model,
        "max_tokens": options.max_tokens,
        "temperature": 0,
    }
    named = [m for m in models if options.model in (m["id"], *m.get("aliases", ()))]
    sees = any(model.get("supports_vision") for model in named)
    _say(f"{server.url} model={options.model}; {'sees' if sees else 'text only'}")
    cache = _cache_report(server)
    return Setup(
        server,
        asks,
        options.turns,
        can_cut=not cache.get("needs_checkpoints", True),
        can_splice=cache.get("can_splice", False),
        sees=sees,
    )


def _names(asked: str, *, sees: bool) -> list[str]:
    """
    What to try: a model without images is shown none.

    Raises:
        ServerError: that alone is asked.
    """
    if asked == IMAGES and not sees:
        raise ServerError("this model takes text only: it can be shown no images")
    if asked != "all":
        return [asked]
    return [name for name in SCENARIOS if sees or name != IMAGES]


def _retreats(server: Server) -> int:
    """Matches that would have ended within a picture; 0 where that is unknown."""
    counters: Json = _cache_report(server).get("counters", {})
    return int(counters.get("vlm_retreat", 0))


def _cache_report(server: Server) -> Json:
    """Empty without the admin token; then the milder bounds hold."""
    with contextlib.suppress(ServerError):
        report: Json = server.get("/admin/cache")
        return report
    return {}


def _judge(name: str, scenario: Scenario, setup: Setup) -> bool:
    _say(f"\n{name}: {scenario.expectation}\n{_COLUMNS}  reuse expected")
    done = list(_shown(scenario.run(setup)))
    bad = [checked for checked in done if not checked.is_good]
    prompt_len = sum(checked.turn.prompt_len for checked in done)
    cached_len = sum(checked.turn.cached_len for checked in done)
    for checked in bad:
        turn = checked.turn
        _say(
            f"  turn {turn.label} reused {turn.cached_len} of {turn.prompt_len} "
            f"tokens, expected {checked.expected or 'less'}"
        )
    share = cached_len / max(1, prompt_len)
    verdict = "FAIL" if bad else "PASS"
    _say(f"{verdict} {name}: {share:.1%} of {prompt_len} prompt tokens reused")
    return not bad


def _shown(turns: Iterator[Checked]) -> Iterator[Checked]:
    for checked in turns:
        turn = checked.turn
        prefilled_len = turn.prompt_len - turn.cached_len
        _say(
            f"  {turn.label:<12}{turn.prompt_len:>8}{turn.cached_len:>8}"
            f"{prefilled_len:>11}{turn.ttft_s * 1000:>7.0f} ms  "
            f"{checked.expected}{'' if checked.is_good else '  <-- not kept'}"
        )
        yield checked


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-sidecar probe",
        description="Asks a running server like an agent and judges how much of each "
        "prompt it reuses.",
    )
    add_server_flags(parser, "MLX_API_KEY")
    parser.add_argument(
        _QUALITY,
        action="store_true",
        help="ask a model for values that drifted; its flags: --quality --help",
    )
    parser.add_argument("--model", default="local", help="model (%(default)s)")
    parser.add_argument(
        "--scenario",
        choices=[*SCENARIOS, "all"],
        default="all",
        help="what happens to the conversation (%(default)s)",
    )
    parser.add_argument(
        "--turns",
        type=at_least(_MIN_TURNS),
        default=6,
        help=f"requests of a scenario, {_MIN_TURNS} or more (%(default)s)",
    )
    parser.add_argument(
        "--max-tokens",
        type=at_least(_MIN_TOKENS),
        default=128,
        help="longest answer, thinking counts; one that is cut within it keeps less: "
        f"{_MIN_TOKENS} or more (%(default)s)",
    )
    return parser
