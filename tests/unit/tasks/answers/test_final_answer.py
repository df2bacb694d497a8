"""The final answer of a completion, and the paper's format. Text within the thinking earns nothing."""

import time

import pytest

from qerl_lab.tasks.answers.completion import final_answer, keeps_format, with_answer_start, without_answer_start

GOOD = "<think>7+5=12.</think><answer>12</answer>"


@pytest.mark.parametrize(("completion", "answer"), [
    (GOOD, "12"),
    ("<answer> 12\n</answer>", "12"),
    ("<answer>1</answer> no, <answer>2</answer>", "2"),
    ("<answer>1</answer><answer>2", "1"),
    ("<answer><answer>3</answer>", "3"),
    ("<answer>5</answer> and </answer>", "5"),
    ("<answer></answer>", None),
    ("<answer>1</answer><answer> </answer>", None),
    ("12", None),
    # `<` may be part of an answer
    ("<answer>a<b</answer>", "a<b"),
    ("<think>18?<answer>18</answer></think><answer>17 < x</answer>", "17 < x"),
    # nothing inside the thinking counts
    ("<think>It is <answer>18</answer>", None),
    ("<think>It is <answer>18</answer></think>", None),
    ("<think>a</think> b <answer>1</answer></think> c", None),
    ("<think>a</think><answer>1</answer><think>or <answer>2</answer>", "1"),
    ("thinking begun in the prompt <answer>2</answer></think><answer>1</answer>", "1"),
])  # fmt: skip
def test_the_final_answer_is_the_last_complete_block_outside_of_the_thinking(completion: str, answer: str | None):
    assert final_answer(completion) == answer


@pytest.mark.parametrize(("completion", "keeps"), [
    (GOOD, True),
    ("\n<think>a\nb</think>\n\n<answer>12</answer>\n", True),
    ("<think>2 < 3 and <b></think><answer>12</answer>", True),
    ("<answer>12</answer>", False),
    ("<think>a<answer>12</answer>", False),
    ("<think>a</think><answer>12", False),
    ("Well. " + GOOD, False),
    (GOOD + " Done.", False),
    (GOOD + GOOD, False),
    ("<think>a</think><think>b</think><answer>12</answer>", False),
    ("<think><think>b</think><answer>12</answer>", False),
    ("<think>a<answer>1</answer></think><answer>12</answer>", False),
    ("<think>a</think> so <answer>12</answer>", False),
    # a blank answer does not count; `<` may be part of an answer
    ("<think>a</think><answer> \n</answer>", False),
    ("<think>a</think><answer>x<y</answer>", True),
    ("<think>a</think><answer>1<answer>2</answer>", False),
    ("<think>a</think><answer>1</think></answer>", False),
    # thinking may mention a tag
    ("<think>I will use <answer> tags.</think><answer>12</answer>", True),
    ("<think>The form is <answer>...</answer>.</think><answer>12</answer>", True),
    ("<think>First the <think> tag, then </answer> ends it.</think><answer>12</answer>", True),
])  # fmt: skip
def test_the_format_is_one_think_block_then_one_answer_block(completion: str, keeps: bool):
    assert keeps_format(completion) is keeps


LENGTH = 200_000
HOSTILE = {
    "open tags": "<think>" * (LENGTH // 7),
    "answers without end": "<answer>" * (LENGTH // 8),
    "ends without answer": "</answer>" * (LENGTH // 9),
    "blanks between": "<think>a</think>" + " " * LENGTH + "<answer>1",
    "answers in the thinking": "<think>" + "<answer>.</answer>" * (LENGTH // 18) + "</think><answer>1</answer>",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_takes_linear_time(text: str):
    """A quadratic search over 200,000 characters takes minutes."""
    started = time.perf_counter()
    final_answer(text), keeps_format(text)
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize(("prompt", "completion", "answer", "keeps"), [
    ("<|assistant|>", GOOD, "12", True),
    ("by <think> </think> and <answer> </answer> tags.<|assistant|>", GOOD, "12", True),
    ("<|Assistant|><think>\n", "7+5=12.</think><answer>12</answer>", "12", True),
    ("<|Assistant|><think>\n", GOOD, "12", False),  # it thinks twice
    ("<|Assistant|><think>\n", "It is <answer>12</answer>", None, False),  # it is still thinking
    ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "<answer>12</answer>", "12", True),
])  # fmt: skip
def test_thinking_that_the_prompt_opens_is_part_of_the_answer(
    prompt: str, completion: str, answer: str | None, keeps: bool
) -> None:
    """Prompts of DeepSeek-R1's distilled models and of Qwen3's thinking models open the thinking."""
    (text,) = with_answer_start(prompt, [completion])
    assert (final_answer(text), keeps_format(text)) == (answer, keeps)
    assert (without_answer_start(prompt, GOOD) == completion) == keeps
