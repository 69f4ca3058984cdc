"""
transformers reads its 1,600 model files at each import; here once instead of twice.

What it found is in a cache of its own, under the folder's path. The second time it asks
with the path of a file in that folder, which stands for the folder, and misses.
"""

import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any


def scan_once(environ: MutableMapping[str, str]) -> None:
    """
    Import transformers such that `transformers.models` finds what is there.

    Where its functions are called otherwise, nothing is changed.

    Args:
        environ: the process's; like mlx-lm it asks for no advice about PyTorch there.
    """
    environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    import transformers  # noqa: F401 - which fills the cache
    from transformers.utils import import_utils

    read: Any = getattr(import_utils, "create_import_structure_from_path", None)
    if not hasattr(read, "cache_info"):
        return

    def read_folder(module_path: str | os.PathLike[str]) -> Any:
        path = Path(module_path)
        return read(path.parent if path.is_file() else path)

    import_utils.create_import_structure_from_path = read_folder
