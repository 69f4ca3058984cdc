"""
Looks at KV on the disk, checks it, and takes prompt caches of mlx-lm in and out.

    mlx-sidecar kv list
    mlx-sidecar kv verify
    mlx-sidecar kv export SLOT FILE      a chain as one file for mlx-lm, ids beside it
    mlx-sidecar kv import FILE IDS       the other way; IDS: a JSON list
    mlx-sidecar kv forget [--session NAME] [--key ID | --no-key]

A server that runs keeps its memory: there it is POST /admin/cache/forget.

Settings are read as the server reads them: KV_DISK_PATH, and for `import` MODEL_PATH.
A slot is named FOLDER/NUMBER, as `list` shows it.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sidecar.app import App, build
from sidecar.config.settings import Config, load_config
from sidecar.config.sources import ConfigError
from sidecar.core.conversation import ForgetFilter
from sidecar.core.errors import SidecarError
from sidecar.core.prompt import ModelIds
from sidecar.core.requests import short_id
from sidecar.kv.disk.disk_thread import Urgency, disk_thread
from sidecar.kv.disk.prompt_cache_file import export_chain, read_prompt_cache
from sidecar.kv.disk.root import DiskLimits, DiskRoot, model_of
from sidecar.kv.disk.slot import Slot
from sidecar.kv.disk.slot_folder import SlotFolder
from sidecar.kv.disk.tensor_file import Damaged
from sidecar.residents.resident import require_text


class _Refused(Exception):
    """What was asked cannot be done; the message says why."""


def main(argv: list[str]) -> int:
    """Exit codes: 0 good, 1 damaged or refused, 2 bad usage."""
    options = _parser().parse_args(argv)
    try:
        config = load_config({}, Path(".env"))
        acts: dict[str, Callable[[], int]] = {
            "list": lambda: _list(config.disk.root),
            "verify": lambda: _verify(config.disk.root),
            "export": lambda: _export(config.disk.root, options.slot, options.file),
            "import": lambda: _import(config, options.file, options.ids),
            "forget": lambda: _forget(config.disk.root, options),
        }
        return acts[options.act]()
    except ConfigError as error:
        sys.stderr.write(f"kv: {error}\n")
        return 2
    except (_Refused, Damaged, OSError, SidecarError) as error:
        sys.stderr.write(f"kv: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-sidecar kv",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    acts = parser.add_subparsers(dest="act", required=True)
    for name in ("list", "verify"):
        acts.add_parser(name)
    forget = acts.add_parser("forget")
    forget.add_argument("--session", help="of this one alone, as /admin/cache has it")
    keys = forget.add_mutually_exclusive_group()
    keys.add_argument("--key", help="of this key's id alone, as /admin/cache has it")
    keys.add_argument("--no-key", action="store_true", help="of those without one")
    export = acts.add_parser("export")
    export.add_argument("slot", help="FOLDER/NUMBER")
    export.add_argument("file", type=Path, help="what must not exist")
    taken = acts.add_parser("import")
    taken.add_argument("file", type=Path, help="a prompt cache of mlx-lm's")
    taken.add_argument("ids", type=Path, help="its token ids, a JSON list")
    return parser


def _root(path: Path) -> DiskRoot:
    if not path.is_dir():
        raise _Refused(f"there is no folder {path}: KV_DISK_PATH says where KV is")
    return DiskRoot(path, DiskLimits(0, 0, 0, 0))


def _folders(root: Path) -> list[SlotFolder]:
    return _root(root).folders()


def _list(root: Path) -> int:
    for folder in _folders(root):
        sys.stdout.write(f"{folder.path.name}  {model_of(folder)}\n")
        for number in folder.numbers():
            try:
                sys.stdout.write(f"  {_line(folder.read(number))}\n")
            except Damaged as error:
                sys.stdout.write(f"  {number:6}  damaged: {error}\n")
    return 0


def _line(slot: Slot) -> str:
    parent = f"from {slot.parent[0]}" if slot.parent else "root"
    turns = len(slot.meta["kept"])
    return (
        f"{slot.number:6}  tokens {slot.at}..{slot.end}  {parent}  "
        f"{slot.num_bytes / 1e6:.1f} MB  {turns} turns"
    )


def _verify(root: Path) -> int:
    """Every byte of every slot."""
    num_damaged = num_slots = 0
    for folder in _folders(root):
        for number in folder.numbers():
            num_slots += 1
            try:
                disk_thread().submit(Urgency.RESTORE, _checked(folder, number)).result()
            except (Damaged, OSError) as error:
                num_damaged += 1
                sys.stdout.write(f"{folder.path.name}/{number}: {error}\n")
    sys.stdout.write(f"{num_slots} slots, {num_damaged} damaged\n")
    return int(num_damaged > 0)


def _checked(folder: SlotFolder, number: int) -> Callable[[], None]:
    def check() -> None:
        with folder.locked(shared=True):
            opened = folder.open(folder.read(number))
        for name in tuple(opened.arrays):
            opened.read(name)
        opened.check()

    return check


def _export(root: Path, name: str, file: Path) -> int:
    place, _, number = name.rpartition("/")
    folder = next((f for f in _folders(root) if f.path.name == place), None)
    asked = next((n for n in folder.numbers() if str(n) == number), 0) if folder else 0
    if folder is None or not asked:
        raise _Refused(f"there is no slot {name}; `kv list` shows them")
    if file.exists():
        raise _Refused(f"{file} is there already")
    length = (
        disk_thread()
        .submit(Urgency.RESTORE, lambda: export_chain(folder, asked, file))
        .result()
    )
    sys.stdout.write(f"{file}: {length} tokens; their ids in {file}.ids.json\n")
    return 0


def _import(config: Config, file: Path, ids_file: Path) -> int:
    if not config.disk.is_on:
        raise _Refused("KV_DISK_PERSISTENCE is off")
    try:
        ids = json.loads(ids_file.read_text())
    except ValueError as error:
        raise _Refused(f"{ids_file} is no JSON") from error
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise _Refused(f"{ids_file} must hold a list of token ids")
    if len(ids) < config.disk.min_tokens:
        minimum = f"KV_DISK_MIN_PREFIX_TOKENS is {config.disk.min_tokens}"
        raise _Refused(f"{len(ids)} tokens are too few: {minimum}")
    app = build(replace(config, server=replace(config.server, port=0)))
    try:
        return _take_in(app, file, tuple(ids))
    finally:
        app.close()


def _take_in(app: App, file: Path, ids: tuple[int, ...]) -> int:
    app.pool.start_loading()
    with app.pool.lease("") as leased:
        resident = require_text(leased)
        disk, store = resident.disk, resident.engine.store
        if disk is None or not disk.wait_open(3600.0):
            raise _Refused("KV cannot be kept on the disk here")
        size = resident.engine.model.vocab_size
        if ids and max(ids) >= size:
            raise _Refused(f"the model has no token {max(ids)}, only {size}")

        def insert() -> int:
            return read_prompt_cache(store, file, ids)

        length: Any = app.gpu.call(insert)
        disk.flush()
        if disk.num_written(ModelIds(ids)) < length:
            raise _Refused(f"{length} tokens were read, and not written: see above")
    sys.stdout.write(f"{length} tokens are on the disk\n")
    return 0


def _forget(root: Path, options: argparse.Namespace) -> int:
    keys = None
    if options.session is not None or options.key is not None or options.no_key:
        key = short_id(options.key)
        is_any = key is None and not options.no_key
        keys = ForgetFilter(short_id(options.session), key, any_key=is_any)
    slots, num_bytes = _root(root).forget(forget_filter=keys)
    sys.stdout.write(f"{slots} slots, {num_bytes / 1e6:.1f} MB\n")
    return 0
