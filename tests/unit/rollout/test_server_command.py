"""The line that starts a vLLM server for a run, and what is refused before there is one."""

import shlex
from pathlib import Path

import pytest

from qerl_lab.config.option import ConfigError
from qerl_lab.rollout.vllm_server import server_command


def test_the_line_has_the_words_of_the_run(tiny) -> None:
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


def test_a_base_that_is_packed_while_it_is_read_is_packed_first(tiny) -> None:
    cfg = tiny(rollout__engine="vllm_server", format__name="mxfp4", format__exponent_rule="ceil",
               format__ignore=["lm_head", "down_proj"])  # fmt: skip
    quantize, serve = server_command.commands(cfg)
    from qerl_lab.quantize.__main__ import COMMAND

    options = COMMAND.read(shlex.split(quantize)[3:])
    assert options.format_config() == cfg.format
    assert options.model == "pocket"
    assert f"vllm serve {options.out} " in serve
    cfg.format.exponent_rule = "floor"
    assert f"vllm serve {options.out} " not in server_command.commands(cfg)[1]  # another base, in another folder
    cfg.model.path = "models/mine, v2 (final)"
    assert COMMAND.read(shlex.split(server_command.quantize_line(cfg, "a,b"))[3:]).model == cfg.model.path


def test_a_server_of_fp8_weights_takes_marlin(tiny) -> None:
    cfg = tiny(rollout__engine="vllm_server", format__name="fp8")
    serve = server_command.commands(cfg)[1]
    assert " VLLM_TEST_FORCE_FP8_MARLIN=1 vllm serve packed/pocket-fp8 " in serve
    assert serve.endswith(" --linear-backend marlin")
    cfg.rollout.vllm.linear_backend = "vllm"
    assert server_command.commands(cfg)[1].endswith(" --linear-backend auto")


def test_a_rank_that_vllm_has_no_buffers_for_is_refused(tiny) -> None:
    with pytest.raises(ConfigError, match=r"lora\.rank=513 is more than vLLM takes"):
        server_command.commands(tiny(rollout__engine="vllm_server", format__name="bf16", lora__rank=513))
