"""
The model half of `litellm-mlx doctor`: settings, models, downloads; loads nothing.

    mlx-sidecar doctor [--json]

Each finding says what was found and the one line that mends it.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import httpx
from jinja2 import Environment, TemplateSyntaxError

from sidecar.config.names import unknown_names
from sidecar.config.setting_sources import SettingSources
from sidecar.config.settings import Config
from sidecar.config.sources import ConfigError, read_env_file
from sidecar.config.values import physical_memory
from sidecar.engine.loading.checkpoint_files import (
    memory_limit,
    read_object,
    weight_bytes,
)
from sidecar.engine.loading.hub_faults import contact_fault
from sidecar.engine.loading.model_place import early_fault, folder_of
from sidecar.server.access import needs_key
from sidecar.volatile.configured_rules import configured_rules

_ENV_FILE = Path(".env")
_LEFT_FREE = 8 << 30
_GB = 1e9
_HUB_S = 3.0
_TEMPLATES = Environment(extensions=["jinja2.ext.loopcontrols"])
_GENERATION = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")  # transformers' own
# What a fault says -> what mends it; the first that fits.
_MENDS = {
    "GGUF": "set MODEL_PATH to an MLX model (mlx-community has most)",
    "run git lfs pull": "git lfs pull, in that folder",
    "HF_HUB_OFFLINE": "start once without HF_HUB_OFFLINE",
    "cannot be reached": "check the connection and HF_ENDPOINT, or name a folder",
    "there is no such folder": "correct MODEL_PATH in .env: a folder, or a hub id",
    "MAX_PROCESS_MEMORY": "choose a smaller model, or one of fewer bits",
    "MAX_MODEL_MEMORY": "choose a smaller model, or one of fewer bits",
}
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")


@dataclasses.dataclass(frozen=True, slots=True)
class CheckResult:
    """
    What a check found.

    Args:
        state: `ok`, `warn` or `bad`. mend: one line; "": nothing need be.
    """

    group: str
    state: str
    found: str
    mend: str = ""


def main(argv: list[str]) -> int:
    """Exit codes: 0 nothing is bad, 1 something is, 2 bad usage."""
    parser = argparse.ArgumentParser(
        prog="mlx-sidecar doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="as a list of objects")
    options = parser.parse_args(argv)
    found = [*check(_ENV_FILE)]
    if options.json:
        rows = [dataclasses.asdict(one) for one in found]
        sys.stdout.write(f"{json.dumps(rows)}\n")
    else:
        for one in found:
            mend = f"\n    {one.mend}" if one.mend else ""
            sys.stdout.write(f"{one.state:4} {one.group}: {one.found}{mend}\n")
    return int(any(one.state == "bad" for one in found))


def check(env_file: Path) -> Iterator[CheckResult]:
    """All findings, in order."""
    environ = os.environ  # noqa: TID251 - as the server would read it
    try:
        config = SettingSources({}, env_file, environ).config()
        configured_rules(config)
    except ConfigError as error:
        name = re.split("[ =:]", str(error), maxsplit=1)[0]
        mend = f"correct {name}{_where(name, env_file)}"
        yield CheckResult("settings", "bad", str(error), mend)
        return
    unknown = list(unknown_names(env_file, environ))
    for one in unknown:
        mend = f"rename it to {one.meant}" if one.meant else f"remove {one.name}"
        yield CheckResult("settings", "warn", str(one), mend)
    if needs_key(config.server.host) and not config.server.api_key:
        found = f"MLX_HOST={config.server.host} lets others in, and there is no key"
        yield CheckResult("settings", "bad", found, "set MLX_API_KEY in .env")
    elif not unknown:
        yield CheckResult(
            "settings", "ok", "each name is known, each value in its range"
        )
    yield from _model(config)
    yield from _downloads()


def _where(name: str, env_file: Path) -> str:
    """Where a value stands; "": the name is that of a file."""
    if "/" in name:
        return ""
    with contextlib.suppress(ConfigError):
        if name in read_env_file(env_file):
            return f" in {env_file}"
    is_set = name in os.environ  # noqa: TID251 - where it is said, not what
    return " in the environment" if is_set else " on the admin page, which saved it"


def _model(config: Config) -> Iterator[CheckResult]:
    path = config.model.path
    process = config.engine.max_process_bytes or max(
        physical_memory() - _LEFT_FREE, _LEFT_FREE // 2
    )
    limit = memory_limit(process, config.engine.max_model_bytes)
    if fault := early_fault(path, limit):
        yield CheckResult("models", "bad", fault, _mend_of(fault))
        return
    folder = folder_of(path)
    if folder is None:
        yield _of_the_hub(str(path))
        return
    size = weight_bytes(folder)
    if not any((folder / name).exists() for name in _TOKENIZERS):
        found = f"{folder} has no tokenizer"
        yield CheckResult(
            "models", "bad", found, "copy tokenizer.json beside its weights"
        )
        return
    if fault := _unreadable(folder):
        yield CheckResult("models", "bad", fault, "fetch that file of the model again")
        return
    if not _has_template(folder):
        found = f"{folder} has no chat template: a plain one is used"
        mend = "copy chat_template.jinja of the model's own repository into it"
        yield CheckResult("models", "warn", found, mend)
    name = path or "the built-in model"
    text = f"{name}: {size / _GB:.1f} GB of weights, whole, fits"
    yield CheckResult("models", "ok", text)


def _of_the_hub(name: str) -> CheckResult:
    """Whether its cache has it, or the hub lists it now."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    cached = try_to_load_from_cache(name, "config.json")
    if isinstance(cached, str) and weight_bytes(Path(cached).parent):
        return CheckResult("models", "ok", f"{name} is in the hub's cache")
    asked: Future[None] = Future()

    def ask() -> None:
        try:
            HfApi().model_info(name, timeout=_HUB_S)
            asked.set_result(None)
        except Exception as error:  # noqa: BLE001 - told below
            asked.set_exception(error)

    # Looking its name up may take longer than any time limit of the request.
    threading.Thread(target=ask, daemon=True).start()
    try:
        asked.result(_HUB_S)
    except (HfHubHTTPError, httpx.HTTPError, OSError, ValueError) as error:
        fault = contact_fault(error)
        found = f"{name} is not here: {fault}"
        return CheckResult("models", "bad", found, _mend_of(fault))
    except (KeyError, TypeError, AttributeError):
        found = f"{name} is not here, and the hub answers something else than a model"
        return CheckResult("models", "bad", found, "correct HF_ENDPOINT")
    return CheckResult("models", "ok", f"{name} is fetched from the hub at the start")


def _mend_of(fault: str) -> str:
    found = (mend for words, mend in _MENDS.items() if words in fault)
    return next(found, "fetch the model again: what is whole is kept")


def _unreadable(folder: Path) -> str:
    """What a start or each chat would fail on, of files that are no weights."""
    for name, key in (("tokenizer.json", "model"), ("tokenizer_config.json", "")):
        found = read_object(folder, name) if (folder / name).exists() else {key: ""}
        if found is None or (key and key not in found):
            return f"{folder / name} is not what a tokenizer's is"
    file = folder / "chat_template.jinja"
    try:
        text = file.read_text(encoding="utf-8") if file.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        return f"{file} cannot be read: {error}"
    if text is None:
        file = folder / "tokenizer_config.json"
        text = (read_object(folder, file.name) or {}).get("chat_template")
    try:
        _TEMPLATES.parse(_GENERATION.sub("", text) if isinstance(text, str) else "")
    except TemplateSyntaxError as error:
        return f"the chat template of {file}, line {error.lineno}: {error}"
    return ""


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").exists():
        return True
    if (folder / "chat_template.json").exists():
        return True
    return "chat_template" in (read_object(folder, "tokenizer_config.json") or {})


def _downloads() -> Iterator[CheckResult]:
    from huggingface_hub.constants import HF_HUB_CACHE

    parts = [*Path(HF_HUB_CACHE).glob("models--*/blobs/*.incomplete")]
    size = sum(part.stat().st_size for part in parts)
    if parts:
        found = f"{len(parts)} downloads are not complete ({size / _GB:.1f} GB)"
        where = Path(HF_HUB_CACHE)
        mend = f"start that model again, or rm {where}/models--*/blobs/*.incomplete"
        yield CheckResult("models", "warn", found, mend)
    home = Path(HF_HUB_CACHE)
    while not home.exists() and home != home.parent:
        home = home.parent
    free = shutil.disk_usage(home).free
    if free < 5 * _GB:
        found = f"{free / _GB:.1f} GB are free for models in {HF_HUB_CACHE}"
        yield CheckResult(
            "models", "warn", found, "free some, or set HF_HOME elsewhere"
        )
