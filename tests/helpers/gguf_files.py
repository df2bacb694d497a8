"""Write a small model as a GGUF file: Q4_1 blocks, the embedded policy's tokenizer and chat template."""

import json
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, TokenType
from gguf.quants import dequantize, quantize

from qerl_lab.model.on_disk import ASSETS

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS = 2, 64, 96, 4, 2
KIND = GGMLQuantizationType.Q4_1
END, ADDED = "<|im_end|>", "<|user|>"
BIASED = {"qwen2": ("attn_q", "attn_k", "attn_v"), "starcoder2": ("attn", "ffn", "output_norm")}  # names begin so


def write_gguf(
    file: Path,
    *,
    seed: int = 0,
    layers: int = LAYERS,
    rope_scaling: str = "",
    bias: bool = False,
    two_ends: bool = False,
    architecture: str = "llama",
    rope_base: float = 10_000.0,
) -> dict[str, np.ndarray]:
    """Write the file; return the dequantized float32 values of its tensors, by name in the file.

    With fewer `layers` than LAYERS the tensors of the last ones are not in the file, as in the first part of a split
    file. `rope_scaling` is "llama3", which makes a tensor, or a type of llama.cpp, such as "yarn".
    With `bias` an attention layer has a bias, for which transformers has no place in a llama. With `two_ends` a text
    ends with another token than an answer, as in Gemma. The vocabulary has the control token ADDED, which the embedded
    policy lacks, if `architecture` is not llama. Only a llama, a qwen2 and a starcoder2 are whole.
    """
    writer = GGUFWriter(file, architecture)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(rope_base)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_layer_norm_eps(1e-5)
    vocabulary = _add_tokenizer(writer, two_ends, [] if architecture == "llama" else [ADDED])
    if rope_scaling == "llama3":
        writer.add_tensor("rope_freqs.weight", np.array([1, 1, 1, 1, 2, 4, 8, 8], np.float32))
    elif rope_scaling:
        writer.add_rope_scaling_type(RopeScalingType(rope_scaling))
        writer.add_rope_scaling_factor(4.0)
    if bias:
        writer.add_tensor("blk.0.attn_q.bias", np.ones(HIDDEN, np.float32))
    values = _add_tensors(writer, architecture, vocabulary, layers, np.random.default_rng(seed))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _add_tokenizer(writer: GGUFWriter, two_ends: bool, control: list[str]) -> int:
    """Add the embedded policy's tokenizer and the tokens `control`; return the token count.

    The end token is given by id as in all GGUF files.
    """
    stored = json.loads((ASSETS / "tokenizer.json").read_text())
    added = {entry["content"]: entry for entry in stored["added_tokens"]}
    ids = stored["model"]["vocab"] | {token: entry["id"] for token, entry in added.items()}
    tokens = sorted(ids, key=ids.__getitem__) + control
    special = {*control, *(token for token, entry in added.items() if entry["special"])}
    kinds = {token: TokenType.CONTROL if token in special else TokenType.USER_DEFINED for token in (*added, *control)}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([kinds.get(token, TokenType.NORMAL) for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in stored["model"]["merges"]])
    writer.add_bos_token_id(ids["<|im_start|>"])
    writer.add_eos_token_id(ids["<|endoftext|>" if two_ends else END])
    if two_ends:
        writer.add_eot_token_id(ids[END])
    writer.add_pad_token_id(ids["<|endoftext|>"])
    writer.add_unk_token_id(ids["<|endoftext|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template((ASSETS / "chat_template.jinja").read_text())
    return len(tokens)


def _add_tensors(
    writer: GGUFWriter, architecture: str, vocabulary: int, layers: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:  # fmt: skip
    kv = HIDDEN * KV_HEADS // HEADS
    shapes = {"token_embd": (vocabulary, HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(layers):
        named = {
            "attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER),
            "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in named.items()}
    if architecture == "starcoder2":
        shapes = {name: shape for name, shape in shapes.items() if "gate" not in name}
    for name, shape in shapes.items():
        if name.split(".")[-1].startswith(BIASED.get(architecture, ())):
            writer.add_tensor(f"{name}.bias", np.zeros(shape[0], np.float32))
    values = {}
    for name, shape in shapes.items():
        drawn = 1 + 0.1 * rng.standard_normal(shape) if len(shape) == 1 else 0.1 * rng.standard_normal(shape)
        drawn = drawn.astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", drawn)
        else:
            blocks = quantize(drawn, KIND)
            writer.add_tensor(f"{name}.weight", blocks, raw_dtype=KIND)
            drawn = dequantize(blocks, KIND)
        values[f"{name}.weight"] = drawn
    return values
