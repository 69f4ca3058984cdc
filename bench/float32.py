"""
The built-in model with its weights as float32: BLAS has no bfloat16.

    python -m bench.float32 FOLDER
"""

import json
import shutil
import sys
from pathlib import Path

_BUILTIN = Path(__file__).parents[1] / "sidecar" / "builtin_model"


def make_float32(folder: Path) -> None:
    """Write the model; the configuration is written last. Imports MLX."""
    import mlx.core as mx

    folder.mkdir(parents=True, exist_ok=True)
    for path in _BUILTIN.iterdir():
        if path.suffix in (".json", ".jinja") and path.name != "config.json":
            shutil.copyfile(path, folder / path.name)
    weights = mx.load(str(_BUILTIN / "model.safetensors"))
    weights = {name: array.astype(mx.float32) for name, array in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config = json.loads((_BUILTIN / "config.json").read_text())
    config["torch_dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    make_float32(Path(sys.argv[1]))
