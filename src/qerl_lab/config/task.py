"""The task section of the schema: `task.*`."""

from dataclasses import dataclass, field

from qerl_lab.config.option import option

# The prompt suffix from the paper's App. E. Without it the format reward cannot be earned, as in the released code.
PAPER_INSTRUCTION = (
    "Solve the following math problem step by step. The reasoning process and direct answer are enclosed within "
    "<think> </think> and <answer> </answer> tags, respectively, i.e., <think> reasoning process here </think> "
    "<answer> answer here </answer>."
)


@dataclass
class ArithmeticConfig:
    min_steps: int = option(2, "fewest operations of a problem", at_least=1, at_most=6)
    max_steps: int = option(3, "most operations of a problem", at_least=1, at_most=6)
    max_operand: int = option(9, "largest number in a problem", at_least=2, at_most=1000)


@dataclass
class BigMathConfig:
    levels: str = option("3-5", "difficulties (paper: 3-5, for its 32B model 4-5)", choices=("3-5", "4-5", "all"))


@dataclass
class CodeIoConfig:
    tests_reward: float = option(0.5, "reward, times the share of tests passed", at_least=0, at_most=1e3, unit="reward")
    seconds: int = option(2, "CPU time of a program on one test, in whole seconds", at_least=1, at_most=600, unit="s")
    memory_mib: int = option(256, "address space of a program", at_least=64, at_most=1_048_576, unit="MiB")


@dataclass
class Gsm8kConfig:
    max_steps: int | None = option(None, "most steps of a question (lines of its solution above ####); null: all",
                                   at_least=1, at_most=20)  # fmt: skip


def subset_in_words(name: str, max_steps: int | None) -> str:
    """Format the limit of gsm8k's questions as ` with at most 2 steps`; empty for another task or without limit."""
    return f" with at most {max_steps} steps" if name == "gsm8k" and max_steps else ""


@dataclass
class ColumnsConfig:
    """Names of columns in the files of task.path.

    Null means the name that the task expects. In a name such as `solution.text`, the dot leads to the field `text` of
    the column `solution`, which holds structs.
    """

    question: str | None = option(None, "column of the question")
    answer: str | None = option(None, "column of the reference answer")
    id: str | None = option(None, "column of a unique id; empty (task.columns.id=): the number of the row")
    tests: str | None = option(None, "column of a program's tests, each with input and output")


@dataclass
class TaskConfig:
    name: str = option("arithmetic", "questions and grader; task=NAME sets it")
    path: str | None = option(
        None, "directory with train and test as .jsonl or .parquet, one such file, or hub id; null: the task's own"
    )
    module: str | None = option(
        None, "your own FILE.py: its train, heldout, grade, weights and worked replace the task's (docs/tasks.md)"
    )
    module_hash: str | None = option(None, "SHA-256 of task.module, 12 hex digits, set by the command")
    instruction: str = option(PAPER_INSTRUCTION, "system message sent with every question; empty sends none")
    format_reward: float = option(
        0.2, "reward for the format <think>..</think><answer>..</answer>", at_least=0, at_most=1e3, unit="reward"
    )
    format_reward_for: str = option(
        "any",
        "completions in the format that earn format_reward: any; thought: those with a letter or digit "
        "inside <think>; right: those with the right answer",
        choices=("any", "thought", "right"),
    )
    answer_reward: float = option(1.0, "reward for the right answer", at_least=0, at_most=1e3, unit="reward")
    train_questions: int = option(
        0, "size of the training set; 0 is all (arithmetic: 4096)", at_least=0, at_most=1_000_000
    )
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)  # keys of one task, under its name
    bigmath: BigMathConfig = field(default_factory=BigMathConfig)
    code_io: CodeIoConfig = field(default_factory=CodeIoConfig)
    gsm8k: Gsm8kConfig = field(default_factory=Gsm8kConfig)


ARITHMETIC = TaskConfig().name  # makes its own questions; the embedded policy was made for it
