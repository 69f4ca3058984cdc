"""Which requests only append to an earlier one."""

from typing import Any

from bench.threads import thread_places

ASK = {"role": "user", "content": "Read a.txt"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "c1"}]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "heron"}
SYSTEM = {"role": "system", "content": "Work."}


def body(*messages: dict[str, Any], tools: list[Any] | None = None) -> dict[str, Any]:
    return {"messages": [SYSTEM, *messages], "tools": tools}


def test_a_request_with_more_messages_goes_on_with_its_thread() -> None:
    """Thoughts and the form of a content do not matter."""
    parts = {"role": "user", "content": [{"type": "text", "text": "Read a.txt"}]}
    thought = {**CALL, "reasoning_content": "hm"}
    bodies = [body(ASK), body(parts, thought, RESULT), body(ASK, CALL, RESULT, ASK)]
    assert thread_places(bodies) == [1, 2, 3]


def test_a_changed_message_or_other_tools_begin_a_thread() -> None:
    """Nor does the same request again go on with itself."""
    other = {**ASK, "content": "Read b.txt"}
    bodies = [body(ASK), body(other, CALL), body(ASK, CALL, tools=[1]), body(ASK)]
    assert thread_places(bodies) == [1, 1, 1, 1]


def test_a_thread_goes_on_after_a_branch_of_it() -> None:
    """A branch's end is not what the next request continues."""
    branch = body(ASK, CALL, RESULT, {"role": "user", "content": "Suggest"})
    bodies = [body(ASK), body(ASK, CALL, RESULT), branch, body(ASK, CALL, RESULT, ASK)]
    assert thread_places(bodies) == [1, 2, 3, 3]


def test_what_is_there_for_one_request_only_is_left_out() -> None:
    """OpenClaw's last message and Claude Code's billing line."""
    passing = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>> now"
    tail = {"role": "user", "content": passing}
    billed = {"role": "system", "content": "x-anthropic-billing-header: cch=1;\nWork."}
    bodies = [body(ASK, tail), {**body(), "messages": [billed, ASK, CALL, RESULT]}]
    assert thread_places(bodies) == [1, 2]
