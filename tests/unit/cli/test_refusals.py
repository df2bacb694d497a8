"""A wrong command line ends in one message and exit code 2, before any directory is made."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from qerl_lab.cli import intent, launch, train
from qerl_lab.cli.compose import Job, make_plan
from qerl_lab.cli.jobs import claim_directories
from qerl_lab.cli.overrides import spell_for_hydra
from qerl_lab.config.arm import leaves
from qerl_lab.config.conf_folder import package_data
from qerl_lab.config.keys import NOT_PROPOSED, SET_BY_LAB, TYPES, unknown_key_error
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.preflight import machine
from qerl_lab.tools import serve_line
from refusals import refusal_of
from run_directories import claimed


@pytest.fixture(autouse=True)
def _empty_directory_no_child_and_no_gpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "child_command", lambda run_dir: pytest.fail("a bad command started a run"))
    monkeypatch.setattr(machine, "has_gpu", lambda: False)


def refused(line: str, capsys) -> str:
    return refusal_of(train.main, line.split(), capsys)


SMALL = "# @package _global_\nexperiment: small\nlora:\n  rank: 8\n"


def write_option(file: str, text: str = SMALL) -> None:
    """Write an option of the user's own. `file` is FOLDER/GROUP/OPTION.yaml, below the test's directory."""
    Path(file).parent.mkdir(parents=True)
    Path(file).write_text(text)


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        # groups and options
        ("format=nvfp5", ["format=nvfp5", "allowed: bf16, fp8, mxfp4, nf4, nvfp4", "Did you mean nvfp4?"]),
        ("lora=16", ["lora=16 is not an option", "allowed: full, rank128, rank16", "example lora=rank32."]),
        ("task.name=foo", ["task.name=foo is not allowed", "Type for example task=arithmetic."]),
        ("-m lora=rank16,[rank32]", ["lora=[rank32] is not an option"]),
        ("hydra/launcher=joblip", ["hydra/launcher=joblip", "basic", "lab"]),
        # keys
        ("lora.rnk=3", ["Did you mean lora.rank? Allowed: lora.rank, lora.", "lora.alpha"]),
        ("step=3", ["Did you mean steps? Allowed: steps, ", " sweeps"]),
        ("eval=3", ["eval is a node", "eval.samples"]),
        ("~lora.rank", ["Type lora.rank=VALUE"]),
        ("+format@aqn=nf4", ["format@aqn=nf4 would put an option where no run reads it. Type format=VALUE."]),
        ("model=${oc.env:NO_SUCH_NAME}", ["${oc.env:NO_SUCH_NAME} names no option", "'NO_SUCH_NAME' not found"]),
        ("hydra.foo=1", ["hydra.foo", "'foo' not in 'HydraConf'"]),
        # types
        ("lora.rank=abc", ["lora.rank=abc", "a whole number", "lora.rank=32"]),
        ("rollout.prompts_per_step=2 optim.micro_batch_size=5", ["cannot be split", "optim.micro_batch_size=4."]),
        # several values, as other programs write them
        ("seed=0-2", ["seed=0-2 is not allowed", "Type for example seed=0, or -m seed=0,1,2 for a run of each."]),
        ("seed=3:5", ["or -m seed=3,4,5 for a run of each."]),
        ("steps=10..30", ["or -m 'steps=range(10,31)' for a run of each."]),
        ("seed=0-99999999999999999999", ["allowed: a whole number. Type for example seed=0."]),
        ("optim.learning_rate=[1e-4,1e-3]", ["or -m optim.learning_rate=0.0001,0.001 for a run of each."]),
        ("seed=2-0", ["allowed: a whole number. Type for example seed=0."]),
        ("seed=[a,b]", ["allowed: a whole number. Type for example seed=0."]),
        # bounds, of numbers too that a check divides by
        ("lora.rank=-1", ["lora.rank=-1", "at least 0", "Type for example lora.rank=32."]),  # 0 is refused by most arms
        ("gpus=0", ["gpus=0", "at least 1"]),
        # words that act nowhere
        ("aqn=off aqn.sigma_start=0.1", ["aqn.sigma_start=0.1", "aqn.schedule=off", "example aqn=exponential"]),
        ("+experiment=nf4 format.scale_rule=max", ["format.scale_rule=max", "format.name=nf4", "+experiment=nvfp4"]),
        ("+experiment=nf4 aqn.sigma_start=0.1", ["aqn.schedule=off", "or type for example +experiment=nvfp4_aqn."]),
        ("+experiment=nf4 aqn.solver.draws=4", ["aqn.unit=sigma", "or type for example +experiment=nvfp4_aqn_kl."]),
        ("eval.questions=0 eval.top_p=0.3", ["in a run with eval.questions=0 and eval.every=0.", "eval.questions=256"]),
        ("aqn=linear steps=1 aqn.stages=1", ["keeps stage 1 clean", "Type aqn.reading=equation, or"]),
        (
            "+experiment=nf4_aqn aqn.sigma_start=0",
            ["Type for example aqn.sigma_start=0.01, or aqn=off without +experiment."],
        ),
        ("+experiment=nf4 rollout=vllm device=cpu", ["allowed there: bf16. Type rollout=transformers."]),
        ("+experiment=nf4 lora=full", ["lora.rank=0 with format.name=nf4", "Type +experiment=bf16, or lora=rank32."]),
        (
            "model.hash=0a",
            ["does nothing in a run with model.path=pocket. Leave model.hash out", "model.path=DIR."],
        ),
        ("task.module_hash=0a", ["does nothing in a run with task.module=null. Leave task.module_hash out"]),
        ("lora.start_hash=0a", ["does nothing in a run with lora.start_from=null. Leave lora.start_hash out"]),
        ("preregistration_sha256=0a", ["does nothing in a run with preregistration=null. Leave"]),
        ("differs_in=[seed]", ["Leave differs_in out"]),
        # an arm that is no longer itself
        ("+experiment=nvfp4_aqn aqn=off", ["aqn=off", "aqn.schedule=exponential", "leave experiment=nvfp4_aqn out."]),
        ("+experiment=nvfp4_aqn_kl aqn.schedule=linear", ["_kl out and type aqn.schedule=linear aqn.unit=kl."]),
        # another model by the embedded policy's recipe
        ("+experiment=nvfp4 task=gsm8k model.path=A/B", ["model.path=A/B", "0.001, 64 tokens", "Type scale=custom"]),
        # syntax
        ("nvfp4_aqn", ["Type +experiment=nvfp4_aqn"]),
        ("seed", ["seed has no value", "Type seed=VALUE"]),
        ("seed=1 seed=2", ["seed is given 2 times: seed=1 seed=2"]),
        ("task.name=gsm8k", ["task.name=gsm8k leaves out", "Type task=gsm8k"]),
        ("task.instruction=null", ["task.instruction=null", "Type for example task.instruction=NAME"]),
        ("evaluate accuracy runs/x", ["Type python -m qerl_lab.evaluate."]),
        ("tools.export runs/x", ["Type python -m qerl_lab.tools.export."]),
        ("train +experiment=nvfp4", ["train cannot be read", "leave train out"]),
        ("resume=", ["resume= is empty", "Type resume=RUN_DIR"]),
        ("resume='a'", ["/a is no directory"]),
        ("seed=1 -m lora.rank=3 resume=run", ["-m seed=1 lora.rank=3 cannot be typed with it"]),
        ("jobs_per_gpu=half resume=run", ["jobs_per_gpu=half is not allowed; allowed: a whole number"]),
        ("resume=run steps=many", ["steps=many is not allowed; allowed: a whole number"]),
        ("resume=run(1) steps=4 seed=1", ["so seed=1 cannot be typed with it. Type resume='run(1)' alone"]),
        ("jobs_per_gpu=0 resume=run", ["jobs_per_gpu=0", "at least 1"]),
        ("task.instruction=a=b", ["cannot be read", "type two pairs of quotes"]),
        ("run_dir='it's'", ["cannot be read", "two pairs of quotes: \"KEY='it\\'s'\"."]),
        ("seed=0,1", ["seed=0,1 is several values", "Type -m"]),
        # flags
        ("--dry-run", ["Type dry_run=true"]),
        ("--max_steps=3", ["--max_steps=3 is not a flag", "Type steps=VALUE."]),
        ("+experiment = nvfp4", ["+experiment has no value. Type +experiment=VALUE, without spaces"]),
        ("--config-path=x", ["--config-dir DIR"]),
        ("--resolve seed=1", ["The --resolve flag can only be used"]),
        ("-m --run seed=1", ["Only one of --run, --multirun"]),
        ("-cn mine", ["-cn is not a flag", "Type --config-dir DIR"]),
        ("optim.learning_rate=0,001", ["optim.learning_rate=0,001 is several values, because a comma "]),
        ("--config-dir nowhere", ["Additional config directory", "/nowhere' not found"]),
        ("+hydra.callbacks.mine._target_=nomod.Mine", ["nomod.Mine", "No module named 'nomod'"]),
        # sweeps: named by their job
        ("-m lora.rank=16,-1", ["job 1 (lora.rank=-1)", "at least 0"]),
        ("-m experiment=glob(zz*)", ["no job"]),
        ("-m seed=interval(0,1)", ["Type -m seed=a,b with a value for each job."]),
        ("-m hydra/launcher=joblob seed=0,1", ["Type for example hydra/launcher=lab."]),
        ("-m model.path=glob(*)", ["model.path=glob(*) is not a list of jobs"]),  # globs are of groups alone
        ("-m seed=0,1 run_dir=x", ["hydra.sweep.dir=x"]),
        ("hydra.run.dir=x", ["hydra.run.dir=x does nothing here", "run_dir=DIR", "hydra.sweep.dir=DIR"]),
        ("-m seed=0,1 hydra.sweep.subdir=x", ["would share", "type 'hydra.sweep.subdir=${hydra.job.num}'."]),
        ("-m seed=0,1 hydra.sweep.subdir=../${hydra.job.num}", ["../0 is not inside", "Leave hydra.sweep.subdir"]),
        ("-m seed=0,1 hydra.sweep.subdir=/x/${hydra.job.num}", ["=/x/0 is not inside"]),
        ("-m seed=0 hydra.sweep.subdir=.", ["=. is not inside"]),
        ("-m seed=0,1 hydra.sweep.dir=", ["hydra.sweep.dir= is empty; allowed: a directory."]),
        ("-m sweeps=algorithms,lora_rank", ["is several sweeps", "Type +sweeps=NAME"]),
        ("-m seed=0,1,0", ["jobs 0 and 2 are the same run (seed=0)", "Leave out one"]),
        # words about jobs where they do nothing
        ("jobs=2", ["jobs=2 is for sweeps", "add -m"]),
        ("-m seed=0,1 jobs=2 hydra/launcher=basic", ["jobs=2 works with hydra/launcher=lab only"]),
        (
            "jobs_per_gpu=2 gpus=2",
            ["jobs_per_gpu=2 with gpus=2 is not allowed, because a job of several GPUs shares none"],
        ),
        ("-m +hydra.sweeper.params.seed=range(3)", ["a file of sweeps/ only. Type -m KEY=a,b"]),
        ("-m seed=0,1 hydra.sweeper.max_batch_size=3", ["Type jobs=3"]),
        ("-m jobs=1,2", ["jobs holds for the whole sweep"]),
        ("hydra.sweep.dir=x", ["hydra.sweep.dir=x is for sweeps"]),
        ("-m seed=0,1 slurm=--partition=gpu", ["type for example launcher=slurm"]),
        ("-m seed=0,1 format=bf16 rollout=vllm_server cpu_threads=1 jobs=2", ["it has one run at a time. Type jobs=1"]),
    ],
)
def test_a_bad_command_line(line, parts, capsys):
    message = refused(line, capsys)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("line", [
    "eval.questions=0 eval.every=2 eval.temperature=0.3 eval.top_p=0.9",  # of the evaluations during training
    "aqn=off aqn.norms=[input_layernorm]",  # a model without the usual norms is refused until it is typed
])  # fmt: skip
def test_an_override_with_an_effect_is_accepted(line):
    assert len(make_plan(line.split(), multirun=False).jobs) == 1


ADAPTIVE = {"aqn__schedule": "adaptive", "aqn__unit": "kl"}
FULL = {"lora__rank": 0, "format__name": "bf16"}


@pytest.mark.parametrize(
    ("changes", "keys", "deciding"),
    [
        (FULL, "lora.dropout lora.alpha", "lora.rank=0"),
        (FULL | {"rollout__engine": "vllm", "device": "cuda"}, "rollout.vllm.lora", "lora.rank=0"),
        ({"format__name": "bf16"}, "format.ignore format.dense_cache", "format.name=bf16"),
        ({"format__name": "fp8"}, "format.double_quant format.scale_rule format.exponent_rule", "format.name=fp8"),
        ({"format__name": "nvfp4"}, "format.activations", "format.name=nvfp4"),
        ({}, "aqn.probe_prompts aqn.scope aqn.relative", "aqn.schedule=off"),
        ({"aqn__schedule": "linear"}, "aqn.kl_start aqn.kl_end aqn.sigma_max aqn.solver.draws", "aqn.unit=sigma"),
        ({"aqn__schedule": "linear", "aqn__unit": "kl"}, "aqn.sigma_end", "aqn.unit=kl"),
        ({"aqn__schedule": "linear", "aqn__unit": "kl"}, "aqn.adaptive.band", "aqn.schedule=linear"),
        (ADAPTIVE, "aqn.kl_end aqn.stages aqn.reading aqn.solver.prompts", "aqn.schedule=adaptive"),
        ({}, "task.gsm8k.max_steps task.bigmath.levels task.columns.answer task.path", "task.name=arithmetic"),
        ({"rollout__importance_correction": "off"}, "rollout.importance_clip_max", "rollout.importance_correction=off"),
        ({"rollout__importance_correction": "in_ratio"}, "rollout.importance_clip_max", "correction=in_ratio"),
        ({}, "rollout.vllm.enforce_eager rollout.vllm_server.url", "rollout.engine=transformers"),
        ({"rollout__engine": "vllm_server"}, "rollout.vllm.lora rollout.vllm.share_base", "rollout.engine=vllm_server"),
        ({}, "slurm", "launcher=local"),
        ({}, "algorithm.max_resamples", "algorithm.dynamic_sampling=false"),
        ({}, "algorithm.kl_estimator", "algorithm.beta=0.0"),
        ({}, "algorithm.entropy_coef_step algorithm.entropy_coef_max", "algorithm.entropy_target=null"),
        ({"eval__questions": 0}, "eval.samples eval.samples_before eval.temperature", "eval.questions=0"),
        ({}, "eval.subset_questions eval.subset_samples", "eval.every=0"),
        ({"task__format_reward": 0.0}, "task.format_reward_for", "task.format_reward=0.0"),
        ({}, "model.revision", "model.path=pocket"),
    ],
)
def test_a_key_without_effect_is_refused_with_the_value_that_decides(tiny, changes, keys, deciding):
    cfg = tiny(**changes)
    for key in keys.split():
        with pytest.raises(ConfigError, match=f"^{key}=7 does nothing in a run with .*{deciding}[ .]"):
            intent.refuse_inert_overrides([(cfg, {key: "7"})])


def test_a_word_that_differs_between_jobs_must_act_in_each(tiny):
    """Otherwise two jobs would be the same run under two names."""
    jobs = [(tiny(), {"aqn.sigma_start": "0.05"}), (tiny(aqn__schedule="linear"), {"aqn.sigma_start": "0.1"})]
    with pytest.raises(
        ConfigError, match=r"^job 0: aqn\.sigma_start=0\.05 does nothing in a run with aqn\.schedule=off"
    ):
        intent.refuse_inert_overrides(jobs)


def test_a_revision_is_of_a_model_on_the_hub_alone(tiny, tmp_path):
    for path in (str(tmp_path), "model.gguf"):
        with pytest.raises(ConfigError, match=f"model.revision=main does nothing in a run with model.path={path}"):
            intent.refuse_inert_overrides([(tiny(model__path=path), {"model.revision": "main"})])
    intent.refuse_inert_overrides([(tiny(model__path="org/name"), {"model.revision": "main"})])


def test_a_server_is_asked_by_one_run_at_a_time(tiny):
    served = {"rollout__engine": "vllm_server"}
    for how in ({"jobs": 2}, {"launcher": "ray"}):
        with pytest.raises(ConfigError, match="lets several runs sample on one server at once"):
            intent.refuse_conflicting_jobs([tiny(**served, **how, seed=seed) for seed in (0, 1)])
        urls = ("http://127.0.0.1:8000", "http://127.0.0.1:8001")
        intent.refuse_conflicting_jobs([tiny(**served, **how, rollout__vllm_server__url=url) for url in urls])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        # names of TRL, PEFT, transformers, verl
        ("trainer.max_steps=3", "Type steps=VALUE."),
        ("actor_rollout_ref.model.path=x", "Type model.path=VALUE."),
        ("actor_rollout_ref.rollout.name=vllm", "Type rollout=OPTION (transformers, vllm, vllm_server)."),
        ("load_in_4bit=true", "Type format=nf4."),
        ("task.max_steps=2", "Did you mean task.arithmetic.max_steps or task.gsm8k.max_steps?"),
        # flags
        ("--lr=1e-3", "Type optim.learning_rate=VALUE."),
        ("--model X", "or model.path=PATH."),
        # groups
        ("lora=rank256", "Type lora.rank=256."),
        ("model=Qwen/Qwen2.5-0.5B-Instruct", "Type model.path=Qwen/Qwen2.5-0.5B-Instruct."),
        ("+sweep=weight_formats", "Did you mean sweeps?"),
        # values
        ("seed=${nope}", "error: seed: Interpolation key 'nope' not found; allowed: a whole number, or ${KEY}"),
        ("steps=1e3", "Type for example steps=1000."),
        ("tracking.wandb=no", "allowed: true or false. Type tracking.wandb=true, or tracking.wandb=false."),
        # quotes and commas
        ("optim.learning_rate='1e-4", "cannot be read. Type KEY=VALUE. If the value has a space"),
        (
            "-m seed=0,,1",
            "seed=0,,1 lacks a value beside a comma. Type -m seed=0,1 without spaces, or seed=0 for one value.",
        ),
        (
            "-m seed=0, 1",
            "seed=0, lacks a value beside a comma. Type -m seed=A,B without spaces, or seed=0 for one value.",
        ),
        ("format.ignore=a,,b", "lacks a value beside a comma. Type 'format.ignore=[a,b]'."),
        ("format.ignore=re:.*[.]0", "type two pairs of quotes: \"KEY=['a, b']\"."),
        ("=5", "=5 cannot be read. Type KEY=VALUE without spaces around the sign, or leave =5 out."),
        ("=5,", "=5, cannot be read. Type KEY=VALUE without spaces around the sign, or leave =5, out."),
        ("steps=1e9", "steps=1000000000 is not allowed; allowed: at most 999999. Type for example steps=999999."),
    ],
)
def test_a_name_from_another_library_or_group_leads_to_the_right_key(line, said, capsys):
    message = refused(line, capsys)
    assert said in message
    assert "Did you mean" not in message or "Did you mean" in said, "one answer, the right one"


@pytest.mark.parametrize(
    "line",
    [
        "resume=http://me:pa55word@host seed=1",
        "+experiment=nvfp4 tracking.uri=http://me:pa55word@host:5000",
        "+experiment=nvfp4 tracking.urj=http://me:pa55word@host:5000",
        "+experiment=nvfp4 MLFLOW_TRACKING_PASSWORD=pa55word",
    ],
)
def test_a_typed_password_is_refused_without_repeating_it(line, capsys):
    assert "pa55word" not in refused(line, capsys)


@pytest.mark.parametrize("line", ["steps=1", "-m seed=0,1", "resume=run"])
def test_a_wrong_store_in_the_environment_is_refused_like_a_typed_one(line, capsys, monkeypatch, tmp_path):
    claimed(tmp_path / "run", RunConfig())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "localhost:5000")
    assert "Type for example MLFLOW_TRACKING_URI=http://localhost:5000." in refused(line, capsys)


@pytest.mark.parametrize("words", ["tracking.uri=http://host", "tracking=none"])
def test_a_wrong_store_in_the_environment_is_ignored_if_the_run_uses_another_or_none(words, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "localhost:5000")
    assert train.main([words, "dry_run=true"]) == 0


@pytest.mark.parametrize("uri", ["./mlruns", "/runs/of/all", "file:/runs/of/all", "databricks"])
def test_a_store_in_the_environment_that_mlflow_may_take_is_not_refused(uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert train.main(["dry_run=true"]) == 0


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("lora:\n  rnk: 3\n", ["In 'experiment/mine'", "Did you mean lora.rank?"]),
        ("lora:\n  rank: abc\n", ["In 'experiment/mine'", "lora.rank", "'abc'", "a whole number"]),
        ("aqn:\n  schedule: off\n", ["aqn.schedule=False", '"off" with its quotes']),
        ("defaults:\n  - override /format: nvfp9\n", ["format=nvfp9", "Did you mean nvfp4?"]),
        (
            "hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      experiment: bf16,nf4\n",
            ["hydra.sweeper.params has experiment=bf16,nf4; write +experiment there."],
        ),
        (
            "defaults:\n  - override /hydra/sweeper: mine\nhydra:\n  mode: MULTIRUN\n",
            ["hydra/sweeper=mine chooses jobs while it runs", "allowed: basic. Leave hydra/sweeper out."],
        ),
        (
            "lora:\n  target_modules: [q_proj, null]\n",
            ["lora.target_modules: Invalid", "allowed: a list of names"],
        ),
        ("defaults:\n  - override /formt: nf4\n", ["formt is not a known key. Did you mean format?"]),
        ("defaults:\n  - /format: nf4\n", ["--config-dir has format again. Write override /format: OPTION there."]),
        ("defaults:\n  - /format: nvfp4\n", ["--config-dir has format again. Write override /format: OPTION there."]),
        ("lora: rank64\n", ["experiment/mine.yaml is not laid out", "each key indented below its group"]),
        ("defaults:\n  - format: nf4\n", ["experiment/mine.yaml is not laid out", "override /GROUP: OPTION in its"]),
        ("defaults:\n  - override /aqn: off\n", ["a defaults list of --config-dir cannot be read", '"off"']),
        ("lora:\n  rank: 8\n", ["runs of experiment=mine would be called adhoc. Write experiment: mine in its file."]),
        ("experiment: bf16\n", ["runs of experiment=mine would be called bf16. Write experiment: mine in its file."]),
        ("experiment: mine\nscale: tiny\n", ["runs of scale=pocket would be called tiny. Write scale: pocket in its"]),
        ("experiment: mine\ndiffers_in: [lora.rnk]\n", ["differs_in of experiment=mine: lora.rnk", "lora.rank?"]),
        (
            "experiment: mine\nhydra:\n  sweeper:\n    params:\n      seed: 0,1\n",
            ["a file has a grid (hydra.sweeper.params)", "Add -m, or write mode: MULTIRUN"],
        ),
    ],
)
def test_a_bad_file_of_the_user_s_own(text, parts, capsys):
    write_option("mine/experiment/mine.yaml", f"# @package _global_\n# mine\n{text}")
    write_option("mine/hydra/sweeper/mine.yaml", "defaults:\n  - basic\n")
    message = refused("--config-dir mine experiment=mine", capsys)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("line", ["", "-m seed=0,1 "])
def test_claims_with_a_mistake_are_refused_before_a_run_records_their_hash(line, capsys, tmp_path):
    text = (package_data("results/reference") / "claims.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text.replace("measure: entropy_first", "measure: entropy_frist", 1))
    message = refused(f"{line}preregistration=mine.yaml", capsys)
    assert message.startswith("error: preregistration=mine.yaml: claim initial_entropy: measure entropy_frist is none")
    (tmp_path / "mine.yaml").write_text(text)
    assert train.main(["preregistration=mine.yaml", "dry_run=true"]) == 0


@pytest.mark.parametrize("text", ["defaults:\n  - override /format: nf4\n", "lora:\n  rank: 8\n"])
def test_a_file_without_its_first_line_is_told_to_have_it(text, capsys):
    write_option("mine/sweeps/mine.yaml", f"# mine\n{text}")
    message = refused("--config-dir mine sweeps=mine", capsys)
    assert "error: sweeps/mine.yaml " in message
    assert "Write # @package _global_ as its first line," in message


@pytest.mark.parametrize("line", ["", "-m seed=0,1 "])
@pytest.mark.parametrize("name", ["experiment/nf4", "sweeps/weight_formats"])
def test_a_file_of_the_user_s_own_that_has_the_name_of_one_of_ours(name, line, capsys, tmp_path):
    write_option(f"mine/{name}.yaml")
    message = refused(f"{line}--config-dir mine +experiment=bf16", capsys)
    assert f"/mine has {name}.yaml, as the lab does, and only one of the two would be read. Give yours anoth" in message


def test_an_override_may_not_change_what_an_arm_of_the_user_s_own_declares(capsys):
    text = "experiment: queries\ndiffers_in: [lora.target_modules]\nlora:\n  target_modules: [q_proj]\n"
    write_option("mine/experiment/queries.yaml", f"# @package _global_\n{text}")
    message = refused("--config-dir mine +experiment=queries lora.target_modules=[k_proj]", capsys)
    assert "lora.target_modules=[k_proj] changes what experiment=queries stands for" in message


def test_a_sweep_whose_runs_were_deleted_cannot_be_resumed(tmp_path, capsys):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / ".lock").touch()
    assert "holds no run. Type the line that began the sweep." in refused("resume=sweep", capsys)


def test_an_option_in_a_folder_of_its_group_has_the_name_of_its_file():
    write_option("mine/experiment/ranks/small.yaml")
    assert train.main(["--config-dir", "mine", "+experiment=ranks/small", "dry_run=true"]) == 0


def test_a_command_without_the_flag_config_dir_says_which_key_does_the_same(capsys):
    write_option("mine/experiment/small.yaml")
    words = ["+experiment=small", "rollout=vllm_server"]
    assert serve_line.main(["--config-dir", "mine", *words]) == 2
    assert "--config-dir cannot be read. Type hydra.searchpath=[DIR]." in capsys.readouterr().err
    assert make_plan(["hydra.searchpath=[mine]", *words], multirun=False).jobs[0].config.lora.rank == 8


def test_a_folder_of_options_may_have_an_equals_sign_in_its_path(capsys):
    write_option("a=b/experiment/small.yaml")
    assert train.main(["--config-dir", "a=b", "experiment=small", "dry_run=true"]) == 0
    assert "small" in capsys.readouterr().out


def test_a_file_of_the_user_s_own_is_an_option_like_ours(capsys):
    write_option("mine/experiment/small.yaml")
    assert train.main(["-m", "--config-dir", "mine", "+experiment=glob(*small)", "dry_run=true"]) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("0 ")]
    assert (row[1], row[7]) == ("small", "8")


@pytest.mark.parametrize(
    ("typed", "spelled"),
    [
        ("experiment=bf16", "+experiment=bf16"),
        ("+scale=pocket", "scale=pocket"),
        ("task.instruction='+experiment=x'", "task.instruction='+experiment=x'"),
        ("+hydra.foo=1", "+hydra.foo=1"),
        ("~lora", "~lora"),
    ],
)
def test_a_plus_is_the_user_s_to_type_or_to_leave_out(typed, spelled):
    assert spell_for_hydra(typed) == spelled


def only_job(*words: str) -> Job:
    (job,) = make_plan(list(words), False).jobs
    return job


def test_a_model_given_by_its_path_is_named_after_the_path():
    assert only_job("scale=smollm2", "model.path=/data/Other").config.model.name == "Other"
    assert only_job("scale=smollm2").config.model.name == "smollm2_135m"
    assert only_job("scale=pocket", "model.path=/data/x", "model.name=mine").config.model.name == "mine"


def test_a_commit_that_looks_like_a_number_stays_as_it_was_typed():
    words = ["scale=custom", "model.path=a/b", "model.revision=7e12345", "run_dir=1_0"]
    config = only_job(*words).config
    assert (config.model.revision, config.run_dir) == ("7e12345", "1_0")
    jobs = make_plan(list(map(spell_for_hydra, [*words[:2], "model.revision=7e12345,main"])), True).jobs
    assert [job.config.model.revision for job in jobs] == ["7e12345", "main"]


def test_an_untyped_micro_batch_shrinks_to_a_divisor_of_an_update_with_a_note():
    job = only_job("rollout.prompts_per_step=2")
    assert job.config.optim.micro_batch_size == 16
    assert job.notes == ["optim.micro_batch_size=16 instead of 64: it must divide the 16 completions of an update"]
    job = only_job("scale=custom", "rollout.group_size=6", "algorithm.updates_per_rollout=4")
    assert (job.config.optim.micro_batch_size, len(job.notes)) == (8, 0)  # 24 completions an update
    assert only_job("rollout.prompts_per_step=2", "optim.micro_batch_size=8").config.optim.micro_batch_size == 8
    job = only_job("rollout.prompts_per_step=2", "optim.micro_batch_size=null")  # the run chooses
    assert (job.config.optim.micro_batch_size, job.notes) == (None, [])


def test_a_word_of_a_sweep_must_act_in_one_job_that_shares_it():
    arms = "+experiment=nvfp4,nvfp4_aqn"
    plan = make_plan([arms, "aqn.sigma_start=0.05"], True)
    assert [job.config.aqn.sigma_start for job in plan.jobs] == [0.05, 0.05]
    plan = make_plan(["+experiment=nvfp4_aqn,bf16_aqn", "aqn.sigma_start=0.05,0.1"], True)
    assert len(plan.jobs) == 4


def test_a_sweep_over_lists_takes_names_in_quotes():
    jobs = make_plan(["format.ignore=['re:.*down.*'],[lm_head]", 'aqn.norms=["input_layernorm"]'], True).jobs
    assert [job.config.format.ignore for job in jobs] == [["re:.*down.*"], ["lm_head"]]


def test_an_error_lists_the_keys_that_may_be_typed_nearest_first():
    set_by_lab = {leaf.name for leaf in leaves(RunConfig()) if "set by the command" in leaf.field.metadata["help"]}
    assert set_by_lab | {*SET_BY_LAB} <= NOT_PROPOSED
    listed = str(unknown_key_error("step")).partition("Allowed: ")[2].rstrip(".").split(", ")
    assert listed[0] == "steps"
    assert {*listed} == {key.partition(".")[0] for key in TYPES} - NOT_PROPOSED | {"sweeps"}
    for node in ("model", "lora", "task", "algorithm"):
        listed = str(unknown_key_error(f"{node}.zzz")).partition("Allowed: ")[2].rstrip(".").split(", ")
        assert {*listed} == {key for key in TYPES if key.startswith(f"{node}.")} - NOT_PROPOSED


def test_overrides_with_little_effect_get_a_note():
    for words, given, proposed in (
        (["aqn=linear", "steps=5"], "5 steps", "aqn.stages=5"),
        (["aqn=linear", "steps=1"], "1 step", "aqn.stages=1 aqn.reading=equation"),
    ):
        skipped = f"aqn.stages=10 in {given}: some stages are skipped, the last among them. Type for example {proposed}"
        assert only_job(*words).notes == [skipped]
        assert only_job(*words, *proposed.split()).notes == []
    assert only_job("aqn=adaptive", "steps=1").notes == []
    (note,) = only_job("algorithm.epsilon_high=0.4").notes
    assert note.startswith("algorithm.epsilon_high: with one update per rollout every probability ratio is 1")
    several = only_job("algorithm.epsilon_high=0.4", "algorithm.updates_per_rollout=2").notes
    assert not any("epsilon" in note for note in several)
    assert only_job("algorithm=gspo").notes == []
    (note,) = only_job("format=bf16", "lora=full").notes
    assert note == "optim.learning_rate=0.001 is made for adapters; for all weights 1e-6 is usual"
    assert only_job("format=bf16", "lora=full", "optim.learning_rate=1e-6").notes == []


def test_a_dry_run_in_a_used_directory_is_refused_as_the_run_would_be(capsys, tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").touch()
    assert "used is not empty. Type run_dir=DIR for a new run" in refused("run_dir=used dry_run=true", capsys)


SWEEP = "seed=0,1 hydra.sweep.dir=begun device=cuda"


@pytest.mark.parametrize(("words", "again"), [
    ("run_dir=begun device=cuda", "resume=begun"), (SWEEP, "resume=begun"), (SWEEP, f"-m {SWEEP}"),
])  # fmt: skip
def test_a_begun_run_is_checked_again_before_it_continues(words, again, capsys):
    """The earlier command may have run on a machine with a GPU."""
    claim_directories(make_plan(words.split(), multirun=words is SWEEP), "python -m qerl_lab")
    assert "device=cuda was given, and this machine shows no GPU" in refused(again, capsys)


def test_a_bug_in_the_callback_ends_the_command(monkeypatch):
    """Hydra only warns of an Exception, and would start jobs that nobody has checked."""

    def broken() -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(train, "GlobalHydra", SimpleNamespace(instance=broken))
    hydra = OmegaConf.create({"hydra": {"runtime": {"choices": {"hydra/launcher": "lab"}}}})
    with pytest.raises(train.PastHydra):
        train.CheckJobs().on_multirun_start(hydra)
