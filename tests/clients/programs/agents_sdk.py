"""OpenAI Agents (Python): chat completions and responses, run and run_streamed."""

import asyncio
from typing import Any

import toy
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)


async def main() -> list[str]:
    client = AsyncOpenAI(base_url=f"{toy.BASE}/v1", api_key=toy.KEY, max_retries=0)
    kind = OpenAIChatCompletionsModel if toy.WIRE == "chat" else OpenAIResponsesModel
    agent = Agent(
        name="toy",
        instructions=toy.SYSTEM,
        model=kind(model=toy.MODEL, openai_client=client),
        tools=[function_tool(toy.get_weather), function_tool(toy.add)],
    )
    items: list[Any] = []
    answers = []
    previous = None
    for prompt in toy.PROMPTS:
        extra: Any = {}
        if toy.WIRE == "previous_id":
            items, extra = (
                [],
                {"previous_response_id": previous, "auto_previous_response_id": True},
            )
        items.append({"role": "user", "content": prompt})
        if toy.STREAM:
            result: Any = Runner.run_streamed(
                agent, items, max_turns=toy.MAX_STEPS, **extra
            )
            async for _event in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, items, max_turns=toy.MAX_STEPS, **extra)
        items = result.to_input_list()
        previous = result.last_response_id
        answers.append(str(result.final_output))
    return answers


toy.finish(asyncio.run(main()))
