"""
Removes a model from the hub's cache.

    mlx-sidecar rm org/name [--yes]

It says what goes and how many bytes, and asks; without a terminal it needs --yes. What
a running sidecar has loaded is refused, and so is anything outside the hub's cache: a
folder of yours is yours to delete.
"""

import argparse
import sys
from typing import TYPE_CHECKING

from sidecar.cli.server import NotAnswering, Server, add_server_flags, server_of
from sidecar.core.format_bytes import format_bytes

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo


def main(argv: list[str]) -> int:
    """Exit codes: 0 removed, 1 refused or not there, 2 bad usage."""
    parser = argparse.ArgumentParser(
        prog="mlx-sidecar rm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="a hub id, org/name")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_server_flags(parser, "ADMIN_TOKEN", "MLX_API_KEY")
    options = parser.parse_args(argv)
    repo = _find(options.model)
    if repo is None:
        return _refuse(f"{options.model} is not in the hub's cache")
    server = server_of(options)
    try:
        if _is_loaded(options.model, server):
            unload = f"mlx-sidecar unload {options.model}"
            return _refuse(f"{options.model} is loaded. Fix: {unload}")
    except NotAnswering as error:
        sys.stdout.write(f"{error}\nWhat runs on another port was not asked: --url\n")
    size = format_bytes(repo.size_on_disk)
    freed = format_bytes(_own_bytes(repo))
    sys.stdout.write(f"{repo.repo_id}: {size} in {repo.repo_path}\n")
    if not options.yes and not _is_wanted():
        return 1
    _remove(repo)
    sys.stdout.write(f"removed; {freed} came back\n")
    return 0


def _find(name: str) -> "CachedRepoInfo | None":
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return None
    wanted = [r for r in repos if r.repo_id == name and r.repo_type == "model"]
    return next(iter(wanted), None)


def _is_loaded(name: str, server: Server) -> bool:
    """
    Whether a sidecar has it.

    Raises:
        NotAnswering: none runs there. ServerError: it does not say.
    """
    models = server.get("/admin/models")["models"]
    return any(
        name in (model["id"], model["id"].removeprefix("openai/"), *model["aliases"])
        and model["state"] in ("loaded", "loading")
        for model in models
    )


def _own_bytes(repo: "CachedRepoInfo") -> int:
    """Of the files that no other folder has as well (`pull --to`)."""
    blobs = {file.blob_path for rev in repo.revisions for file in rev.files}
    stats = [blob.stat() for blob in blobs if blob.exists()]
    return sum(stat.st_size for stat in stats if stat.st_nlink == 1)


def _is_wanted() -> bool:
    if not sys.stdin.isatty():
        sys.stderr.write("mlx-sidecar rm: not removed: --yes says that it is meant\n")
        return False
    return input("Remove it? [y/N] ").strip().lower() in ("y", "yes")


def _remove(repo: "CachedRepoInfo") -> None:
    """All its revisions; what other models' folders hold stays."""
    from huggingface_hub import scan_cache_dir

    revisions = [revision.commit_hash for revision in repo.revisions]
    scan_cache_dir().delete_revisions(*revisions).execute()


def _refuse(text: str) -> int:
    sys.stderr.write(f"mlx-sidecar rm: {text}\n")
    return 1
