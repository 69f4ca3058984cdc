"""LangGraph's prebuilt agent over langchain-openai and langchain-anthropic."""

from typing import Any

import toy
from langchain.agents import create_agent
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver


def make_model() -> Any:
    if toy.WIRE == "messages":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(
            model_name=toy.MODEL, base_url=toy.BASE, api_key=toy.KEY, max_retries=0,
            max_tokens=4096, thinking={"type": "enabled", "budget_tokens": 2048},
        )  # type: ignore[call-arg]  # fmt: skip
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=toy.MODEL, base_url=f"{toy.BASE}/v1", api_key=toy.KEY, max_retries=0,
        use_responses_api=toy.WIRE == "responses",
        **({"output_version": "responses/v1"} if toy.WIRE == "responses" else {}),
    )  # fmt: skip


agent: Any = create_agent(
    make_model(), [tool(toy.get_weather), tool(toy.add)], system_prompt=toy.SYSTEM,
    checkpointer=InMemorySaver(),
)  # fmt: skip
config = {"configurable": {"thread_id": "one"}, "recursion_limit": 60}
answers = []
for prompt in toy.PROMPTS:
    given = {"messages": [{"role": "user", "content": prompt}]}
    if toy.STREAM:
        for _part in agent.stream(given, config, stream_mode="messages"):
            pass
        state = agent.get_state(config).values
    else:
        state = agent.invoke(given, config)
    answers.append(state["messages"][-1].text)
toy.finish([answer if isinstance(answer, str) else answer() for answer in answers])
