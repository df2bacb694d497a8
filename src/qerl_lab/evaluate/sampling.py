"""How an evaluation samples: as the run sampled in its own evaluations, and as the words of the command say."""

from dataclasses import dataclass, replace

from qerl_lab.config.schema import RunConfig
from qerl_lab.evaluate.options import SMALL, SMALL_SAMPLES, AccuracyOptions


@dataclass(frozen=True)
class HowSampled:
    """`samples` is of each question; None where the benchmark decides, as `samples_of` says."""

    temperature: float
    top_p: float
    max_completion_tokens: int
    samples: int | None

    @property
    def name(self) -> str:
        """What its row is called."""
        drawn = f"temperature {self.temperature:g}, top-p {self.top_p:g}" if self.temperature else "greedy"
        return f"{drawn}, {self.max_completion_tokens:,} tokens"

    def samples_of(self, benchmark: str, default: int) -> int:
        """Samples of each question of a benchmark; `default` is the run's `eval.samples`."""
        if self.temperature == 0:
            return 1
        return self.samples or (SMALL_SAMPLES if benchmark in SMALL else default)


def samplings(options: AccuracyOptions, cfg: RunConfig) -> list[HowSampled]:
    """As the run samples, from its `cfg`; and after it as the options say, where that is another distribution.

    More samples of the same distribution are no other sampling. Of a model, which has no run, the options alone count.
    """
    own = HowSampled(cfg.eval.temperature, cfg.eval.top_p, cfg.rollout.max_completion_tokens, options.samples)
    keys = ("temperature", "top_p", "max_completion_tokens")
    typed = replace(own, **{key: value for key in keys if (value := getattr(options, key)) is not None})
    return [own, typed] if options.run and typed != own else [typed]
