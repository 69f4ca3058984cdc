"""The openai SDK: chat, responses (items sent again), and previous_response_id."""

import json
from typing import Any

import openai
import toy

client = openai.OpenAI(base_url=f"{toy.BASE}/v1", api_key=toy.KEY, max_retries=0)
FUNCTIONS = [
    {
        "name": "get_weather",
        "description": toy.WEATHER_TEXT,
        "parameters": toy.WEATHER_SCHEMA,
    },
    {"name": "add", "description": toy.ADD_TEXT, "parameters": toy.ADD_SCHEMA},
]


def chat() -> list[str]:
    tools: Any = [{"type": "function", "function": f} for f in FUNCTIONS]
    messages: list[Any] = [{"role": "system", "content": toy.SYSTEM}]
    answers = []
    for prompt in toy.PROMPTS:
        messages.append({"role": "user", "content": prompt})
        for _ in range(toy.MAX_STEPS):
            same: Any = {"model": toy.MODEL, "messages": messages, "tools": tools}
            if toy.STREAM:
                options: Any = {"include_usage": True}
                with client.chat.completions.stream(
                    **same, stream_options=options
                ) as s:
                    for _event in s:
                        pass
                    done = s.get_final_completion()
                assert done.usage
                assert done.usage.prompt_tokens > 0
            else:
                done = client.chat.completions.create(**same)
            message = done.choices[0].message
            dumped = message.model_dump(exclude_none=True)
            for tool_call in dumped.get("tool_calls", ()):
                tool_call["function"].pop("parsed_arguments", None)
                tool_call.pop("index", None)
            dumped.pop("parsed", None)
            messages.append(dumped)
            for tc in message.tool_calls or ():
                result = toy.call(tc.function.name, json.loads(tc.function.arguments))
                messages.append(
                    {"role": "tool", "tool_call_id": tc.id, "content": result}
                )
            if not message.tool_calls:
                break
        answers.append(message.content or "")
    return answers


def respond(**same: Any) -> Any:
    tools = [{"type": "function", "strict": False, **f} for f in FUNCTIONS]
    same = {"model": toy.MODEL, "instructions": toy.SYSTEM, "tools": tools, **same}
    if not toy.STREAM:
        return client.responses.create(**same)
    with client.responses.stream(**same) as stream:
        for _event in stream:
            pass
        return stream.get_final_response()


def responses(stateful: bool) -> list[str]:
    items: list[Any] = []
    previous = None
    answers = []
    for prompt in toy.PROMPTS:
        items.append({"role": "user", "content": prompt})
        for _ in range(toy.MAX_STEPS):
            if stateful:
                extra = {"previous_response_id": previous} if previous else {}
                done = respond(input=items, **extra)
                previous, items = done.id, []
            else:
                done = respond(input=items, store=False)
                items += [
                    item.model_dump(exclude_none=True, exclude={"parsed_arguments"})
                    for item in done.output
                ]
            calls = [item for item in done.output if item.type == "function_call"]
            for one in calls:
                result = toy.call(one.name, json.loads(one.arguments))
                items.append(
                    {
                        "type": "function_call_output",
                        "call_id": one.call_id,
                        "output": result,
                    }
                )
            if not calls:
                break
        answers.append(done.output_text)
    return answers


toy.finish(chat() if toy.WIRE == "chat" else responses(toy.WIRE == "previous_id"))
