"""Whatever is wrong with a command line ends in one message and exit code 2, before any directory is made."""

import pytest

from qerl_lab import launch
from qerl_lab.cli import main
from qerl_lab.compose import make_plan, spell
from qerl_lab.config import choices_of

ARM = ", ".join(choices_of("experiment"))


@pytest.fixture(autouse=True)
def _empty_directory_and_no_child(tmp_path, monkeypatch):
    def refuse(run_dir):
        raise AssertionError("a bad command started a run")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "child_command", refuse)


def refused(line: str, capsys) -> str:
    code = main(line.split())
    out, err = capsys.readouterr()
    assert code == 2, out + err
    assert err.startswith("error: ")
    assert out == ""
    assert err.count("\n") == 1, "one message is one line"
    for noise in ("Traceback", "HYDRA_FULL_ERROR", "full_key", "object_type"):
        assert noise not in err
    return err


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        # groups and options
        ("fromat=nvfp4", ["fromat is not a known key", "Did you mean format?"]),
        ("format=nvfp5", ["format=nvfp5", "allowed: bf16, mxfp4, nf4, nvfp4", "Did you mean nvfp4?"]),
        ("experiment=nvfp", ["experiment=nvfp", ARM, "Did you mean nvfp4?"]),
        ("+experiment=x", [ARM, "Type for example experiment=bf16"]),
        ("scale=zzz", ["pocket", "Type for example scale="]),
        ("+sweeps=nope", ["weight_formats"]),
        ("lora=[rank16,rank32]", ["lora=[rank16,rank32]", "rank64"]),
        ("lora={rank:3}", ["lora.rank=VALUE"]),
        ("aqn=null", ["aqn=null", "off"]),
        ("hydra/launcher=joblip", ["hydra/launcher=joblip", "basic", "qerl-lab[sweeps]"]),
        ("experiment=nvfp4 +experiment=bf16", ["experiment is given 2 times"]),
        # keys
        ("lora.rnk=3", ["Did you mean lora.rank?", "lora.alpha"]),
        ("+lora.rnk=3", ["Did you mean lora.rank?"]),
        ("++new.key=3", ["new.key is not a known key"]),
        ("rank=3", ["Did you mean lora.rank?"]),
        ("eval=3", ["eval is a node", "eval.samples"]),
        ("~lora.rank", ["Type lora.rank=VALUE"]),
        ("format@x=nvfp4", ["format"]),
        ("hydra.foo=1", ["hydra.foo", "'foo' not in 'HydraConf'"]),
        # types
        ("lora.rank=abc", ["lora.rank=abc", "a whole number", "lora.rank=32"]),
        ("lora.rank=16.5", ["lora.rank=16.5", "a whole number"]),
        ("lora.rank=null", ["lora.rank=null", "a whole number"]),
        ("seed=true", ["seed=true", "a whole number"]),
        ("optim.learning_rate=fast", ["a number", "optim.learning_rate=1e-05"]),
        ("tracking.mlflow=maybe", ["true or false"]),
        ("lora.target_modules=q_proj", ["a list of names", "[q_proj,"]),
        # values and combinations
        ("aqn.schedule=offf", ["off, exponential", "Did you mean off?"]),
        ("device=gpu", ["auto, cpu, cuda"]),
        ("seed=-1", ["at least 0"]),
        ("optim=adamw_8bit device=cpu", ["needs a GPU", "Type optim=adamw"]),
        ("rollout.group_size=7", ["8 x 7 = 56", "Type for example optim.micro_batch_size=56"]),
        ("aqn=exponential aqn.sigma_end=1", ["aqn.sigma_end=1.0 is above aqn.sigma_start"]),
        # syntax
        ("nvfp4_aqn", ["Type +experiment=nvfp4_aqn"]),
        ("word", ["word cannot be read", "KEY=VALUE"]),
        ("lora.rank=[1", ["lora.rank=[1 cannot be read"]),
        ("task.instruction=a=b", ["cannot be read", "quotes"]),
        ("seed=0,1", ["seed=0,1 is several values", "Type -m"]),
        ("experiment=bf16,nf4", ["Type -m"]),
        # flags
        ("--dry-run", ["Type dry_run=true"]),
        ("--experiment=bf16", ["Type +experiment=NAME"]),
        ("--multirn", ["Did you mean --multirun?"]),
        ("--config-path=x", ["--config-dir DIR"]),
        ("--config-dir nowhere", ["nowhere is not a directory"]),
        # sweeps: named by their job
        ("-m lora.rank=16,abc", ["lora.rank=abc"]),
        ("-m lora.rank=16,0", ["job 1 (lora.rank=0)", "at least 1"]),
        ("-m experiment=bf16,nope", ["experiment=nope"]),
        ("-m rollout.group_size=8,7 seed=range(0,2)", ["job 2 (rollout.group_size=7 seed=0)", "56"]),
        ("-m experiment=glob(zz*)", ["no job"]),
        ("-m seed=shuffle(1,2)", ["Leave shuffle() out"]),
        ("-m seed=interval(0,1)", ["seed=range"]),
        ("-m hydra.job.name=a,b", ["Hydra's own settings", "Type hydra.job.name=VALUE"]),
        ("-m --cfg job", ["Leave -m out"]),
        ("-m seed=0,1 run_dir=x", ["hydra.sweep.dir=x"]),
        ("-m seed=0,1 hydra.sweep.subdir=x", ["jobs 0 and 1 would share", "hydra.job.num"]),
        ("+sweeps=weight_formats lora.rank=-1", ["job 0 (+experiment=bf16 seed=0 lora.rank=-1)"]),
    ],
)
def test_a_bad_command_line(line, parts, capsys, tmp_path):
    message = refused(line, capsys)
    for part in parts:
        assert part in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("lora:\n  rnk: 3\n", ["In 'experiment/mine'", "Did you mean lora.rank?"]),
        ("lora:\n  rank: abc\n", ["In 'experiment/mine'", "lora.rank", "'abc'", "a whole number"]),
        ("lora:\n  rank: [3\n", ["mine.yaml", "line"]),
        ("lora:\n  rank: ${nope}\n", ["lora.rank", "nope"]),
        ("aqn:\n  schedule: off\n", ["aqn.schedule=False", '"off" with its quotes']),
        ("defaults:\n  - override /format: nvfp9\n", ["format=nvfp9", "Did you mean nvfp4?"]),
        ("foo: 1\n", ["foo is not a known key"]),
    ],
)
def test_a_bad_file_of_the_user_s_own(text, parts, capsys, tmp_path):
    folder = tmp_path / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(f"# @package _global_\n# mine\n{text}")
    message = refused("--config-dir mine experiment=mine", capsys)
    for part in parts:
        assert part in message


def test_a_file_of_the_user_s_own_is_an_option_like_ours(tmp_path):
    folder = tmp_path / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "small.yaml").write_text("# @package _global_\n# mine\nexperiment: small\nlora:\n  rank: 8\n")
    plan = make_plan(["+experiment=glob(*small)"], True, str(tmp_path / "mine"))
    assert [(job.config.experiment, job.config.lora.rank) for job in plan.jobs] == [("small", 8)]


@pytest.mark.parametrize(
    ("typed", "spelled"),
    [
        ("experiment=bf16", "+experiment=bf16"),
        ("+experiment=bf16", "+experiment=bf16"),
        ("sweeps=weight_formats", "+sweeps=weight_formats"),
        ("scale=pocket", "scale=pocket"),
        ("+scale=pocket", "scale=pocket"),
        ("++lora.rank=3", "lora.rank=3"),
        ("task.instruction='+experiment=x'", "task.instruction='+experiment=x'"),
        ("+hydra.foo=1", "+hydra.foo=1"),
        ("~lora", "~lora"),
    ],
)
def test_a_plus_is_the_user_s_to_type_or_to_leave_out(typed, spelled):
    assert spell(typed) == spelled


def test_a_model_given_by_path_alone_is_not_labelled_pocket():
    assert make_plan(["model.path=/data/Qwen2.5-7B"], False).jobs[0].config.model.name == "Qwen2.5-7B"
    assert make_plan(["model.path=/data/x", "model.name=mine"], False).jobs[0].config.model.name == "mine"
