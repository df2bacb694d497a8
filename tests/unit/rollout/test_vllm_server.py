"""The engine of a server, on a fake server that can fail: requests, wrong answers, and the commands to start one."""

import math
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_vllm import DROP, LOSE, FakeVllm, refusal, running
from packed_layers import BY_NAME
from qerl_lab import rollout
from qerl_lab.aqn import CLEAN, Noise
from qerl_lab.config.option import ConfigError
from qerl_lab.formats import fp8
from qerl_lab.model.policy import Policy
from qerl_lab.quantize.__main__ import COMMAND
from qerl_lab.rollout.engine import EngineFailed, Sampling
from qerl_lab.rollout.vllm import transfer
from qerl_lab.rollout.vllm.transfer import encode_tensor, max_rank
from qerl_lab.rollout.vllm_server import server_command
from qerl_lab.tools import serve_line
from rollouts import ids_of
from waiting import wait_for

PROMPTS = [[3, 4, 5], [6], [7, 8]]
SAMPLING = Sampling(4, seed=1)
COMPLETIONS, RPC, MODELS = "/v1/completions", "/collective_rpc", "/v1/models"


@pytest.fixture(scope="module")
def policy(tiny, build_policy) -> Policy:
    return build_policy(tiny(format__name="bf16"))


@pytest.fixture
def fake(policy: Policy) -> Iterator[FakeVllm]:
    with running(FakeVllm(policy)) as server:
        yield server


@pytest.fixture
def build(policy: Policy, tiny, fake: FakeVllm) -> Iterator[Callable[..., rollout.Engine]]:
    """Return a function that builds the engine of a run on the fake server; close the engine after the test."""
    words = {"rollout__engine": "vllm_server", "format__name": "bf16", "rollout__vllm_server__url": fake.url}
    words |= {"rollout__vllm_server__patience_seconds": 1.0}
    with ExitStack() as stack:
        yield lambda **changes: stack.enter_context(closing(rollout.build(tiny(**words | changes), policy)))


@pytest.fixture
def engine(build) -> rollout.Engine:
    return build()


def sent(fake: FakeVllm, path: str) -> list[dict[str, Any]]:
    return [body for asked, body in fake.asked if asked == path]


# --- requests and results


def test_a_rollout_is_one_request_per_prompt(engine, fake: FakeVllm, policy: Policy) -> None:
    fake.asked.clear()
    told: list[int] = []
    out = engine.generate(PROMPTS, 2, SAMPLING, told.append)
    bodies = sorted(sent(fake, COMPLETIONS), key=lambda body: PROMPTS.index(body["prompt"]))
    assert [body["prompt"] for body in bodies] == PROMPTS
    assert len({body["seed"] for body in bodies}) == 3
    [name] = fake.adapters
    fixed = {"model": name, "n": 2, "max_tokens": 4, "logprobs": 0, "stop_token_ids": policy.end_ids()}
    assert all(body | fixed == body for body in bodies)
    assert sum(told) == 6
    assert ids_of(out) == [[[5] * 4, [6] * 4]] * 3
    assert out.completions[0].logprobs == fake.logprobs(PROMPTS[0], 4)
    assert out.entropy is None
    seeds = [body["seed"] for body in bodies]
    fake.asked.clear()
    engine.generate(PROMPTS[1:], 2, replace(SAMPLING, first=1))
    assert {body["seed"] for body in sent(fake, COMPLETIONS)} == {*seeds[1:]}
    fake.asked.clear()
    engine.generate(PROMPTS, 2, Sampling(4, seed=2, temperature=0.7, top_p=0.5))
    bodies = sent(fake, COMPLETIONS)
    assert not {body["seed"] for body in bodies} & {*seeds}
    assert {(body["temperature"], body["top_p"], body["logprobs"]) for body in bodies} == {(0.7, 0.5, None)}


def test_as_many_groups_are_sampled_at_once_as_fit_the_batch(fake: FakeVllm, build) -> None:
    engine = build(rollout__batch_size=12, rollout__group_size=4)
    fake.hold_seconds = 0.1
    engine.generate([[3]] * 7, 4, SAMPLING)
    assert fake.most_at_once == 3
    engine.generate([[3]] * 7, 2, SAMPLING)  # as in an evaluation with fewer samples
    assert fake.most_at_once == 6


def test_a_sync_writes_the_adapter_and_sends_the_noise_as_numbers(engine, fake: FakeVllm, policy: Policy) -> None:
    [folder] = fake.adapters.values()
    weights = Path(folder, "adapter_model.safetensors")
    before = weights.read_bytes()
    fake.asked.clear()
    weight = next(p for name, p in policy.model.named_parameters() if "lora_B" in name)
    try:
        weight.data.mul_(2)
        engine.sync(Noise(0.1, seed=3, step=4, relative=True))
    finally:
        weight.data.div_(2)
    assert weights.read_bytes() != before
    adapter, noise = sent(fake, RPC)
    assert adapter["kwargs"]["folder"] == folder
    sent_noise = {"sigma": "0.1", "seed": 3, "step": 4, "relative": True}
    assert noise["kwargs"] == {"names": [*policy.norms]} | sent_noise
    assert fake.asked[-1][0] == "/reset_prefix_cache"
    expected = Noise(0.1, 3, 4, relative=True).onto_norms(policy.clean_norms)
    assert all(torch.equal(weight, expected[name]) for name, weight in engine.norms().items())
    engine.close()
    assert not weights.exists()


def test_nan_log_probs_are_returned(engine, fake: FakeVllm) -> None:
    """JSON has no NaN, so the server refuses. The same draws are then requested without log-probs."""
    fake.faults[COMPLETIONS] = [refusal(400, "Out of range float values are not JSON compliant: nan")]
    out = engine.generate(PROMPTS[:1], 2, SAMPLING)
    assert all(math.isnan(logprob) for completion in out.completions for logprob in completion.logprobs)
    first, again = sent(fake, COMPLETIONS)[-2:]
    assert again == first | {"logprobs": None}
    fake.faults[COMPLETIONS] = 2 * [refusal(400, "not JSON compliant")]
    with pytest.raises(EngineFailed, match="not JSON compliant"):
        engine.generate(PROMPTS[:1], 2, SAMPLING)


# --- lost connections


def test_a_lost_connection_is_tried_again(engine, fake: FakeVllm) -> None:
    clean = engine.generate(PROMPTS, 2, SAMPLING)
    fake.faults = {COMPLETIONS: [DROP, (503, None)], RPC: [(503, None)], "/reset_prefix_cache": [DROP]}
    engine.sync(Noise(0.1, seed=0, step=1))
    again = engine.generate(PROMPTS, 2, SAMPLING)
    assert ids_of(again) == ids_of(clean)
    assert not any(fake.faults.values())


def test_a_server_that_stays_away_is_an_error_that_says_what_was_tried(policy: Policy, build) -> None:
    with running(FakeVllm(policy)) as gone:
        engine = build(rollout__vllm_server__url=gone.url, rollout__vllm_server__patience_seconds=0.2)
    with pytest.raises(EngineFailed) as caught:
        engine.generate(PROMPTS, 2, SAMPLING)
    for part in (gone.url, "is away", "tried for 0.2 s", "patience_seconds", "python -m qerl_lab.tools.serve_line"):
        assert part in str(caught.value)


def test_the_time_limit_holds_for_all_tries_of_a_request(fake: FakeVllm, build) -> None:
    """The limit is 1.2 s. The answer of the first try is lost after 0.9 s."""
    engine = build(rollout__vllm__timeout_minutes=0.02)
    fake.hold_seconds = 0.1
    assert engine.generate(PROMPTS[:1], 2, SAMPLING).completions
    fake.hold_seconds = 0.9
    fake.faults[COMPLETIONS] = [LOSE]
    with pytest.raises(EngineFailed, match=r"finished 0 of 1 groups in rollout\.vllm\.timeout_minutes=0\.02"):
        engine.generate(PROMPTS[:1], 2, SAMPLING)


def test_the_time_limit_also_ends_the_tries_to_reach_a_server_that_is_away(policy: Policy, build) -> None:
    """The limit is 1.2 s, and patience would last for a minute."""
    words = {"rollout__vllm__timeout_minutes": 0.02, "rollout__vllm_server__patience_seconds": 60.0}
    with running(FakeVllm(policy)) as gone:
        engine = build(rollout__vllm_server__url=gone.url, **words)
    began = time.monotonic()
    with pytest.raises(EngineFailed, match="is away"):
        engine.generate(PROMPTS[:1], 2, SAMPLING)
    assert time.monotonic() - began < 20


def test_closing_ends_the_other_requests_after_a_failed_one(fake: FakeVllm, build) -> None:
    """Two groups are sampled at once, so most of the ten are never sent."""
    engine = build(rollout__batch_size=4, rollout__vllm_server__patience_seconds=60.0)
    fake.hold_seconds = 60
    fake.faults[COMPLETIONS] = [refusal(500, "no")]
    with pytest.raises(EngineFailed, match="no"):
        engine.generate([[3]] * 10, 2, SAMPLING)
    wait_for(lambda: fake.at_once)
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 30, "it waited for answers that nobody wants"
    assert fake.at_once == 0
    asked = [body for body in sent(fake, COMPLETIONS) if body["prompt"] == [3]]
    assert len(asked) <= 3, "more than the refused one, the one beside it, and one begun before the refusal came"


def test_a_caller_may_stop_before_any_request_is_answered(fake: FakeVllm, build) -> None:
    engine = build(rollout__vllm_server__patience_seconds=60.0)
    fake.hold_seconds = 60
    began, told = time.monotonic(), list[int]()

    def stop(count: int) -> None:
        told.append(count)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        engine.generate(PROMPTS, 2, SAMPLING, stop)
    engine.close()
    assert told == [0]
    assert time.monotonic() - began < 30, "it waited for answers that nobody wants"
    assert fake.at_once == 0


def test_closing_does_not_abort_requests_of_a_run_that_took_over(fake: FakeVllm, build) -> None:
    engine = build(rollout__batch_size=4)
    fake.hold_seconds = 0.8
    fake.faults[COMPLETIONS] = [refusal(500, "no")]
    with pytest.raises(EngineFailed, match="no"):
        engine.generate(PROMPTS, 2, SAMPLING)
    wait_for(lambda: fake.at_once)
    fake.adapters = {"policy-another": "elsewhere"}
    fake.asked.clear()
    engine.close()
    assert (MODELS, {}) in fake.asked
    assert not sent(fake, "/abort_requests")


def test_loading_an_adapter_succeeds_if_only_the_answer_was_lost(fake: FakeVllm, build) -> None:
    """Unloading succeeds too. The second try finds the work done."""
    fake.adapters["policy-old"] = "gone"
    fake.faults = {"/v1/load_lora_adapter": [LOSE], "/v1/unload_lora_adapter": [LOSE]}
    assert len(build().generate(PROMPTS, 2, SAMPLING).completions) == 6
    assert "policy-old" not in fake.adapters


def test_a_run_that_takes_over_aborts_requests_and_clears_the_cache_before_it_loads(fake: FakeVllm, build) -> None:
    fake.adapters["policy-old"] = "gone"
    build()
    needed = ["/abort_requests", "qerl_clear", "/v1/unload_lora_adapter", "/v1/load_lora_adapter"]
    assert [asked for path, body in fake.asked if (asked := body.get("method", path)) in needed] == needed


def test_the_last_run_to_start_keeps_the_server(engine, fake: FakeVllm, build) -> None:
    """The first run neither samples with the adapter and noise of the last run, nor changes them."""
    other = build()
    held, fake.asked = dict(fake.adapters), []
    with pytest.raises(EngineFailed, match="does not exist"):
        engine.generate(PROMPTS, 2, SAMPLING)
    with pytest.raises(EngineFailed, match="was taken by another run"):
        engine.sync(Noise(0.1, seed=0, step=1))
    assert fake.adapters == held
    assert not sent(fake, RPC)
    other.generate(PROMPTS, 2, SAMPLING)


@pytest.mark.parametrize(
    ("names", "said"),
    [(["policy-another"], "taken by another run"), (["own", "policy-another"], "taken by"), ([], "started again")],
)
def test_completions_are_refused_if_another_run_took_the_server_meanwhile(
    engine, fake: FakeVllm, names, said: str
) -> None:
    """All requests were answered, but perhaps with the noise of another run."""
    [own] = fake.adapters

    def change(answer: Any) -> Any:
        fake.adapters = dict.fromkeys((own if name == "own" else name for name in names), "elsewhere")
        return answer

    fake.faults[COMPLETIONS] = [change]
    with pytest.raises(EngineFailed, match=f"was {said}"):
        engine.generate(PROMPTS[:1], 2, SAMPLING)


# --- wrong answers


def aborted(said: Any) -> Any:
    return {"choices": [*said["choices"][:-1], said["choices"][-1] | {"finish_reason": "abort"}]}


@pytest.mark.parametrize(
    ("path", "fault", "part"),
    [
        (COMPLETIONS, aborted, "ended a completion by 'abort'"),
        (COMPLETIONS, refusal(500, "EngineCore encountered an issue"), "EngineCore encountered an issue"),
        (
            COMPLETIONS,
            refusal(403, "session expired"),
            "HTTP 403: .*session expired.* into the environment variable VLLM_API_KEY",
        ),
        (COMPLETIONS, (302, "<html>moved</html>"), "HTTP 302: <html>moved"),
        (COMPLETIONS, (200, "<html>log in</html>"), "HTTP 200: <html>log in"),
        ("/reset_prefix_cache", lambda said: {"success": False}, "kept its prefix cache"),
        (RPC, lambda said: {"results": [[1], [1, 2]]}, r"the adapter with \[1, 2\]; allowed: one id"),
        (RPC, lambda said: {"results": [["ValueError", "no file"]]}, "'no file'"),
        (RPC, refusal(500, "list_loras"), "refuses /collective_rpc"),
    ],
)
def test_a_wrong_answer_to_a_sync_or_a_rollout_is_an_error(engine, fake: FakeVllm, path: str, fault, part: str) -> None:
    fake.faults[path] = [fault]
    call = partial(engine.generate, PROMPTS[:1], 2, SAMPLING) if path == COMPLETIONS else partial(engine.sync, CLEAN)
    with pytest.raises(EngineFailed, match=part):
        call()


def test_workers_that_hold_different_noise_are_an_error(engine, fake: FakeVllm) -> None:
    fake.workers = 2
    assert engine.norms().keys() == fake.norms.keys()

    def one_other(said: Any) -> Any:
        first, second = said["results"]
        name = next(iter(second))
        return {"results": [first, second | {name: encode_tensor(torch.zeros(3))}]}

    fake.faults[RPC] = [one_other]
    with pytest.raises(EngineFailed, match=r"hold different weights of model[.]layers[.]0[.]input_layernorm"):
        engine.norms()


# --- servers that do not fit the run


def described(**changes: Any) -> Callable[[FakeVllm], None]:
    return lambda fake: fake.described.update(changes)


def norms(change: Callable[[torch.Tensor], torch.Tensor], most: int | None = None) -> Callable[[FakeVllm], None]:
    """Let the server return at most `most` norms, changed by `change`."""

    def tell(fake: FakeVllm) -> None:
        fake.rpc = lambda asked, given: (
            {name: encode_tensor(change(norm)) for name, norm in list(fake.norms.items())[:most]}
            if asked == "qerl_norms" else FakeVllm.rpc(fake, asked, given)
        )  # fmt: skip

    return tell


def ignores(layers: str) -> Callable[[FakeVllm], None]:
    """Let the server ignore the adapter of layers with `layers` in their name, as vLLM does if it has no such layer."""

    def tell(fake: FakeVllm) -> None:
        fake.rpc = lambda asked, given: (
            [name for name in FakeVllm.rpc(fake, asked, given) if layers not in name]
            if asked == "qerl_adapted" else FakeVllm.rpc(fake, asked, given)
        )  # fmt: skip

    return tell


def off_by(nats: float) -> Callable[[FakeVllm], None]:
    def change(fake: FakeVllm) -> None:
        fake.logprobs = lambda prompt, count: [one - nats for one in FakeVllm.logprobs(fake, prompt, count)]

    return change


def fault(path: str, *faults: Any) -> Callable[[FakeVllm], None]:
    return lambda fake: fake.faults.update({path: [*faults]})


MXFP4 = BY_NAME["mxfp4"].quantization_config(["lm_head"], torch.float32)
W8A8 = fp8.W8A8.quantization_config(["lm_head"], torch.float32)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (described(max_model_len=271), ["has max_model_len=271", "at least 272"]),
        (described(dtype="bfloat16"), ["has dtype=bfloat16", "this run: float32"]),
        (described(quantization="compressed-tensors", quantization_config=MXFP4), ["has format=mxfp4"]),
        (described(quantization="compressed-tensors", quantization_config=W8A8), ["=fp8 with FP8 activations;"]),
        (
            described(quantization="awq", quantization_config={"quant_method": "awq"}),
            ["has format=awq (quantization_c"],
        ),
        (described(quantization="experts_int8"), ["has format=experts_int8;"]),
        (described(logprobs_mode="raw_logprobs"), ["has logprobs_mode=raw_logprobs"]),
        (described(max_lora_rank=1), ["has max_lora_rank=1", "at least 8"]),
        (norms(lambda norm: norm + 0.01), ["another weight of model.layers.0.input_layernorm"]),
        (norms(torch.Tensor.bfloat16), ["model.layers.0.input_layernorm in torch.bfloat16", "allowed: torch.float32"]),
        (norms(torch.Tensor.float, 0), ["has no layer model.layers.0.input_layernorm"]),
        (
            ignores("layers.1."),
            ["no adapter in 7 of 21 layers that have one, the first model.layers.1.self_attn.q_proj"],
        ),
        (off_by(0.02), ["0.02 nats a token away", "allowed: 0.01"]),
        (fault(COMPLETIONS, refusal(400, "not JSON compliant: nan")), ["nan nats a token away"]),
        (
            fault(MODELS, refusal(401, "Unauthorized")),
            ["Type the server's key into the environment variable VLLM_API_KEY."],
        ),
        (fault(RPC, refusal(404, "Not Found")), ["refuses /collective_rpc (HTTP 404", "serve_line"]),
        (fault("/v1/load_lora_adapter", refusal(404, "No adapter found")), ["cannot load the adapter", "adapter_dir"]),
    ],
)
def test_a_server_that_does_not_fit_the_run_is_refused(
    change: Callable, parts: list[str], fake: FakeVllm, build
) -> None:
    change(fake)
    with pytest.raises(ConfigError) as caught:
        build()
    for part in (fake.url, "Type ", *parts):
        assert part in str(caught.value)


def test_a_gap_of_log_probs_by_rounding_is_allowed(fake: FakeVllm, build) -> None:
    off_by(0.005)(fake)
    build()
    assert sent(fake, COMPLETIONS)  # the log-probs were compared


# --- keys and folders


def test_a_key_comes_from_the_environment_and_stays_out_of_messages(
    fake: FakeVllm, build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "long-secret")
    build()
    assert {headers["Authorization"] for headers in fake.headers} == {"Bearer long-secret"}
    fake.faults[RPC] = [refusal(500, "who is long-secret")]
    with pytest.raises(ConfigError) as caught:
        build()
    assert "long-secret" not in str(caught.value)


def test_the_adapter_is_written_where_the_server_can_read_it(fake: FakeVllm, build, tmp_path: Path) -> None:
    """The server may run as another user, so files are as readable as the typed folder."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o775)
    engine = build(rollout__vllm_server__adapter_dir=str(shared))
    [folder] = fake.adapters.values()
    assert Path(folder).parent == shared
    assert Path(folder).stat().st_mode & 0o777 == 0o755
    assert Path(folder, "adapter_model.safetensors").stat().st_mode & 0o777 == 0o644
    engine.close()
    assert list(shared.iterdir()) == []


def test_an_adapter_that_cannot_be_written_makes_the_engine_fail(build, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    engine = build(rollout__vllm_server__adapter_dir=str(shared))
    shutil.rmtree(shared)
    with pytest.raises(EngineFailed, match=rf"^the adapter cannot be written to {shared}/.+No such file"):
        engine.sync(CLEAN)


def test_an_interrupted_write_leaves_the_previous_adapter(engine, fake: FakeVllm, monkeypatch) -> None:
    """The server may read the file at any time."""
    [folder] = fake.adapters.values()
    weights = Path(folder, "adapter_model.safetensors")
    before = weights.read_bytes()

    def break_off(tensors: dict[str, torch.Tensor], file: Path) -> None:
        file.write_bytes(before[:100])
        raise OSError("no space left")

    monkeypatch.setattr(transfer, "save_file", break_off)
    with pytest.raises(EngineFailed, match="no space left"):
        engine.sync(CLEAN)
    assert weights.read_bytes() == before


# --- commands that start a server


def test_the_command_prints_the_lines_that_start_the_server_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["+experiment=nvfp4", "rollout=vllm_server", "rollout.vllm_server.url=http://127.0.0.1:8123", "run_dir=x"]
    assert serve_line.main(words) == 0
    quantize, serve = capsys.readouterr().out.splitlines()
    assert quantize == "python -m qerl_lab.quantize model=pocket format=nvfp4 out=packed/pocket-nvfp4"
    assert " vllm serve packed/pocket-nvfp4 --host 127.0.0.1 --port 8123 " in serve
    for asked in ([], ["--help"], [*words, "-h"]):
        assert serve_line.main(asked) == 0
        assert capsys.readouterr().out == serve_line.MANUAL


@pytest.mark.parametrize(("words", "said"), [
    ("rollout=vllm_server +sweeps=lora_rank lora=rank16 seed=0,1", "make several runs, and a server serves one."),
    ("rollout=vllm_server seed=0,1", "make several runs, and a server serves one. Type one value for each key."),
    ("rollout=vllm_server resume=x", "resume=x continues a run, and here the overrides of a new run are needed."),
    ("rollout=transformers", "rollout.engine=transformers has no server. Type rollout=vllm_server."),
    ("rollout=vllm_server seed=x", "seed=x is not allowed; allowed: a whole number"),
])  # fmt: skip
def test_runs_without_a_single_server_get_no_command(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_line.main(words.split()) == 2
    assert said in capsys.readouterr().err


def test_the_command_has_the_settings_of_the_run(tiny) -> None:
    cfg = tiny(
        rollout__engine="vllm_server", format__name="bf16", lora__rank=20, rollout__vllm__kv_cache_gib=1.5,
        rollout__vllm__enforce_eager=True, rollout__vllm_server__url="http://127.0.0.1:8123", rollout__batch_size=48,
        rollout__vllm__max_num_batched_tokens=512,
    )  # fmt: skip
    [line] = server_command.commands(cfg)
    *environment, vllm, serve, model = shlex.split(line)[:5]
    assert (vllm, serve) == ("vllm", "serve")
    assert {*environment} == {"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", "VLLM_SERVER_DEV_MODE=1"}
    assert (Path(model) / "config.json").is_file()
    for words in (
        "--port 8123", "--max-model-len 272", "--max-num-seqs 48", "--max-lora-rank 32", "--dtype float32",
        "--kv-cache-memory-bytes 1610612736", "--enforce-eager", "--logprobs-mode processed_logprobs",
        "--generation-config vllm", "--max-loras 1", "--no-enable-chunked-prefill",
        "--linear-backend auto", "--worker-cls qerl_lab.rollout.vllm.worker.NormWorker",
        """--additional-config '{"qerl_lab_float32_norms": ["input_layernorm", "post_attention_layernorm"]}'""",
        "--max-num-batched-tokens 512",
    ):  # fmt: skip
        assert f" {words}" in line
    assert "--tensor-parallel-size" not in line
    cfg.rollout.vllm_server.tensor_parallel = 2
    assert " --tensor-parallel-size 2" in server_command.commands(cfg)[0]


def test_a_dense_base_is_packed_by_a_command_before_the_server_starts(tiny) -> None:
    cfg = tiny(rollout__engine="vllm_server", format__name="mxfp4", format__exponent_rule="ceil",
               format__ignore=["lm_head", "down_proj"])  # fmt: skip
    quantize, serve = server_command.commands(cfg)
    options = COMMAND.read(shlex.split(quantize)[3:])
    assert options.format_config() == cfg.format
    assert options.model == "pocket"
    assert f"vllm serve {options.out} " in serve
    cfg.format.exponent_rule = "floor"
    assert f"vllm serve {options.out} " not in server_command.commands(cfg)[1]  # another base has another folder
    cfg.model.path = "models/mine, v2 (final)"
    assert COMMAND.read(shlex.split(server_command.quantize_line(cfg, "a,b"))[3:]).model == cfg.model.path


def test_a_server_of_fp8_weights_takes_marlin(tiny) -> None:
    cfg = tiny(rollout__engine="vllm_server", format__name="fp8")
    serve = server_command.commands(cfg)[1]
    assert " VLLM_TEST_FORCE_FP8_MARLIN=1 vllm serve packed/pocket-fp8 " in serve
    assert serve.endswith(" --linear-backend marlin")
    cfg.rollout.vllm.linear_backend = "vllm"
    assert server_command.commands(cfg)[1].endswith(" --linear-backend auto")


@pytest.mark.parametrize(("rank", "buffers"), [(1, 1), (8, 8), (9, 16), (512, 512)])
def test_an_adapter_gets_the_smallest_buffers_of_vllm_that_hold_it(rank: int, buffers: int) -> None:
    assert max_rank(rank) == buffers


def test_a_rank_that_vllm_has_no_buffers_for_is_refused(tiny) -> None:
    with pytest.raises(ConfigError, match=r"lora\.rank=513 is more than vLLM takes"):
        server_command.commands(tiny(rollout__engine="vllm_server", format__name="bf16", lora__rank=513))
