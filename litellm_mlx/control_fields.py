"""
LiteLLM's own arguments in a body, and which of them are for clients.

LiteLLM hands a body on as arguments of its functions, so a client could set any of
them: who answers, what a token costs, whether the answer is checked by a JSON schema
that never ends, on the thread that serves everybody. Only those that are listed here
are let through; whatever a later LiteLLM adds to its list is refused as well.
"""

from litellm.types.utils import all_litellm_params

# What its pages offer to clients, and what an administrator may allow (LiteLLM refuses
# those itself where none has).
_FOR_CLIENTS = frozenset({
    "metadata", "litellm_metadata", "tags", "guardrails", "id",
    "litellm_session_id", "litellm_trace_id", "litellm_call_id",
    "request_timeout", "stream_timeout", "num_retries", "max_retries", "fallbacks",
    "headers", "api_key", "api_base", "base_url", "api_version", "region_name",
    "cache", "caching", "no-log", "turn_off_message_logging",
    "prompt_id", "prompt_variables", "prompt_version", "prompt_label",
    "prompt_environment", "allowed_openai_params", "enable_prompt_caching",
})  # fmt: skip
# By these a request for the local model would go to a cloud, on the user's keys, or
# would have LiteLLM shut the model out for everybody, as long as it says. Three are
# arguments of its own functions: given twice they are a fault of its own. One holds
# headers, ours that say who asks among them.
NEVER = frozenset({
    "custom_llm_provider", "deployment_id", "cooldown_time", "allowed_fails",
    "allowed_fails_policy", "router_settings_override", "mock_response",
    "mock_timeout", "mock_testing_rate_limit_error", "azure",
    "self", "original_function", "start_time", "provider_specific_header",
})  # fmt: skip
# Further names that LiteLLM's functions take from their arguments: what they build,
# copy or log for each costs milliseconds in which it serves nobody.
_READ_ELSEWHERE = frozenset({
    "additional_args", "additional_drop_params", "additional_headers", "apikey",
    "api-version", "attempt_function", "bucket_name", "cache_control_injection_points",
    "cache_hit", "call_type", "callbacks", "completion", "deployment", "end_user_id",
    "endpoint", "engine",
    "exception", "failure_callback", "fastest_response_batch_completion",
    "guardrail_config", "guardrail_to_apply", "hidden_params", "keys", "kwargs",
    "model_group", "model_group_retry_policy", "model_group_size", "optional_params",
    "organization", "original_generic_function", "original_model_group",
    "parent_otel_span", "passthrough", "passthrough_on_no_deployment", "policies",
    "previous_models", "proxy_config", "raw_request", "redirect_url", "request_data",
    "response_headers", "rules_obj", "selected_guardrail", "service_callback",
    "socket_factory",
    "specific_deployment", "spend", "spend_logs_metadata", "success_callback",
    "tag_routing", "target_model_names", "text_format", "traceback_exception",
    "use_clientside_credentials", "user_config", "zero_cost_diagnostic",
})  # fmt: skip
_PREFIXES = (
    "_", "aws_", "azure_", "basic_auth_", "batch_", "fallback_", "gigachat_",
    "litellm_", "milvus_", "mock_", "routing_", "sensitive_data_", "standard_",
    "timing_", "user_api_key", "vertex_", "watsonx_", "wx_",
)  # fmt: skip
# Not to be set in a body that asks a model; elsewhere some are fields of LiteLLM's own
# routes (a key's budget, a model's price).
NOT_FOR_CLIENTS = NEVER | {
    "litellm_params",
    *_READ_ELSEWHERE,
    *(name for name in all_litellm_params if name not in _FOR_CLIENTS),
}
# Each costs LiteLLM time that grows with their number's square.
MAX_TAGS, _MAX_TAG_LEN = 64, 256


def is_not_for_clients(name: str) -> bool:
    """Whether a body that asks a model must not hold a field of this name."""
    if name in _FOR_CLIENTS:
        return False
    return name in NOT_FOR_CLIENTS or name.startswith(_PREFIXES)


def are_tags(value: object) -> bool:
    """Whether a value is a list of few short texts."""
    return (
        isinstance(value, list)
        and len(value) <= MAX_TAGS
        and all(isinstance(tag, str) and len(tag) <= _MAX_TAG_LEN for tag in value)
    )


# Behind its client's back LiteLLM goes on trying, as often as it was told.
MAX_RETRIES = 10
RETRIES_HEADER = "x-litellm-num-retries"


def is_number_of_retries(value: object) -> bool:
    """Whether LiteLLM may try so often again."""
    return type(value) is int and 0 <= value <= MAX_RETRIES


def retries_fault(header: str | None) -> str | None:
    """What is wrong with a header that says how often LiteLLM shall try again."""
    text = "" if header is None else header.strip()
    if header is None or (
        text.isascii() and text.isdecimal() and int(text[:4]) <= MAX_RETRIES
    ):
        return None
    return f"{RETRIES_HEADER} must be a whole number from 0 to {MAX_RETRIES}"
