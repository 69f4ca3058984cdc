"""
`litellm-mlx launch` with the real clients: each answers, its user's home is as it was.

    python -m tests.clients.launched [--written] [NAME...]

Each client is run twice in homes that hold the same foreign settings, comments and all:
by itself, told to say its version, and by `launch` on a task. What a client writes into
its own files at any start (its version, a schema's address) is its own doing: so files
that were there are compared with those of the run without us. `--written`: the client
is started by itself, on settings that `launch --write` has changed, then undone.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.clients.case import TASKS, Place, call
from tests.clients.stack import running_stack

REPO = Path(__file__).parents[2]
_CLIENTS = Path(os.environ.get("CLIENTS", Path.home() / ".cache/agent-clients"))
_WORD = "heron"


@dataclass(frozen=True, slots=True)
class Launched:
    """
    A client.

    Args:
        package: where it is installed. arguments: of a run that does the first task.
        files: foreign settings of its user's, by path below his home.
        environ: so that it asks nobody else.
        plain: files for `--written`, which takes strict JSON and leaves models of
            agents as they are; None: the same.
    """

    package: str
    arguments: tuple[str, ...]
    files: Mapping[str, str]
    environ: Mapping[str, str] = field(default_factory=dict)
    plain: Mapping[str, str] | None = None


_PI_MODELS = json.dumps({"providers": {"other": {
    "baseUrl": "http://127.0.0.1:9/v1", "api": "openai-completions",
    "apiKey": "x", "models": []}}}, indent=5)  # fmt: skip
CASES = {
    "claude": Launched(
        "claude",
        ("-p", "--permission-mode", "acceptEdits", "--allowedTools", "Bash", "Read",
         "--", TASKS[1]),
        {".claude/settings.json": json.dumps(
            {"env": {"ANTHROPIC_BASE_URL": "http://127.0.0.1:9", "MINE": "1",
                     "http_proxy": "http://127.0.0.1:9", "no_proxy": "intranet.corp",
                     "CLAUDE_CODE_USE_BEDROCK": "1", "AWS_REGION": "us-east-1",
                     "ANTHROPIC_BEDROCK_BASE_URL": "http://127.0.0.1:9"},
             "model": "opus", "theme": "dark"}, indent=3)},
    ),
    "openclaw": Launched(
        "openclaw",
        ("agent", "--local", "--agent", "main", "--session-id", "one", "--message",
         TASKS[1]),
        {".openclaw/openclaw.json": "// mine\n{gateway: {mode: 'local', auth: {mode: "
         "'token', token: 'local-test'}}, // tail\n agents: {defaults: "
         "{timeoutSeconds: 240}, list: [{id: 'main', model: 'other/dead'}]}}\n"},
        {"OPENCLAW_HIDE_BANNER": "1", "OPENCLAW_DISABLE_BONJOUR": "1"},
    ),
    "pi": Launched(
        "pi2",
        ("-p", "--thinking", "medium", TASKS[1]),
        {".pi/agent/models.json": f"// mine\n{_PI_MODELS}",
         ".pi/agent/settings.json": '{"theme":   "dark"}\n'},
        {"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"},
        {".pi/agent/models.json": _PI_MODELS},
    ),
    "codex": Launched(
        "codex",
        ("exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check",
         TASKS[1]),
        {".codex/config.toml": '# mine\nmodel = "other"   # a comment\n'},
    ),
    "opencode": Launched(
        "opencode",
        ("run", TASKS[1]),
        {".config/opencode/opencode.json": json.dumps({"theme": "system",
            "enabled_providers": ["other"], "disabled_providers": ["litellm-mlx"],
            "agent": {"build": {"model": "other/dead"}}, "provider": {"other": {
            "npm": "@ai-sdk/openai-compatible", "options": {
            "baseURL": "http://127.0.0.1:9/v1"}, "models": {"dead": {}}}}}, indent=2)},
        {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1",
         "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"},
        {".config/opencode/opencode.json": '{\n  "theme": "system"\n}\n'},
    ),
    "qwen": Launched(
        "qwen",
        ("--yolo", "-p", TASKS[1]),
        {".qwen/settings.json": json.dumps({"telemetry": {"enabled": False},
            "privacy": {"usageStatisticsEnabled": False},
            "providerProtocol": {"custom": "openai"},
            "compactionModel": "custom:local",
            "modelProviders": {provider: [
                {"id": name, "name": name, "baseUrl": "http://127.0.0.1:9/v1",
                 "envKey": "HOME"} for name in ("local", "qwen3-max")]
                for provider in ("custom", "openai")},
            "fastModel": "qwen3-max",
            "general": {"disableAutoUpdate": True}}, indent=7)},
        plain={".qwen/settings.json": json.dumps({"telemetry": {"enabled": False},
            "privacy": {"usageStatisticsEnabled": False},
            "general": {"disableAutoUpdate": True}}, indent=7)},
    ),
}  # fmt: skip


def main(argv: list[str]) -> int:
    """Exit code 1 if a client did not answer, or a file of the user's changed."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.launched")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--written", action="store_true")
    options = parser.parse_args(argv)
    names = options.names or (_WRITTEN if options.written else [*CASES])
    attempt = _try_written if options.written else _try
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        with running_stack(REPO, "dense", root / "run", {}) as stack:
            for name in names:
                faults = attempt(name, root / name, stack)
                wrong += bool(faults)
                sys.stdout.write(f"{name}: {'; '.join(faults) or 'ok'}\n")
                sys.stdout.flush()
    return int(wrong > 0)


_MARKS = ("$schema", "$version")  # of opencode and Qwen Code, at any start
_WRITTEN = {
    "claude": (),
    "pi": ("--provider", "litellm-mlx", "--model", "local"),
    "opencode": (),
    "qwen": (),
}  # how a user who has written them picks the model


def _try_written(name: str, folder: Path, stack: object) -> list[str]:
    """On changed settings it answers; undone, nothing of the user's has changed."""
    case = CASES[name]
    if case.plain is not None:
        case = replace(case, files=case.plain)
    place = _place(case, folder / "written", stack)
    before = {path: (place.home / path).read_text() for path in case.files}
    stack.work_in(place.project)  # type: ignore[attr-defined]
    environ = _launcher_environ(name, case, place, folder, stack)
    verb = [sys.executable, "-m", "litellm_mlx.launcher", "launch", name]
    faults = []
    written = call(place, [*verb, "--write", "--yes"], environ, limit_s=60)
    if written.code:
        faults.append(f"--write exits {written.code}: {written.error[-300:]!r}")
    own = [place.binary(case.package, name), *_WRITTEN[name], *case.arguments]
    said = call(place, own, case.environ, limit_s=300)
    if said.code or _WORD not in said.out:
        faults.append(f"exit {said.code}: {said.out[-300:]!r} {said.error[-600:]!r}")
    undone = call(place, [*verb, "--undo"], environ, limit_s=60)
    if undone.code:
        faults.append(f"--undo exits {undone.code}: {undone.error[-300:]!r}")
    changed = [
        path for path, was in before.items() if not _is_as_it_was(place, path, was)
    ]
    texts = [f"{path} is {(place.home / path).read_text()!r}" for path in changed]
    return faults + [f"{text} ({undone.out.strip()})" for text in texts]


def _is_as_it_was(place: Place, path: str, was: str) -> bool:
    """To the byte; or the client has put its own mark into it, and nothing else."""
    now = (place.home / path).read_text()
    if now == was:
        return True
    return {k: v for k, v in json.loads(now).items() if k not in _MARKS} == json.loads(
        was
    )


def _try(name: str, folder: Path, stack: object) -> list[str]:
    case = CASES[name]
    alone = _place(case, folder / "alone", stack)
    call(alone, [alone.binary(case.package, name), *case.arguments], case.environ,
         limit_s=60)  # fmt: skip
    place = _place(case, folder / "launched", stack)
    before = _digests(place.home, case)
    stack.work_in(place.project)  # type: ignore[attr-defined]
    environ = _launcher_environ(name, case, place, folder, stack)
    command = [sys.executable, "-m", "litellm_mlx.launcher", "launch", name, "--"]
    said = call(place, [*command, *case.arguments], environ, limit_s=300)
    faults = []
    if said.code or _WORD not in said.out:
        faults.append(f"exit {said.code}: {said.out[-300:]!r} {said.error[-600:]!r}")
    after, by_itself = _digests(place.home, case), _digests(alone.home, case)
    changed = [
        path for path in before if after[path] not in (before[path], by_itself[path])
    ]
    return faults + [f"{path} changed" for path in changed]


def _launcher_environ(
    name: str, case: Launched, place: Place, folder: Path, stack: object
) -> dict[str, str]:
    run = stack.run  # type: ignore[attr-defined]
    return {
        **case.environ,
        "PATH": os.pathsep.join(map(str, [place.binary(case.package, "x").parent,
                                          place.node, os.environ["PATH"]])),
        "PYTHONPATH": str(REPO),
        "LITELLM_MLX_FOLDER": str(folder),
        **_ports(stack),
        "MLX_CACHE_HOME": str(run / "home"),
    }  # fmt: skip


def _ports(stack: object) -> dict[str, str]:
    sidecar = stack.sidecar_url.rsplit(":", 1)[1]  # type: ignore[attr-defined]
    proxy = stack.url.rsplit(":", 1)[1]  # type: ignore[attr-defined]
    return {"MLX_PORT": sidecar, "PROXY_PORT": proxy}


def _place(case: Launched, folder: Path, stack: object) -> Place:
    folder.mkdir(parents=True)
    place = Place(stack.url, folder, _CLIENTS)  # type: ignore[attr-defined]
    place.prepare()
    for path, text in case.files.items():
        file = place.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return place


def _digests(home: Path, case: Launched) -> dict[str, str]:
    return {
        path: hashlib.sha256((home / path).read_bytes()).hexdigest()
        for path in case.files
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
