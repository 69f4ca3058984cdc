"""Settings of other servers that are not read here, with the reason for each."""

_ALL_LAYERS = "MLX computes all layers of a model on its device, which is told at start"
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
    "CONTEXT_OVERFLOW": (
        "a prompt beyond the context is refused, as with `error`: a window that "
        "forgets is not built"
    ),
}

# Not built yet.
NOT_BUILT = frozenset(
    (
        "HUB_OFFLINE",
        "PREVENT_SLEEP",
        "ENABLE_SNAPSHOT_STITCH",
        "ENABLE_SNAPSHOT_STITCH_VLM",
        "NUM_DRAFT_TOKENS",
        "WARMUP_PROMPT",
        "NATIVE_ROUTES",
        "RESPONSES_STORE_MAX",
    )
)


def reason_of(name: str) -> str | None:
    """Why a known name has no effect; None: it is not among these."""
    short = name.removeprefix("MLX_SERVER_").replace("EXO_KV_", "KV_")
    if short in REASONS:
        return REASONS[short]
    return "not built yet" if short in NOT_BUILT else None
