"""
The names of all fields that a wire format reads: a new field is added here too.

A field that nobody reads is named to its client. docs/fields.md is the same as a table,
row by row, and a test sends each row of it to a server.
"""

from typing import Any

# What a field says where it asks for nothing, or for what is done anyway.
NOTHING: tuple[Any, ...] = (None, False, "", [], {})
DONE_ANYWAY: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "include": (
        [],
        ["reasoning.encrypted_content"],
        ["message.output_text.logprobs"],
        ["reasoning.encrypted_content", "message.output_text.logprobs"],
        ["message.output_text.logprobs", "reasoning.encrypted_content"],
    ),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default", "standard_only"),
    "speed": ("standard",),
    "text.verbosity": ("medium",),
    "tools[].custom.format": ({"type": "text"},),
    "truncation": ("auto", "disabled"),
    "verbosity": ("medium",),
}


def _below(*places: str, names: str) -> frozenset[str]:
    return frozenset(f"{place}.{name}" for place in places for name in names.split())


_SESSION = (
    "session_id conversation_id thread_id chat_id conversation session "
    "parent_session_id parent_id source_session_id origin_session_id "
    "branch_id branch subsession_id subagent_id"
)
_CLIENT = frozenset(("model", "metadata", "x_mlx", "extra_body", *_SESSION.split()))
_CLIENT |= _below("extra_body", names=_SESSION)
_LENGTH = frozenset(("max_tokens", "max_completion_tokens"))
_SAMPLING = frozenset(
    (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "repetition_context_size",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "seed",
    )
)
_THINKING_NAMES = "enable_thinking thinking reasoning_effort reasoning"
_THINKING = frozenset(_THINKING_NAMES.split())
_THINKING |= {"chat_template_kwargs", "mlx_max_ttft_s"}
_THINKING |= {"thinking.budget_tokens", "reasoning.max_tokens", "thinking_budget"}
_THINKING |= {"extra_body.thinking_budget"}
_THINKING |= _below("extra_body", names=f"{_THINKING_NAMES} chat_template_kwargs")
_THINKING |= _below("extra_body.chat_template_kwargs", names="enable_thinking")
_THINKING |= _below(
    "thinking",
    "reasoning",
    "reasoning_effort",
    "extra_body.thinking",
    "extra_body.reasoning",
    "extra_body.reasoning_effort",
    names="enabled effort level type",
)
_SHARED = _CLIENT | _LENGTH | _SAMPLING | {"stream", "adapter", "context_len"}
# A hint where the KV of a prompt may be kept: it is, with and without.
_KEPT_ANYWAY = frozenset(("prompt_cache_key", "cache_control"))

COMPLETION_FIELDS = (
    _SHARED
    | {"prompt", "stop", "n", "echo", "logprobs", "stream_options", "include_metrics"}
    | _below("stream_options", names="include_usage")
)

CHAT_FIELDS = (
    _SHARED
    | _THINKING
    | _KEPT_ANYWAY
    | {"messages", "tools", "functions", "tool_choice", "function_call"}
    | {"stop", "n", "logprobs", "top_logprobs", "stream_options", "include_metrics"}
    | {
        "parallel_tool_calls",
        "continue_final_message",
        "add_generation_prompt",
        "response_format",
        "guided_json",
        "guided_choice",
        "guided_regex",
        "guided_grammar",
    }
    | {"structured_outputs", "prediction"}
    | _below("prediction", names="type content")
    | _below("prediction.content[]", names="type text")
    | _below("structured_outputs", names="json choice regex grammar")
    | _below("stream_options", names="include_usage")
    | _below(
        "messages[]",
        names="role content refusal reasoning_content reasoning thinking_blocks "
        "tool_calls function_call tool_call_id cache_control prefix",
    )
    | _below(
        "messages[].content[]",
        names="type text refusal thinking signature data image_url detail "
        "cache_control",
    )
    | _below("messages[].tool_calls[]", names="id type index function custom")
    | _below("tools[]", names="type function custom cache_control")
    | _below(
        "tools[].function", names="name description parameters strict cache_control"
    )
    | _below("tools[].custom", names="name description")
    | _below("functions[]", names="name description parameters")
)

MESSAGES_FIELDS = (
    _SHARED
    | _THINKING
    | _KEPT_ANYWAY
    | {"messages", "system", "tools", "tool_choice", "stop_sequences", "stop"}
    | {"output_config", "output_format"}
    | _below("thinking", names="display")
    | _below("output_config", names="effort format")
    | _below(
        "chat_template_kwargs",
        names="enable_thinking preserve_thinking reasoning_effort",
    )
    | _below("system[]", names="type text cache_control")
    | _below("messages[]", names="role content cache_control")
    | _below(
        "messages[].content[]",
        names="type text id name input tool_use_id content is_error thinking "
        "signature data source title url cache_control",
    )
    | _below(
        "tools[]",
        names="type name description input_schema strict cache_control "
        "eager_input_streaming display_width_px display_height_px enable_zoom",
    )
    | _below("tool_choice", names="type name disable_parallel_tool_use")
)

RESPONSES_FIELDS = (
    _SHARED - {"max_tokens", "conversation"}
    | _THINKING
    | _KEPT_ANYWAY
    | {"input", "instructions", "tools", "tool_choice", "max_output_tokens", "stop"}
    | {"previous_response_id", "store", "background", "client_metadata"}
    | {"top_logprobs", "text", "parallel_tool_calls"}
    | _below("text", names="format")
    | _below("reasoning", names="summary generate_summary")
    | _below("chat_template_kwargs", names="enable_thinking")
    | _below(
        "tools[]", names="type name description parameters strict tools environment"
    )
    | _below("tools[].tools[]", names="type name description parameters strict")
)
