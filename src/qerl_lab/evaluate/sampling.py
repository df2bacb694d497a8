"""Decide how an evaluation samples: as the run's own evaluations, and as the options say."""

from dataclasses import dataclass, replace

from qerl_lab.config.schema import RunConfig
from qerl_lab.evaluate.options import SMALL, SMALL_SAMPLES, AccuracyOptions


@dataclass(frozen=True)
class HowSampled:
    """One way of sampling. `samples` is per question; None means that the benchmark decides (`samples_of`)."""

    temperature: float
    top_p: float
    max_completion_tokens: int
    samples: int | None

    @property
    def name(self) -> str:
        """Name of its row in the table."""
        drawn = f"temperature {self.temperature:g}, top-p {self.top_p:g}" if self.temperature else "greedy"
        return f"{drawn}, {self.max_completion_tokens:,} tokens"

    def samples_of(self, benchmark: str, default: int) -> int:
        """Return the number of samples per question of a benchmark; `default` is the run's `eval.samples`."""
        if self.temperature == 0:
            return 1
        return self.samples or (SMALL_SAMPLES if benchmark in SMALL else default)


def samplings(options: AccuracyOptions, cfg: RunConfig) -> list[HowSampled]:
    """Return the run's own sampling, and a second one if the options give another distribution.

    More samples of the same distribution are not another sampling. A model without a run is sampled as the options say.
    """
    own = HowSampled(cfg.eval.temperature, cfg.eval.top_p, cfg.rollout.max_completion_tokens, options.samples)
    keys = ("temperature", "top_p", "max_completion_tokens")
    typed = replace(own, **{key: value for key in keys if (value := getattr(options, key)) is not None})
    return [own, typed] if options.run and typed != own else [typed]
