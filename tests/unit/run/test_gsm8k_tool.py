from __future__ import annotations

from pathlib import Path

import pytest
from verl.tools.tool_registry import initialize_tools_from_config

from partial_rollout.run.tools import gsm8k_tool

CONFIG = Path(gsm8k_tool.__file__).with_name("gsm8k_tool_config.yaml")


@pytest.fixture
def tool() -> gsm8k_tool.Gsm8kTool:
    (found,) = initialize_tools_from_config(str(CONFIG))
    return found


def test_the_yaml_builds_it_under_the_name_that_the_data_uses(tool: gsm8k_tool.Gsm8kTool):
    assert tool.name == gsm8k_tool.TOOL_NAME
    assert tool.get_openai_tool_schema().function.parameters.required == ["answer"]


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [("1002", "right"), ("#### 1002", "right"), ("1,002", "right"), (1002, "right"), ("7", "wrong"), ("", "wrong")],
)
async def test_it_says_whether_an_answer_is_right(tool: gsm8k_tool.Gsm8kTool, answer: object, verdict: str):
    instance, _ = await tool.create(create_kwargs={"ground_truth": "1002"})
    response, step_reward, metrics = await tool.execute(instance, {"answer": answer})
    assert verdict in response.text
    assert step_reward == 0.0
    assert metrics == {"score": float(verdict == "right")}


async def test_calls_do_not_share_state_and_are_forgotten(tool: gsm8k_tool.Gsm8kTool):
    first, _ = await tool.create(create_kwargs={"ground_truth": "1"})
    second, _ = await tool.create(create_kwargs={"ground_truth": "2"})
    assert (await tool.execute(first, {"answer": "1"}))[2] == {"score": 1.0}
    assert (await tool.execute(second, {"answer": "1"}))[2] == {"score": 0.0}
    await tool.release(first)
    await tool.release(first)
    assert (await tool.execute(first, {"answer": "1"}))[2] == {"score": 0.0}
    assert await tool.calc_reward(second) == 0.0


async def test_a_row_without_a_truth_or_a_call_without_an_answer_is_wrong(tool: gsm8k_tool.Gsm8kTool):
    instance, _ = await tool.create(create_kwargs={})
    assert (await tool.execute(instance, {}))[2] == {"score": 0.0}
