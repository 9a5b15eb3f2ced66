#!/usr/bin/env python3
"""hostapp beside PyTorch and transformers: the same teacher, the same texts, the same work, in turn.

    ~/peers/venv/bin/python bench/whole_model.py --teacher data/teacher/SmolLM2-135M-Instruct \\
        --text data/text/emma.txt --held-out data/text/persuasion.txt

calibrate   one optimizer step of each of the teacher's layers (2 x 256 tokens, the gdn block, relative L2 to the
            attention's output, AdamW): tokens a second through all layers. PyTorch: transformers' chunked delta rule.
kl          one distillation step (4 x 512 tokens, all layers gdn): teacher, student, KL over the vocabulary, AdamW.
forward     the teacher over 512 and 2048 tokens.
decode      the student's greedy decoding behind a context against the teacher's in the same program.
Each side runs `--rounds` times, taking turns; what is printed is the median of the rounds' ratios and their range.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


# ------------------------------------------------------------------ the same in PyTorch


class GatedDeltaNet(torch.nn.Module):
    """The block of recipes/gdn-taylor.toml: no silu on values, the teacher's RoPE, gates with biases."""

    def __init__(self, model, heads, dim, rotate):
        super().__init__()
        linear = lambda n, bias=False: torch.nn.Linear(model, n, bias=bias)  # noqa: E731
        self.heads, self.dim, self.rotate = heads, dim, rotate
        self.q_proj, self.k_proj, self.v_proj = linear(heads * dim), linear(heads * dim), linear(heads * dim)
        self.a_proj, self.b_proj, self.g_proj = linear(heads), linear(heads, True), linear(heads * dim, True)
        self.o_proj = torch.nn.Linear(heads * dim, model, bias=False)
        self.dt_bias, self.A_log = torch.nn.Parameter(torch.zeros(heads)), torch.nn.Parameter(torch.zeros(heads))
        self.o_norm = torch.nn.Parameter(torch.ones(dim))

    def forward(self, x):
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

        split = lambda y: y.view(*y.shape[:2], self.heads, self.dim)  # noqa: E731
        q, k, v = F.silu(split(self.q_proj(x))), F.silu(split(self.k_proj(x))), split(self.v_proj(x))
        q, k = self.rotate(q), self.rotate(k)
        q, k = (u / (u.square().sum(-1, keepdim=True) + 1e-6).sqrt() for u in (q, k))
        g = -self.A_log.exp() * F.softplus(self.a_proj(x) + self.dt_bias)
        o, _ = torch_chunk_gated_delta_rule(q, k, v, g, self.b_proj(x).sigmoid())
        o = o * (o.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.o_norm
        return self.o_proj(o.flatten(2) * F.silu(self.g_proj(x)))


class Torch:
    def __init__(self, teacher, text):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
        self.ids = AutoTokenizer.from_pretrained(teacher)(text.read_text()[:400_000], return_tensors="pt").input_ids
        config = self.model.config
        self.heads, self.dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        self.hidden, self.layers = config.hidden_size, config.num_hidden_layers
        angles = lambda t: torch.outer(  # noqa: E731
            torch.arange(t), 10000.0 ** (-torch.arange(0, self.dim, 2) / self.dim)).float()
        self.angles = {t: angles(t) for t in (256, 512)}

    def rotate(self, u):
        a = self.angles[u.shape[1]][None, :, None]
        x, y = u.chunk(2, -1)
        return torch.cat([x * a.cos() - y * a.sin(), y * a.cos() + x * a.sin()], -1)

    def mixers(self):
        torch.manual_seed(1)
        return [GatedDeltaNet(self.hidden, self.heads, self.dim, self.rotate) for _ in range(self.layers)]

    def calibrate(self):
        """Seconds of one step over all layers; the teacher's signals are there already, as they are for graft."""
        if not hasattr(self, "signals"):
            seen, hooks = [], []
            for layer in self.model.model.layers:
                hooks.append(layer.self_attn.register_forward_hook(
                    lambda _, __, kwargs, y: seen.append((kwargs["hidden_states"].detach(), y[0].detach())), with_kwargs=True))
            with torch.no_grad():
                self.model(self.ids[:, :512].reshape(2, 256), use_cache=False, logits_to_keep=1)
            for hook in hooks:
                hook.remove()
            self.signals, self.students = seen, self.mixers()
            self.optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in self.students]
        start = time.perf_counter()
        for (x, y), mixer, optimizer in zip(self.signals, self.students, self.optimizers):
            optimizer.zero_grad()
            ((mixer(x) - y).square().sum() / y.square().sum()).backward()
            torch.nn.utils.clip_grad_norm_(mixer.parameters(), 1.0)
            optimizer.step()
        return time.perf_counter() - start

    def kl(self):
        from transformers import AutoModelForCausalLM

        if not hasattr(self, "student"):
            self.student = AutoModelForCausalLM.from_config(self.model.config)
            self.student.load_state_dict(self.model.state_dict())
            for layer, mixer in zip(self.student.model.layers, self.mixers()):
                layer.self_attn = Wrapped(mixer)
            for p in self.student.parameters():
                p.requires_grad_(False)
            trained = [p for layer in self.student.model.layers for p in layer.self_attn.parameters()]
            for p in trained:
                p.requires_grad_(True)
            self.optimizer = torch.optim.AdamW(trained, lr=2e-4)
        ids = self.ids[:, :2048].reshape(4, 512)
        start = time.perf_counter()
        with torch.no_grad():
            target = self.model(ids, use_cache=False).logits.log_softmax(-1)
        self.optimizer.zero_grad()
        logits = self.student(ids, use_cache=False).logits.log_softmax(-1)
        F.kl_div(logits, target, log_target=True, reduction="sum").div(ids.numel()).backward()
        self.optimizer.step()
        return time.perf_counter() - start

    def forward(self, tokens):
        with torch.no_grad():
            start = time.perf_counter()
            self.model(self.ids[:, :tokens], use_cache=False, logits_to_keep=1)
            return time.perf_counter() - start


class Wrapped(torch.nn.Module):
    """A mixer where transformers calls an attention."""

    def __init__(self, mixer):
        super().__init__()
        self.mixer = mixer

    def forward(self, hidden_states, *_, **__):
        return self.mixer(hidden_states), None


# ------------------------------------------------------------------ hostapp


class Hostapp:
    def __init__(self, args, work):
        self.args, self.work, self.program = args, work, args.hostapp

    def run(self, *words):
        done = subprocess.run([self.program, *map(str, words), "--threads", str(self.args.threads)],
                              capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"hostapp {' '.join(map(str, words))} failed:\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def calibrate(self):
        """Seconds that a step over all layers takes."""
        out = self.work / "calibrated"
        said = self.run("--mixer", "gdn", "--init", "projection_copy", "--recipe", "none",
                        "--mixer.options.silu_v", "false", "--mixer.options.rope", "true",
                        "--mixer.options.write_gate_bias", "true", "--mixer.options.output_gate_bias", "true",
                        "--objective", "layer_alignment", "--calibrate.objective.options.loss", "l2",
                        "--calibrate.objective.options.relative", "true", "--teacher", self.args.teacher, "--text", self.args.text,
                        "--eval-text", self.args.held_out, "--eval.windows", 1, "--agreement.prompts", 1,
                        "--agreement.tokens", 1, "--calibrate.steps", 10, "--calibrate.tokens", 5120, "--out", out, "--force")
        for line in said.splitlines():
            if line.startswith("calibration: "):
                return 512 * 30 / float(line.split()[1])
        sys.exit("hostapp printed no speed of its calibration:\n" + said)

    def kl(self):
        out = self.work / "distilled"
        self.run("train", "distil", "--teacher", self.args.teacher, "--student", self.work / "calibrated/student",
                 "--text", self.args.text, "--eval-text", self.args.held_out, "--out", out, "--force",
                 "--stage.distil.batch", 4, "--stage.distil.tokens", 4 * 512 * 4, "--eval.windows", 1)
        speeds = [json.loads(line)["tok_per_s"] for line in (out / "metrics.jsonl").read_text().splitlines() if "tok_per_s" in line]
        return 2048 / max(speeds)

    def compare(self, contexts):
        out = self.work / "compare.json"
        self.run("compare", self.args.teacher, self.work / "calibrated/student", "--text", self.args.held_out, "--out", out,
                 "--force", "--eval.windows", 1, "--agreement.prompts", 0, "--needle.lengths", "[]",
                 "--speed.contexts", *contexts)
        models = json.loads(out.read_text())["models"]
        return [{s["context"]: s for s in m["speed"]} for m in models]


# ------------------------------------------------------------------ in turn


def turns(name, rounds, ours, theirs, tokens):
    pairs = []
    theirs()
    for i in range(rounds):
        pair = {}
        for side, run in ((0, ours), (1, theirs)) if i % 2 == 0 else ((1, theirs), (0, ours)):
            pair[side] = run()
        pairs.append(pair)
    ratios = sorted(p[1] / p[0] for p in pairs)
    print(f"{name:24} graft {tokens / min(p[0] for p in pairs):9.1f} tokens/s, PyTorch {tokens / min(p[1] for p in pairs):9.1f}: "
          f"x{statistics.median(ratios):.2f} ({ratios[0]:.2f}..{ratios[-1]:.2f})", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--hostapp", type=Path, default=ROOT / "build/release/bin/hostapp")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="calibrate,kl,forward,decode")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    only = args.only.split(",")
    with tempfile.TemporaryDirectory() as folder:
        app, peer = Hostapp(args, Path(folder)), Torch(args.teacher, args.text)
        app.calibrate()  # the student that the others need
        if "calibrate" in only:
            turns("calibrate", args.rounds, app.calibrate, peer.calibrate, 512)
        if "kl" in only:
            turns("kl", args.rounds, app.kl, peer.kl, 2048)
        if "forward" in only:
            for tokens in (512, 2048):
                ours = lambda: tokens / app.compare([tokens])[0][tokens]["prefill_tokens_per_second"]  # noqa: E731
                turns(f"forward T={tokens}", args.rounds, ours, lambda: peer.forward(tokens), tokens)
        if "decode" in only:
            contexts = [512, 2048, 8000]
            teacher, student = app.compare(contexts)
            for c in contexts:
                fast, slow = (m[c]["decode_tokens_per_second"] for m in (student, teacher))
                print(f"decode behind {c:5}      student {fast:.1f} tokens/s, teacher {slow:.1f}: x{fast / slow:.2f}; "
                      f"state {student[c]['state_bytes'] / 2**20:.2f} and {teacher[c]['state_bytes'] / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
