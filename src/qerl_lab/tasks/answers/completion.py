"""Find the answer in a completion, and check the paper's format."""

import re
from collections.abc import Sequence

THINK, END_THINK, ANSWER, END_ANSWER = TAGS = "<think>", "</think>", "<answer>", "</answer>"
_BEGUN = re.compile(r"<think>\s*(?:</think>\s*)?(?:<answer>\s*)?\Z")


def answer_start(prompt: str) -> str:
    """Return the tags at the end of a prompt that already begin the answer, from `<think>` on; "" if there are none.

    Chat templates of reasoning models open the thinking for the model, and some close it at once. Other templates
    do neither.
    """
    found = _BEGUN.search(prompt)
    return found[0] if found else ""


def with_answer_start(prompt: str, completions: Sequence[str]) -> list[str]:
    """Put `answer_start(prompt)` before each completion, so that graders see the tags that the prompt has opened."""
    return [answer_start(prompt) + completion for completion in completions]


def without_answer_start(prompt: str, solution: str) -> str:
    """Remove from a worked solution all text up to the last tag in `answer_start(prompt)`: the prompt has it already.

    Returns the whole solution if the prompt does not begin the answer, or if the solution lacks this tag.
    """
    tags = re.findall(r"</?\w+>", answer_start(prompt))
    return solution.partition(tags[-1])[2] if tags and tags[-1] in solution else solution


def final_answer(completion: str) -> str | None:
    """Return the text of the last complete `<answer>` block outside of the thinking, stripped; None if there is none.

    Thinking ends at the last `</think>`. Unclosed thinking hides everything after it, so no answer inside counts. A
    blank last block is no answer.
    """
    _, closed, tail = completion.rpartition(END_THINK)
    tail = (tail if closed else completion).partition(THINK)[0]
    start = tail.rfind(ANSWER, 0, max(0, tail.rfind(END_ANSWER)))
    if start < 0:
        return None
    start += len(ANSWER)
    return tail[start : tail.index(END_ANSWER, start)].strip() or None


def keeps_format(completion: str) -> bool:
    """Tell whether the whole completion is `<think>..</think><answer>..</answer>` with an answer that is not blank.

    The thinking may mention a tag, also as `<answer>...</answer>`, but may not begin with a second `<think>`, or hold
    an answer block with a letter or digit. The answer may hold `<`, but no tag. The paper's released code is less
    strict: it accepts the tags anywhere in any text.
    """
    text = completion.strip()
    if not (text.startswith(THINK) and text.endswith(END_ANSWER)):
        return False
    thinking, closed, rest = text[len(THINK) : -len(END_ANSWER)].partition(END_THINK)
    if not closed or thinking.lstrip().startswith(THINK):
        return False
    for block in thinking.split(END_ANSWER)[:-1]:
        _, opened, content = block.rpartition(ANSWER)
        if opened and any(map(str.isalnum, content)):
            return False
    rest = rest.lstrip()
    answer = rest.removeprefix(ANSWER)
    return rest != answer and answer.strip() != "" and not any(tag in answer for tag in TAGS)


def has_thought(completion: str) -> bool:
    """Tell whether a letter or digit stands between `<think>` and the first `</think>`."""
    thought, closed, _ = completion.partition(THINK)[2].partition(END_THINK)
    return bool(closed) and any(character.isalnum() for character in thought)
