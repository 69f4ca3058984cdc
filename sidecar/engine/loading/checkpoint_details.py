"""What a loaded model's files say of it, for people."""

from typing import Any

from sidecar.engine.loading.checkpoint_files import read_config, text_config
from sidecar.engine.loading.loaded_model import LoadedModel


def describe(model: LoadedModel) -> dict[str, Any]:
    """Its architecture and sizes; None where its configuration does not say."""
    whole, config = read_config(model.folder) or {}, text_config(model.folder)
    found = config.get("quantization")
    quantization = found if isinstance(found, dict) else {}
    return {
        "model_type": whole.get("model_type", ""),
        "vocab_size": model.vocab_size,
        "layers": config.get("num_hidden_layers"),
        "hidden_size": config.get("hidden_size"),
        "quant_bits": quantization.get("bits"),
        "quant_group": quantization.get("group_size"),
        "num_bytes": model.num_bytes,
    }
