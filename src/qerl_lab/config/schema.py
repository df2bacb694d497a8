"""The typed schema of a run: every key with its default, unit, bounds and meaning.

Options under `conf/` state only what differs from here. Imports no torch, so that composing, checking and listing
configurations is instant. A wrong value raises `ConfigError`, which says what was given, what is allowed and what to
type.
"""

from dataclasses import dataclass, field, replace

from qerl_lab.config.option import ConfigError, option
from qerl_lab.config.task import TaskConfig

POCKET = "pocket"  # the embedded policy, and the scale for it
DTYPES = ("auto", "float32", "bfloat16")
ATTENTIONS = ("sdpa", "eager", "flash_attention_2")
DENSE_FORMAT = "bf16"  # the unquantized weight format
READINGS = ("released", "equation", "algorithm")
EXPONENT_RULES = ("round", "floor", "ceil")
SCALE_RULES = ("max", "four_over_six")
AUTO_OR_FP8 = ("auto", "fp8")
ENGINES = ("transformers", "vllm", "vllm_server")
SCHEDULES = ("off", "exponential", "linear", "cosine", "logarithmic", "adaptive")
CORRECTIONS = ("off", "in_ratio", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
LAUNCHERS = ("local", "slurm", "ray")
ALGORITHMS = ("grpo", "dapo", "dr_grpo", "gspo", "cispo")
KL_ESTIMATORS = ("k3_ratio", "k3")
DEVICES = ("auto", "cpu", "cuda")
MAX_TEMPERATURE = 2.0  # of vLLM's SamplingParams


@dataclass
class ModelConfig:
    name: str = option(POCKET, "label of the policy in tables and run names")
    path: str = option(
        POCKET, "hub id, directory (dense, or packed in the run's format), FILE.gguf, or `pocket` (embedded)"
    )
    revision: str | None = option(
        None, "branch, tag or commit on the hub; null is the newest, which may change: only a commit pins it"
    )
    hash: str | None = option(
        None,
        "hash of the content of model.path, 12 hex digits, set by the command; null for pocket and a hub id",
    )
    dtype: str = option("auto", "compute dtype; auto is bfloat16 on a GPU, float32 on a CPU", choices=DTYPES)
    attention: str = option(
        "sdpa",
        "attention of transformers; flash_attention_2 needs a GPU and its package; a model that caps its attention "
        "logits (Gemma 2) gets eager for sdpa",
        choices=ATTENTIONS,
    )
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass: less memory, more time")


@dataclass
class FormatConfig:
    name: str = option("nvfp4", "weight format of the frozen base; format=NAME sets it")
    ignore: list[str] = option(
        ["lm_head"], "Linear layers left dense: full name, its last parts, a module that holds them, or re:PATTERN"
    )
    dense_cache: str = option(
        "auto",
        "keep dequantized weights too, for speed; auto: on a CPU only",
        choices=("auto", "off"),
    )
    double_quant: bool = option(True, "NF4 only: quantize the block scales too, as QLoRA does", only="nf4")
    scale_rule: str = option(
        "max", "NVFP4 only: max maps a block's maximum to 6, four_over_six to 6 or 4, whichever errs less "
        "(arXiv 2512.02010)",
        choices=SCALE_RULES,
        only="nvfp4",
    )  # fmt: skip
    exponent_rule: str = option(
        "round", "MXFP4 only, exponent of a scale: round as compressed-tensors, floor as OCP MX, ceil without clipping",
        choices=EXPONENT_RULES,
        only="mxfp4",
    )  # fmt: skip
    activations: str = option(
        "auto", "FP8 only: fp8 makes vLLM quantize activations too, by token (W8A8); auto keeps their dtype (W8A16)",
        choices=AUTO_OR_FP8, only="fp8",
    )  # fmt: skip


@dataclass
class LoraConfig:
    rank: int = option(
        32,
        "rank of the adapters (paper, Sec. 4.1: 32); 0: no adapter, all weights are trained",
        at_least=0,
        at_most=4096,
    )
    alpha: float | None = option(
        None, "scaling is alpha / rank; null: alpha = rank (the paper states none)", at_least=1e-3, at_most=1e6
    )
    dropout: float = option(0.0, "dropout on the input of the adapters", at_least=0, at_most=0.99)
    target_modules: list[str] = option(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "Linear layers that get an adapter (paper, Eq. 2)",
    )
    start_from: str | None = option(
        None, "initial adapter: directory of a finished run, or of a PEFT adapter; null: new ones"
    )
    start_hash: str | None = option(None, "SHA-256 of lora.start_from, 12 hex digits, set by the command")


@dataclass
class AqnSolverConfig:
    prompts: int = option(
        64,
        "completions on which sigma is solved, one for each of the next questions, sampled without noise",
        at_least=1,
        at_most=4096,
    )
    draws: int = option(
        8,
        "draws of the noise, of steps spread over the stage; each is measured on a share of the completions",
        at_least=1,
        at_most=64,
    )
    tolerance: float = option(0.05, "relative gap of KL and target at which the search ends", at_least=1e-3, at_most=1)
    probes: int = option(12, "most sigmas tried in a stage", at_least=2, at_most=100)


@dataclass
class AqnAdaptiveConfig:
    factor: float = option(
        1.01, "multiplies or divides sigma after a step (arXiv 1706.01905, App. C, and arXiv 2602.02555's code)",
        above=1, at_most=10,
    )  # fmt: skip
    band: float = option(
        1.1, "sigma stays while the KL is between target / band and target x band (arXiv 2602.02555's code; "
        "arXiv 1706.01905: 1)",
        at_least=1, at_most=100,
    )  # fmt: skip


@dataclass
class AqnConfig:
    schedule: str = option(
        "off", "how noise falls over the stages; adaptive holds a KL instead; off adds no noise", choices=SCHEDULES
    )
    unit: str = option(
        "sigma", "what the schedule sets: sigma, or KL(noisy || clean), from which sigma is solved",
        choices=("sigma", "kl"),
    )  # fmt: skip
    sigma_start: float = option(
        1e-2, "noise standard deviation in the first noisy stage (Table 4); with unit=kl the start of the search",
        at_least=0, at_most=10,
    )  # fmt: skip
    sigma_end: float = option(5e-4, "noise standard deviation in the last stage (Table 4)", at_least=0, at_most=10)
    relative: bool = option(False, "sigma is in units of each norm's root mean square, instead of equal for all norms")
    kl_start: float = option(
        3e-3, "KL(noisy || clean) in nats per token in the first noisy stage, adaptive: all along "
        "(arXiv 2602.02555's code)",
        at_least=0, at_most=10, unit="nats per token",
    )  # fmt: skip
    kl_end: float = option(
        1e-4, "KL in the last stage (bfloat16's rounding alone is 3e-5 to 9e-4, by model)", at_least=0, at_most=10,
        unit="nats per token",
    )  # fmt: skip
    sigma_min: float = option(1e-6, "smallest sigma for a KL (arXiv 2602.02555's code)", at_least=1e-9, at_most=10)
    sigma_max: float = option(0.5, "largest sigma for a KL (arXiv 2602.02555's code)", at_least=1e-9, at_most=10)
    stages: int = option(10, "number of equal stages K (Sec. 3.3)", at_least=1, at_most=999_999)
    reading: str = option(
        "released",
        "noisy stages: released (the code: 2 to K), equation (Eq. 8: 1 to K), algorithm (2 to K, never sigma_end)",
        choices=READINGS,
    )
    scope: str = option(
        "rollout",
        "where the noise acts: only in the sampler, or in the trainer's forward too",
        choices=("rollout", "rollout_and_train"),
    )
    norms: list[str] = option(
        ["input_layernorm", "post_attention_layernorm"], "RMSNorm layers that get noise, by the last part of their name"
    )
    probe_prompts: int = option(
        4, "completions of a step on which KL(noisy || clean) and the kernels' gap are measured; 0: none", at_least=0
    )
    solver: AqnSolverConfig = field(default_factory=AqnSolverConfig)  # finds sigma for the schedule's target KL
    adaptive: AqnAdaptiveConfig = field(default_factory=AqnAdaptiveConfig)


@dataclass
class AlgorithmConfig:
    name: str = option("grpo", "ratio, clip and averaging of the loss; docs/algorithms.md", choices=ALGORITHMS)
    epsilon_low: float = option(
        0.2, "the probability ratio is clipped below 1 - epsilon_low (Table 4); 1 clips none", above=0, at_most=1
    )
    epsilon_high: float = option(
        0.28, "the probability ratio is clipped above 1 + epsilon_high (Table 4)", above=0, at_most=1e6
    )
    beta: float = option(
        0.0, "weight of the KL to the base, which is the policy with its adapter off (App. E: 0)",
        at_least=0, at_most=1e3,
    )  # fmt: skip
    kl_estimator: str = option(
        "k3_ratio", "k3 as in the GRPO paper; k3_ratio: times the ratio, which has the KL's gradient "
        "(arXiv 2512.02556)",
        choices=KL_ESTIMATORS,
    )  # fmt: skip
    normalize_std: bool = option(True, "divide advantages by the group's standard deviation (Eq. 4)")
    updates_per_rollout: int = option(
        1, "optimizer updates per rollout, each on its own share of the completions (Table 4: 4 on GSM8K)",
        at_least=1, at_most=1024,
    )  # fmt: skip
    num_iterations: int = option(
        1, "passes over one rollout's completions (mu of the GRPO paper)", at_least=1, at_most=1024
    )
    mask_truncated: bool = option(False, "leave completions without an end token out of the loss")
    dynamic_sampling: bool = option(False, "replace groups with equal rewards by new questions (DAPO, Eq. 11)")
    max_resamples: int = option(
        10, "most extra rollouts of a step; then groups with equal rewards fill the batch", at_least=1, at_most=1000
    )
    overlong_buffer_tokens: int | None = option(
        0, "last tokens before rollout.max_completion_tokens over which the reward falls by 1 (DAPO, Eq. 13); 0: "
        "none; null: a fifth of them, as in DAPO", at_least=0, at_most=1_048_576, unit="tokens",
    )  # fmt: skip
    entropy_coef: float = option(
        0.0, "weight of the entropy bonus in the objective; the initial weight if it is adaptive",
        at_least=0, at_most=10,
    )  # fmt: skip
    entropy_target: float | None = option(
        None, "the bonus acts at or below this entropy in nats, with an adaptive weight (arXiv 2505.22312); null: "
        "always, with a fixed one",
        above=0, at_most=100, unit="nats per token",
    )  # fmt: skip
    entropy_coef_step: float = option(
        0.005, "added to the adaptive weight per update at or below the target, subtracted above", above=0, at_most=1
    )
    entropy_coef_max: float = option(1.0, "largest adaptive weight", above=0, at_most=10)


@dataclass
class VllmConfig:
    lora: str = option(
        "dense", "adapter computed by dense products in vLLM's layers, or by vLLM's own LoRARequest",
        choices=("dense", "request"),
    )  # fmt: skip
    kv_cache_gib: float | None = option(
        None, "size of the key-value cache; null: enough for a full batch, at most half of the memory left "
        "beside the weights", above=0, at_most=100_000, unit="GiB",
    )  # fmt: skip
    kv_cache_dtype: str = option(
        "auto", "fp8 halves the key-value cache and changes the numbers; auto is the compute dtype",
        choices=AUTO_OR_FP8,
    )  # fmt: skip
    max_num_batched_tokens: int | None = option(
        None, "most tokens that vLLM computes at once, mainly prompts: fewer need less memory; null: vLLM's "
        "choice, 16,384 on an H200", at_least=1, at_most=10_000_000, unit="tokens",
    )  # fmt: skip
    linear_backend: str = option(
        "auto",
        "kernel of packed products; auto: fp4_tiles where it fits, otherwise marlin for W8A16 and share_base, vllm for "
        "the rest; vllm: vLLM's choice; fp4_tiles: the lab's own, NVFP4 with lora=dense on an H100 or H200, adapter "
        "included",
        choices=("auto", "vllm", "marlin", "humming", "fp4_tiles"),
    )
    dense_rows: int | None = option(
        None, "NVFP4 with lora=dense: from this many completions at once multiply with an unpacked copy of the "
        "weights, in dense_dtype; null: no copy",
        at_least=1, at_most=1_000_000,
    )  # fmt: skip
    dense_dtype: str = option(
        "auto", "dtype of the copy for dense_rows; auto: the compute dtype; fp8: half the memory, and the layers' "
        "inputs are rounded to FP8 too, by token",
        choices=AUTO_OR_FP8,
    )  # fmt: skip
    share_base: bool = option(
        False,
        "NVFP4 with marlin or fp4_tiles: the trainer reads the engine's packed weights and keeps no copy; tried "
        "only in short runs",
    )
    enforce_eager: bool = option(False, "run without torch.compile and CUDA graphs: faster start, slower tokens")
    timeout_minutes: float = option(
        60.0, "a rollout that takes longer counts as failed", above=0, at_most=100_000, unit="min"
    )


@dataclass
class VllmServerConfig:
    url: str = option("http://127.0.0.1:8000", "address of `vllm serve`; a key comes from VLLM_API_KEY")
    adapter_dir: str | None = option(
        None, "folder for the adapter, at the same path for server and trainer; null: this machine's memory"
    )
    patience_seconds: float = option(
        60.0, "how long to retry a lost connection, every half second", at_least=0, at_most=86_400, unit="s"
    )
    tensor_parallel: int = option(
        1, "GPUs over which `serve_line` lets the server split each layer (--tensor-parallel-size)",
        at_least=1, at_most=64,
    )  # fmt: skip
    overlap: bool = option(
        False, "sample the next step while this one trains, from the adapter before this one's updates; not after a "
        "checkpoint or an evaluation, nor where sigma is solved",
    )  # fmt: skip


@dataclass
class RolloutConfig:
    engine: str = option("transformers", "engine that samples completions", choices=ENGINES)
    prompts_per_step: int = option(16, "questions per step", at_least=1, at_most=65_536)
    group_size: int = option(
        8, "completions per question, G (Table 4: 8 on GSM8K, 16 on BigMath)", at_least=2, at_most=4096
    )
    max_prompt_tokens: int = option(
        1024, "longer questions are dropped and counted", at_least=1, at_most=1_048_576, unit="tokens"
    )
    max_completion_tokens: int = option(
        4096, "longest completion (Table 4: 4096 GSM8K, 8192 BigMath)", at_least=1, at_most=1_048_576, unit="tokens"
    )
    temperature: float = option(1.0, "sampling temperature (Table 4)", at_least=0.01, at_most=MAX_TEMPERATURE)
    batch_size: int = option(512, "most completions generated at once, in evaluation too", at_least=1, at_most=65_536)
    importance_correction: str = option(
        "token_truncate", "weight of a token: its probability by trainer / by sampler, truncated or masked (TRL's "
        "formulas); off: 1; in_ratio: 1, and the loss divides by the sampler's probability (docs/algorithms.md)",
        choices=CORRECTIONS,
    )  # fmt: skip
    importance_clip_max: float = option(
        3.0, "bound above which importance_correction truncates or masks (TRL's default; others use about 2)",
        at_least=1, at_most=1e6,
    )  # fmt: skip
    vllm: VllmConfig = field(default_factory=VllmConfig)  # keys of one engine, under its name
    vllm_server: VllmServerConfig = field(default_factory=VllmServerConfig)


@dataclass
class OptimConfig:
    name: str = option(
        "adamw", "optimizer; the paper uses adamw_8bit (bitsandbytes, GPU)", choices=("adamw", "adamw_8bit")
    )
    learning_rate: float = option(1e-5, "peak learning rate (Table 4: 1e-5; its BF16 arm: 5e-6)", at_least=0, at_most=1)
    schedule: str = option("constant", "learning rate after the warm-up", choices=("constant", "linear", "cosine"))
    warmup_ratio: float = option(
        0.0, "share of the updates with linear warm-up; the first update then has rate 0",
        at_least=0, at_most=1,
    )  # fmt: skip
    weight_decay: float = option(0.0, "decoupled weight decay", at_least=0, at_most=1e3)
    beta1: float = option(0.9, "first moment decay of Adam", at_least=0, at_most=0.9999)
    beta2: float = option(0.99, "second moment decay of Adam", at_least=0, at_most=0.99999)
    max_grad_norm: float = option(
        1.0, "gradient clipping norm; a very large one never clips", at_least=1e-6, at_most=1e12
    )
    micro_batch_size: int | None = option(
        8, "completions per forward and backward pass; null: as many as fit into the free memory of the GPU, measured "
        "when the run starts; on a CPU at most 8",
        at_least=1, at_most=65_536,
    )  # fmt: skip
    packing: str = option(
        "auto", "train without padding, with a special attention; auto: on a GPU with model.attention=sdpa, unless "
        "the model's attention has windows, a cap or dropout",
        choices=("auto", "on", "off"),
    )  # fmt: skip

    @property
    def chosen_micro_batch_size(self) -> int:
        """Return micro_batch_size as a number, for code that runs after null was replaced.

        A run replaces null by a number before it trains. Other commands do not; there null raises ConfigError.
        """
        if self.micro_batch_size is None:
            raise ConfigError("optim.micro_batch_size=null works in a run only. Type optim.micro_batch_size=8.")
        return self.micro_batch_size

    @property
    def moment_bytes(self) -> int:
        """Return how many bytes Adam's two moments take for each trained weight."""
        return 2 if self.name == "adamw_8bit" else 8


@dataclass
class TrackingConfig:
    mlflow: bool = option(True, "mirror metrics.jsonl to MLflow")
    wandb: bool = option(False, "mirror the record to Weights & Biases; offline without a login")
    uri: str | None = option(None, "MLflow store; null is MLFLOW_TRACKING_URI, else sqlite:///mlflow.db here")
    experiment: str = option("qerl-lab", "MLflow experiment, or project of Weights & Biases")


@dataclass
class EvalConfig:
    questions: int = option(
        256, "held-out questions before and after training, at least 2; 0: no evaluation", at_least=0
    )
    samples: int = option(4, "sampled completions per question; accuracy is their mean", at_least=1, at_most=4096)
    samples_before: int | None = option(
        None,
        "sampled completions per question before training, where fewer save time; null: eval.samples",
        at_least=1,
        at_most=4096,
    )
    temperature: float = option(0.6, "sampling temperature (Sec. 4.1: 0.6)", at_least=0.01, at_most=MAX_TEMPERATURE)
    top_p: float = option(0.95, "nucleus sampling (Sec. 4.1: 0.95)", above=0, at_most=1)
    every: int = option(
        0, "steps between evaluations during training, from step 0 on; 0: none", at_least=0, unit="steps"
    )
    subset_questions: int = option(64, "held-out questions that eval.every asks, from the first", at_least=1)
    subset_samples: int = option(1, "sampled completions for each question of eval.every", at_least=1, at_most=4096)


@dataclass
class CheckpointConfig:
    every: int = option(
        25, "steps between checkpoints; 0 saves only on interruption and at the end", at_least=0, unit="steps"
    )
    keep: int = option(
        2, "newest checkpoints kept; 0: one until the run is done, then none, so it cannot be extended", at_least=0
    )

    @property
    def kept(self) -> int:
        """Return how many checkpoints to keep during the run: `keep`, but at least one to resume from."""
        return max(1, self.keep)


@dataclass
class RunConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    format: FormatConfig = field(default_factory=FormatConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    aqn: AqnConfig = field(default_factory=AqnConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    experiment: str = option("adhoc", "name of the arm; +experiment=NAME sets it")
    differs_in: list[str] = option([], "keys in which this arm differs from experiment=bf16; a test checks them")
    scale: str = option(POCKET, "name of the scale; scale=NAME sets it")
    seed: int = option(0, "seeds data order, adapters, sampling and noise", at_least=0, at_most=2**32 - 1)
    steps: int = option(
        600,
        "training steps, each a rollout and updates_per_rollout x num_iterations updates",
        at_least=1,
        at_most=999_999,
    )
    extended: list[int] = option([], "steps at which the finished run was extended (resume=RUN_DIR steps=N)")
    device: str = option("auto", "auto takes a GPU if there is one", choices=DEVICES)
    gpus: int = option(
        1, "processes that share each step: one GPU each, or with device=cpu all on the CPU", at_least=1, at_most=64
    )
    cpu_threads: int = option(
        2, "torch threads on a CPU (runs side by side need 1 each); 0: all cores", at_least=0, at_most=1024
    )
    dry_run: bool = option(False, "check every job of the command, print what would run, and stop")
    resume: str | None = option(None, "continue the run or sweep in this directory with its own configuration")
    jobs: int = option(1, "sweep: jobs at once; on a CPU add cpu_threads=1", at_least=1, at_most=1024)
    jobs_per_gpu: int = option(
        1, "jobs that share a GPU, of a sweep or by hand; each takes its part of the memory", at_least=1, at_most=64
    )
    launcher: str = option(
        "local", "sweep: where jobs run: here, or on a cluster that shares this directory", choices=LAUNCHERS
    )
    slurm: str = option("", "sweep with launcher=slurm: flags of sbatch in quotes, such as the time limit")
    preregistration: str | None = option(None, "file of claims to test, committed before the run (docs/verdicts.md)")
    preregistration_sha256: str | None = option(None, "SHA-256 of preregistration, set by the command")
    run_dir: str = option("", "where the run's record goes; empty is runs/<experiment>/seed<seed>/<time>")

    @property
    def trains_all(self) -> bool:
        """Tell whether the run trains all weights of the model (lora=full) instead of an adapter."""
        return self.lora.rank == 0

    @property
    def overlaps(self) -> bool:
        """Tell whether the run samples on a server while it trains (rollout.vllm_server.overlap)."""
        return self.rollout.engine == "vllm_server" and self.rollout.vllm_server.overlap

    @property
    def completions_per_step(self) -> int:
        """Return the number of completions that all GPUs together sample in a step."""
        return self.rollout.prompts_per_step * self.rollout.group_size

    @property
    def completions_per_gpu(self) -> int:
        """Return the number of completions that each process (one per GPU) samples and trains on in a step."""
        return self.completions_per_step // self.gpus

    @property
    def mini_batch_size_per_gpu(self) -> int:
        """Return the number of completions per optimizer update in each process (one per GPU)."""
        return self.completions_per_gpu // self.algorithm.updates_per_rollout

    @property
    def updates_per_step(self) -> int:
        """Return the number of optimizer updates in a step."""
        return self.algorithm.updates_per_rollout * self.algorithm.num_iterations

    def with_micro_batch(self, size: int) -> "RunConfig":
        """Return a copy with optim.micro_batch_size=`size`."""
        return replace(self, optim=replace(self.optim, micro_batch_size=size))

    @property
    def overlong_buffer(self) -> int:
        """Return the length in tokens of DAPO's soft overlong punishment; 0 is none.

        If algorithm.overlong_buffer_tokens is null, it is a fifth of rollout.max_completion_tokens.
        """
        asked = self.algorithm.overlong_buffer_tokens
        return max(1, self.rollout.max_completion_tokens // 5) if asked is None else asked
