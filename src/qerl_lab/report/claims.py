"""The claims of the QeRL paper (arXiv 2510.11696 v1) as data, written down before the runs that test them. Pure.

An arm is named by the settings that its runs must have; all others are those that a contrast holds equal.
`docs/verdicts.md` is written from `CLAIMS`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

Settings = Mapping[str, str]

OFF: Settings = {"aqn.schedule": "off"}
AQN: Settings = {"aqn.schedule": "exponential", "aqn.unit": "sigma", "aqn.relative": "False"}
FORMAT_KEYS = ("format.name", "format.double_quant", "format.scale_rule", "format.exponent_rule", "format.dense_cache")
AQN_KEYS = ("aqn",)  # a group stands for all of its keys
LEARNING_RATE = "optim.learning_rate"
THREE: Settings = {"model": "Qwen2.5-3B-Instruct"}
SEVEN: Settings = {"model": "Qwen2.5-7B-Instruct"}


@dataclass(frozen=True)
class Contrast:
    """Two arms of a comparison, by name and by settings, and what the paper printed of them.

    `printed` are rows of results/reference/paper.csv as columns for `reference.value`, for either arm.
    """

    treated: str
    control: str
    treated_settings: Settings
    control_settings: Settings
    printed: tuple[tuple[Settings, Settings], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.treated} against {self.control}"


@dataclass(frozen=True)
class Guardrail:
    """What a supported claim may not be paid with: `measure` of the treated arm lower by more than `margin`."""

    measure: str
    margin: float


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper, and the test of it.

    Attributes:
        measure: the primary one, a name of `measures.MEASURES`.
        direction: 1 if the claim is that it rises, -1 that it falls, 0 that it stays within `smallest`.
        smallest: the smallest effect that would matter, in the measure's unit; of a ratio the factor, above 1.
        reason: why that one.
        free: keys and groups of keys that may differ between the arms of a contrast.
        family: claims whose contrasts are corrected together for being several (Holm).
        sweep: the grid that makes the arms, and words after it.
        best_of: a key at whose best value each arm is taken; empty if it is held equal too.
    """

    name: str
    says: str
    where: str
    family: str
    measure: str
    direction: int
    smallest: float
    reason: str
    contrasts: tuple[Contrast, ...]
    free: tuple[str, ...]
    sweep: str
    guardrail: Guardrail | None = None
    best_of: str = ""


def of_format(name: str) -> Settings:
    return {"format.name": name, **OFF}


def _entropy_at_0(name: str) -> Settings:
    return {"table": "Figure 5", **SEVEN, "weight_format": name, "metric": "mean policy entropy (nats/token)",
            "setting": "mean over steps 0-8"}  # fmt: skip


PRINTED_AS = {"bf16": "BF16/Float16", "nf4": "NF4", "mxfp4": "MXFP4", "nvfp4": "NVFP4"}


def _entropies(treated: str, control: str) -> Contrast:
    of_paper = (_entropy_at_0(PRINTED_AS[treated]), _entropy_at_0(PRINTED_AS[control]))
    return Contrast(treated, control, of_format(treated), of_format(control), (of_paper,))


def _table_1(size: str, method: str, weight_format: str) -> Settings:
    return {"table": "Table 1", "model": f"Qwen2.5-{size}-Instruct", "method": method, "weight_format": weight_format,
            "metric": "accuracy"}  # fmt: skip


def _speeds(method: str, weight_format: str) -> Settings:
    return {
        "table": "Figure 1",
        **SEVEN,
        "method": method,
        "weight_format": weight_format,
        "metric": "rollout throughput",
    }


def _whole_speeds(method: str, weight_format: str) -> Settings:
    metric = "end-to-end speed rel. to BF16 LoRA"
    return {"table": "Figure 1", **SEVEN, "method": method, "weight_format": weight_format, "metric": metric}


AGAINST_BF16 = (
    Contrast("nvfp4", "bf16", of_format("nvfp4"), of_format("bf16")),
    Contrast("mxfp4", "bf16", of_format("mxfp4"), of_format("bf16")),
    Contrast("nvfp4_aqn", "bf16", {"format.name": "nvfp4", **AQN}, of_format("bf16")),
)
OF_AQN = tuple(
    Contrast(
        f"{name}_aqn", name, {"format.name": name, **AQN}, of_format(name),
        tuple((_table_1(size, "QeRL +AQN", "NVFP4"), _table_1(size, "QeRL w/o AQN", "NVFP4")) for size in ("3B", "7B"))
        if name == "nvfp4" else (),
    )
    for name in ("nvfp4", "mxfp4", "nf4", "bf16")
)  # fmt: skip
OF_SCHEDULES = tuple(
    Contrast(
        "exponential", other,
        {"format.name": "nvfp4", **AQN}, {"format.name": "nvfp4", **AQN, "aqn.schedule": other},
        (({"table": "Figure 9", **THREE, "method": "QeRL +AQN exponential decay", "setting": "last tenth"},
          {"table": "Figure 9", **THREE, "method": f"QeRL +AQN {other} decay", "setting": "last tenth"}),),
    )
    for other in ("linear", "cosine", "logarithmic")
)  # fmt: skip
OF_RANKS = tuple(
    Contrast(
        f"rank {rank}", "rank 32", {"lora.rank": rank}, {"lora.rank": "32"},
        (({"table": "Figure 10", **THREE, "method": f"QeRL LoRA rank {rank}", "setting": "last tenth"},
          {"table": "Figure 10", **THREE, "method": "QeRL LoRA rank 32", "setting": "last tenth"}),),
    )
    for rank in ("16", "64", "128")
)  # fmt: skip
FINAL = Contrast(
    "nvfp4_aqn", "bf16", {"format.name": "nvfp4", **AQN}, of_format("bf16"),
    tuple((_table_1(size, "QeRL +AQN", "NVFP4"), _table_1(size, "LoRA", "BF16")) for size in ("3B", "7B")),
)  # fmt: skip
OF_SPEED = (("bf16", "LoRA", "BF16"), ("nf4", "QLoRA", "NF4"))
ON_GPU: Settings = {"device": "cuda"}  # a CPU has no product of 4 bits, and the paper does not speak of one
AT_BEST = "learning_rate experiment=bf16,mxfp4,nvfp4,nvfp4_aqn"
ACCURACY_HOLDS = Guardrail("accuracy_after", 0.02)
GROWTH = "reward grows faster with 4-bit weights than with 16-bit ones"

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "initial_entropy", "quantization raises the policy's entropy before training changes it", "section 3, Figure 5",
        "entropy", "entropy_first", 1, 0.02,
        "Figure 5 has +0.02 for NF4, the smallest of its three, over its first eight steps",
        tuple(_entropies(name, "bf16") for name in ("nvfp4", "mxfp4", "nf4")), FORMAT_KEYS, "weight_formats",
        Guardrail("accuracy_before", 0.05),
    ),
    Claim(
        "entropy_order", "the formats' initial entropies stand in the order MXFP4, NVFP4, NF4, BF16", "Figure 5",
        "entropy", "entropy_first", 1, 0.01, "half of the gaps of Figure 5, which are 0.01 to 0.03",
        (_entropies("mxfp4", "nvfp4"), _entropies("nvfp4", "nf4"), _entropies("nf4", "bf16")), FORMAT_KEYS,
        "weight_formats",
    ),
    Claim(
        "growth_area", f"{GROWTH}: more right answers on average over the run, at one learning rate", "Figure 4",
        "growth", "answers_mean", 1, 0.02, "the paper calls a difference of 0.017 marginal (Figures 16 and 17 at 5e-6)",
        AGAINST_BF16, (*FORMAT_KEYS, *AQN_KEYS), "weight_formats", ACCURACY_HOLDS,
    ),
    Claim(
        "growth_steps", f"{GROWTH}: fewer steps to half of the rise, at one learning rate", "Figure 4",
        "growth", "steps_to_half", -1, 1.1, "a run that is a tenth shorter is the least worth a change of formats",
        AGAINST_BF16, (*FORMAT_KEYS, *AQN_KEYS), "weight_formats", ACCURACY_HOLDS,
    ),
    Claim(
        "growth_area_best", f"{GROWTH}: the same average, each at its own best learning rate", "Figures 4, 16, 17",
        "growth", "answers_mean", 1, 0.02, "as growth_area", AGAINST_BF16, (*FORMAT_KEYS, *AQN_KEYS), AT_BEST,
        ACCURACY_HOLDS, LEARNING_RATE,
    ),
    Claim(
        "growth_steps_best", f"{GROWTH}: the same steps, each at its own best learning rate", "Figures 4, 16, 17",
        "growth", "steps_to_half", -1, 1.1, "as growth_steps", AGAINST_BF16, (*FORMAT_KEYS, *AQN_KEYS),
        AT_BEST, ACCURACY_HOLDS, LEARNING_RATE,
    ),
    Claim(
        "aqn_accuracy", "adaptive quantization noise raises accuracy", "Table 1, Figure 8",
        "aqn", "accuracy_after", 1, 0.01, "Table 1 has +0.004 (3B) and +0.023 (7B): a point lies between",
        OF_AQN, AQN_KEYS, "weight_formats", Guardrail("pass_after", 0.02),
    ),
    Claim(
        "schedule_order", "exponential decay of the noise is better than the other schedules", "Figure 9",
        "schedules", "answers_last", 1, 0.01, "Figure 9 has +0.004 to +0.028 over its last tenth: a point lies between",
        OF_SCHEDULES, AQN_KEYS, "aqn_schedules",
    ),
    Claim(
        "rank_insensitivity", "the LoRA rank makes no difference", "Figure 10",
        "ranks", "answers_last", 0, 0.03, "Figure 10's last tenth has ranks 0.03 apart, which the paper calls similar",
        OF_RANKS, ("lora.rank", "lora.alpha"), "lora_rank",
    ),
    *(
        Claim(
            f"{name}_throughput", f"NVFP4 {what} faster", "Tables 3 and 5 to 9, Figure 1",
            "throughput", f"{name}_throughput", 1, 1.1, "below a tenth nobody changes formats for it",
            tuple(
                Contrast(
                    "nvfp4 on a GPU", f"{other} on a GPU", {**of_format("nvfp4"), **ON_GPU},
                    {**of_format(other), **ON_GPU}, ((row("QeRL", "NVFP4"), row(method, printed)),),
                )
                for other, method, printed in OF_SPEED
            ),
            FORMAT_KEYS, "weight_formats scale=smollm2", ACCURACY_HOLDS,
        )
        for name, what, row in (("rollout", "samples", _speeds), ("step", "trains, end to end,", _whole_speeds))
    ),
    Claim(
        "final_accuracy", "NVFP4 with noise ends more accurate than a 16-bit base without", "Tables 1 and 2",
        "final", "accuracy_after", 1, 0.01, "a point; Table 1 has +0.076 (3B) and +0.027 (7B)",
        (FINAL,), (*FORMAT_KEYS, *AQN_KEYS), "weight_formats", Guardrail("pass_after", 0.02),
    ),
    Claim(
        "final_pass", "and solves more questions in several samples", "sections 1 and 3: it explores",
        "final", "pass_after", 1, 0.01, "a point; the paper prints no pass@k",
        (Contrast("nvfp4_aqn", "bf16", FINAL.treated_settings, FINAL.control_settings),),
        (*FORMAT_KEYS, *AQN_KEYS), "weight_formats", ACCURACY_HOLDS,
    ),
)  # fmt: skip


def command(claim: Claim) -> str:
    """The line that makes the claim's arms, and leaves alone what is there."""
    return f"python -m qerl_lab +sweeps={claim.sweep}"
