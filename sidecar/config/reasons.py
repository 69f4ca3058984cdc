"""Settings of other servers that are not read here, with the reason for each."""

_ALL_LAYERS = "MLX computes all layers of a model on its device, which is told at start"
_CHECKPOINTS = (
    "layers that cannot be cut always have checkpoints, as many as "
    "SNAPSHOT_STORE_MAX_ENTRIES_PER_SESSION says"
)
# Asked for by these very names: looked for in the environment as well.
REASONS = {
    "PROMPT_CACHE_MAX_ENTRIES_PER_SESSION": (
        "a session has no cap of its own; PROMPT_CACHE_MAX_ENTRIES_GLOBAL and "
        "PROMPT_CACHE_MAX_BYTES hold for all together"
    ),
    "PROMPT_CACHE_BLOCK_SIZE": (
        "blocks of the lineage index have 16 ids; reuse is exact to the token whatever "
        "their size"
    ),
    "CACHE_SESSION_PARTITIONING": (
        "sessions never limit reuse of equal prefixes; API keys do, see "
        "CACHE_SHARE_BETWEEN_KEYS"
    ),
    "CACHE_NORM_SAFETY_CHECK": (
        "every prompt is proved to say its text; CACHE_VERIFY=true proves each hit anew"
    ),
    "VLM_CACHE_DEBUG": ("the request log has where prompts part, and both windows"),
    "CACHE_VLM_IMAGE_IDENTITY": (
        "an image is always identified by its content, in the key as in the model's "
        "prompt"
    ),
    "MAX_MEMORY_GB": (
        "it has a unit here: MAX_MODEL_MEMORY=8GB for the weights of all models, "
        "MAX_PROCESS_MEMORY for all that this process holds"
    ),
    "EMBEDDED_MODE": (
        "the sidecar always stands behind LiteLLM; a program of yours can mount it as "
        "sidecar.library.asgi()"
    ),
    "ENABLE_CLOUD_ROUTING": (
        "LiteLLM does that: cloud models and fallbacks stand in litellm_config.yaml"
    ),
    "GPU_LAYERS": _ALL_LAYERS,
    "GPULayers": _ALL_LAYERS,
}

# Names that others may use as well: they are told where a file of ours has them.
FILE_REASONS = {
    "HUB_OFFLINE": (
        "the hub's library reads HF_HUB_OFFLINE=1, and is then asked for nothing"
    ),
    "PREVENT_SLEEP": (
        "the system decides when it sleeps; on a Mac start with: caffeinate -i python3 "
        "install_and_run.py"
    ),
    "ENABLE_SNAPSHOT_STITCH": _CHECKPOINTS,
    "ENABLE_SNAPSHOT_STITCH_VLM": _CHECKPOINTS,
    "NUM_DRAFT_TOKENS": (
        "a draft is as long as pays, by what its calls have cost so far; SPECULATION="
        "off drafts none"
    ),
    "WARMUP_PROMPT": "a model is warmed up by shapes, not by words",
    "NATIVE_ROUTES": (
        "LiteLLM always passes Messages and Responses bodies on as they are, so that "
        "nothing of them is lost"
    ),
    "RESPONSES_STORE_MAX": (
        "256 responses of each key are kept for an hour, 64 MiB in all; reuse never "
        "needs them"
    ),
}


def reason_of(name: str) -> str | None:
    """Why a known name has no effect; None: it is not among these."""
    short = name.removeprefix("MLX_SERVER_").replace("EXO_KV_", "KV_")
    if short in REASONS:
        return REASONS[short]
    return FILE_REASONS.get(short)
