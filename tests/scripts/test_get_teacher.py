"""get_teacher.py: the row order of q and k, the tokenizer, a whole small model, and bad input."""

import json
import tempfile
import unittest
from pathlib import Path

from helpers import ROOT, run

import get_teacher
import gguf
import numpy as np
import safetensors
import safetensors.numpy

GOLDEN = ROOT / "tests" / "golden"
HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 16, 4, 2, 24, 2
HEAD_DIM = HIDDEN // HEADS
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def rope_pairs_interleaved(x, angle):
    """RoPE on rows ordered as GGUF has them: dimensions 2i and 2i + 1 turn together."""
    even, odd = x[0::2], x[1::2]
    out = np.empty_like(x)
    out[0::2] = even * np.cos(angle) - odd * np.sin(angle)
    out[1::2] = odd * np.cos(angle) + even * np.sin(angle)
    return out


def rope_halves(x, angle):
    """RoPE on rows ordered as Hugging Face has them: dimensions i and i + d/2 turn together."""
    low, high = np.split(x, 2)
    return np.concatenate(
        [low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle)]
    )


def byte_alphabet() -> list[str]:
    return sorted(get_teacher.tokenizers.pre_tokenizers.ByteLevel.alphabet())


def vocabulary() -> list[str]:
    return SPECIAL + byte_alphabet() + [merge.replace(" ", "") for merge in MERGES]


def token_types() -> list[int]:
    return [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (
        len(vocabulary()) - len(SPECIAL)
    )


def gguf_weights(rng) -> dict[str, np.ndarray]:
    shapes = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (FFN, HIDDEN),
        "ffn_up": (FFN, HIDDEN),
        "ffn_down": (HIDDEN, FFN),
    }
    weights = {"token_embd.weight": (len(vocabulary()), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        weights.update({f"blk.{layer}.{name}.weight": shape for name, shape in shapes.items()})
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in weights.items()}


def write_gguf(path, weights, arch="llama", pre="smollm", rope_scaling=None, without=()):
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    if rope_scaling:
        writer.add_rope_scaling_type(rope_scaling)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary())
    writer.add_token_types(token_types())
    if "merges" not in without:
        writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, weight in weights.items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Unpermute(unittest.TestCase):
    def test_rows_by_hand(self):
        rows = np.arange(8, dtype=np.float32).reshape(8, 1)
        # Two heads of four: within each, GGUF has (0, 2, 1, 3) of Hugging Face's rows.
        got = get_teacher.unpermute(rows, heads=2)
        self.assertEqual(got.ravel().tolist(), [0, 2, 1, 3, 4, 6, 5, 7])

    def test_rope_of_both_orders_gives_one_score(self):
        rng = np.random.default_rng(1)
        for head_dim in (2, 4, 6, 64):
            q, k = rng.standard_normal((2, head_dim, 5))
            x = rng.standard_normal(5)
            turn = rng.standard_normal(head_dim // 2)
            want = rope_pairs_interleaved(q @ x, 3 * turn) @ rope_pairs_interleaved(k @ x, 7 * turn)
            q, k = get_teacher.unpermute(q, 1), get_teacher.unpermute(k, 1)
            got = rope_halves(q @ x, 3 * turn) @ rope_halves(k @ x, 7 * turn)
            self.assertAlmostEqual(got, want, places=10, msg=f"head_dim {head_dim}")

    def test_rows_that_do_not_divide(self):
        for rows, heads in ((6, 4), (9, 3), (8, 0)):
            with self.assertRaisesRegex(get_teacher.TeacherError, f"{rows} rows.*{heads} heads"):
                get_teacher.unpermute(np.zeros((rows, 2), np.float32), heads)


class Tokenizer(unittest.TestCase):
    def make(self, pre="smollm", types=None, merges=None):
        return get_teacher.make_tokenizer(
            vocabulary(), token_types() if types is None else types, MERGES if merges is None else merges, pre
        )

    def test_splits_digits_and_merges_words(self):
        tokens = self.make().encode("hello hello 12").tokens
        # The merge of 1 and 2 exists but must never apply: digits stand alone.
        self.assertEqual(tokens, ["hello", "Ġhello", "Ġ", "1", "2"])

    def test_special_tokens_are_matched_first_and_flagged(self):
        tokenizer = self.make()
        self.assertEqual(tokenizer.encode("hello<|im_end|>hello").tokens, ["hello", "<|im_end|>", "hello"])
        added = tokenizer.get_added_tokens_decoder()
        self.assertEqual(sorted(added), [0, 1, 2])
        for index, token in added.items():
            self.assertEqual(token.content, SPECIAL[index])
            self.assertTrue(token.special)
            self.assertFalse(token.normalized or token.lstrip or token.rstrip or token.single_word)

    def test_user_defined_tokens_are_added_but_not_special(self):
        types = token_types()
        types[0] = gguf.TokenType.USER_DEFINED
        added = self.make(types=types).get_added_tokens_decoder()
        self.assertFalse(added[0].special)
        self.assertTrue(added[1].special)

    def test_any_bytes_come_back(self):
        tokenizer = self.make()
        for text in ("", " ", "a\n\n \tb", "naïve 日本 👨‍👩‍👧", "\x00\x7f\u0085", "1234.5"):
            ids = tokenizer.encode(text).ids
            self.assertEqual(tokenizer.decode(ids, skip_special_tokens=False), text)

    def test_same_split_as_the_golden_tokenizer(self):
        golden = GOLDEN / "tokenizers" / "smollm_style.tokenizer.json"
        want = json.loads(golden.read_text(encoding="utf-8"))["pre_tokenizer"]
        got = json.loads(self.make().to_str())["pre_tokenizer"]
        self.assertEqual(got, want)

    def test_wrong_input_is_named(self):
        with self.assertRaisesRegex(get_teacher.TeacherError, "'qwen2', expected 'smollm'"):
            self.make(pre="qwen2")
        with self.assertRaisesRegex(get_teacher.TeacherError, "tokens but 2 token types"):
            self.make(types=[1, 1])
        with self.assertRaisesRegex(get_teacher.TeacherError, "do not fit.*zz"):
            self.make(merges=["zz qq"])


class WholeModel(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.dir = Path(scratch.name)
        self.gguf = self.dir / "tiny.gguf"
        self.out = self.dir / "models" / "tiny"
        self.weights = gguf_weights(np.random.default_rng(0))

    def convert(self):
        return run(get_teacher, self.out, "--gguf", self.gguf)

    def fails(self, pattern):
        done = self.convert()
        self.assertEqual(done.status, 1, done.stderr)
        self.assertRegex(done.stderr, pattern)
        left = [p for p in self.dir.rglob("*") if p.is_file() and p != self.gguf]
        self.assertEqual(left, [], "something half-made was left")

    def test_every_tensor_arrives_under_its_name(self):
        write_gguf(self.gguf, self.weights)
        done = self.convert()
        self.assertEqual(done.status, 0, done.stderr)
        with safetensors.safe_open(self.out / "model.safetensors", "np") as file:
            self.assertEqual(file.metadata(), {"format": "pt"})
            got = {name: file.get_tensor(name) for name in file.keys()}
        self.assertEqual(len(got), len(self.weights))
        self.assertNotIn("lm_head.weight", got)
        for name, heads in (("q", HEADS), ("k", KV_HEADS)):
            stored = self.weights[f"blk.1.attn_{name}.weight"]
            want = stored.reshape(heads, HEAD_DIM // 2, 2, HIDDEN).transpose(0, 2, 1, 3).reshape(stored.shape)
            np.testing.assert_array_equal(got[f"model.layers.1.self_attn.{name}_proj.weight"], want)
        for theirs, ours in (
            ("token_embd", "model.embed_tokens"),
            ("output_norm", "model.norm"),
            ("blk.0.attn_v", "model.layers.0.self_attn.v_proj"),
            ("blk.0.attn_output", "model.layers.0.self_attn.o_proj"),
            ("blk.1.ffn_down", "model.layers.1.mlp.down_proj"),
            ("blk.1.ffn_norm", "model.layers.1.post_attention_layernorm"),
        ):
            np.testing.assert_array_equal(got[f"{ours}.weight"], self.weights[f"{theirs}.weight"])
            self.assertEqual(got[f"{ours}.weight"].dtype, np.float32)

    def test_config_and_tokenizer_files(self):
        write_gguf(self.gguf, self.weights)
        self.assertEqual(self.convert().status, 0)
        config = json.loads((self.out / "config.json").read_text())
        want = {
            "model_type": "llama", "hidden_size": HIDDEN, "num_attention_heads": HEADS, "head_dim": HEAD_DIM,
            "num_key_value_heads": KV_HEADS, "num_hidden_layers": LAYERS, "intermediate_size": FFN,
            "rope_theta": 100000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
            "vocab_size": len(vocabulary()), "max_position_embeddings": 64, "torch_dtype": "float32",
        }  # fmt: skip
        self.assertEqual({key: config[key] for key in want}, want)
        generation = json.loads((self.out / "generation_config.json").read_text())
        self.assertEqual(generation, {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
        tokenizer = json.loads((self.out / "tokenizer_config.json").read_text())
        self.assertEqual(tokenizer["chat_template"], TEMPLATE)
        self.assertEqual(tokenizer["eos_token"], "<|im_end|>")
        loaded = get_teacher.tokenizers.Tokenizer.from_file(str(self.out / "tokenizer.json"))
        self.assertEqual(loaded.encode(" hello1").tokens, ["Ġhello", "1"])

    def test_untied_head_is_written(self):
        head = np.ones((len(vocabulary()), HIDDEN), np.float32)
        write_gguf(self.gguf, self.weights | {"output.weight": head})
        self.assertEqual(self.convert().status, 0)
        got = safetensors.numpy.load_file(self.out / "model.safetensors")
        np.testing.assert_array_equal(got["lm_head.weight"], head)
        self.assertFalse(json.loads((self.out / "config.json").read_text())["tie_word_embeddings"])

    def test_quantised_weights_are_dequantised(self):
        weight = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
        packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
        got = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
        np.testing.assert_allclose(got, weight, atol=1 / 127)

    def test_second_run_leaves_it_alone(self):
        write_gguf(self.gguf, self.weights)
        self.assertEqual(self.convert().status, 0)
        before = (self.out / "model.safetensors").stat().st_mtime_ns
        done = self.convert()
        self.assertEqual(done.status, 0, done.stderr)
        self.assertIn("made already", done.stdout)
        self.assertEqual((self.out / "model.safetensors").stat().st_mtime_ns, before)

    def test_refuses_a_folder_with_other_things(self):
        write_gguf(self.gguf, self.weights)
        self.out.mkdir(parents=True)
        (self.out / "thesis.txt").write_text("mine")
        done = self.convert()
        self.assertEqual(done.status, 1)
        self.assertRegex(done.stderr, "exists and is not this teacher: remove it")
        self.assertEqual([p.name for p in self.out.iterdir()], ["thesis.txt"])

    def test_bad_files(self):
        self.fails("tiny.gguf is not a file")
        self.gguf.write_text("just text, and long enough to be read as a header of something")
        self.fails("not a readable GGUF file")
        write_gguf(self.gguf, self.weights)
        self.gguf.write_bytes(self.gguf.read_bytes()[:-1000])
        self.fails("not a readable GGUF file")

    def test_models_that_are_not_a_plain_llama(self):
        write_gguf(self.gguf, self.weights, arch="qwen2")
        self.fails("architecture 'qwen2' is not supported")
        write_gguf(self.gguf, self.weights, rope_scaling=gguf.RopeScalingType.YARN)
        self.fails("rope.scaling.type")
        write_gguf(self.gguf, self.weights | {"rope_freqs.weight": np.ones(2, np.float32)})
        self.fails("tensor 'rope_freqs.weight'")
        write_gguf(self.gguf, {k: v for k, v in self.weights.items() if k != "blk.1.ffn_up.weight"})
        self.fails(r"missing \['model.layers.1.mlp.up_proj.weight'\]")
        write_gguf(self.gguf, self.weights, without=("merges",))
        self.fails("key 'tokenizer.ggml.merges' is missing")


if __name__ == "__main__":
    unittest.main()
