"""What side_by_side.py measures beside graft. Each peer is called as its authors call it."""
import importlib.util
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import torch


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def features(u, w):
    y = torch.einsum("bthd,hed->bthe", u, w)
    return torch.softmax(torch.cat([y, -y], -1), -1)


def torch_peers(folder):
    """transformers, fla and mamba's reference, all PyTorch."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    fla = load(folder / "fla/fla/ops/linear_attn/naive.py", "fla_linear")
    # The module's other imports want a GPU; the function needs none of them.
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "mamba_ssm.ops.triton.ssd_combined"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["mamba_ssm.ops.triton.ssd_combined"].mamba_chunk_scan_combined = None
    found = sorted(folder.glob("mamba_ssm-*/mamba_ssm/modules/ssd_minimal.py"))
    ssd = load(found[0], "ssd_minimal").ssd_minimal_discrete if found else None

    def hedgehog(q, k, v, w_q, w_k):
        return fla.naive_chunk_linear_attn(features(q, w_q), features(k, w_k), v, scale=1.0, normalize=True)

    def hedgemamba(q, k, v, w_q, w_k, g):
        if ssd is None:
            raise RuntimeError("mamba's ssd_minimal is not in the peers' folder")
        x = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        y, _ = ssd(x, g, features(k, w_k), features(q, w_q), 64)
        return y[..., :-1] / (y[..., -1:] + 1e-6)

    return types.SimpleNamespace(gdn_chunk=torch_chunk_gated_delta_rule, hedgehog=hedgehog, hedgemamba=hedgemamba)


class vllm_kernels:
    def __init__(self, folder):
        self.ops, self.why = None, ""
        try:
            torch.ops.load_library(str(folder / "vllm/vllm/_C.abi3.so"))
            self.ops = torch.ops._C
        except (OSError, RuntimeError) as error:
            self.why = str(error)

    def need(self):
        if self.ops is None:
            raise RuntimeError(self.why)
        return self.ops

    def gdn(self, x):
        ops = self.need()
        b, t, h, d = x["q"].shape
        state, ends = torch.zeros(b, h, d, d), torch.tensor([0, t], dtype=torch.int32)
        index = torch.zeros(1, dtype=torch.int32)
        run = lambda: ops.chunk_gated_delta_rule_cpu(  # noqa: E731
            x["q"], x["k"], x["v"], x["g"], x["beta"].to(torch.bfloat16), state.zero_(), True, ends, False, False, index, 1e-6)[0]
        run()
        return run

    def gdn_step(self, x):
        ops = self.need()
        b, _, h, d = x["q"].shape
        q, k, v = (x[n].to(torch.bfloat16).transpose(0, 1).contiguous() for n in ("q", "k", "v"))
        a_log, dt_bias = torch.zeros(h), torch.zeros(h).bfloat16()
        a, beta = torch.randn(b, h).bfloat16(), torch.randn(b, h).bfloat16()
        state, index = x["state"].clone(), torch.arange(b, dtype=torch.int32)
        ends = torch.arange(b + 1, dtype=torch.int32)

        def run():  # its gates are its own (it computes them from a and beta): timed, not compared
            ops.fused_sigmoid_gating_delta_rule_update_cpu(
                a_log, dt_bias, q, k, v, a, beta, state, index, ends, True, 1.0, 20.0)

        run()
        return run

    def scan(self, t, h, d):
        ops = self.need()
        n = 2 * d
        x, dt, a = torch.randn(t, h, d), torch.rand(t, h), -torch.rand(h)
        k, c = torch.rand(t, h, n), torch.rand(t, h, n)
        o, state, ends = torch.zeros(t, h, d), torch.zeros(1, h, d, n), torch.tensor([0, t], dtype=torch.int32)

        def run():  # a scan of its own random numbers: timed, not compared
            ops.mamba_chunk_scan_fwd_cpu(o, state, x, dt, a, k, c, None, None, ends)

        run()
        return run


class Ggml:
    """llama.cpp's recurrences in a process of their own, which tells the seconds of each run."""

    def __init__(self, program, threads):
        self.threads = threads
        self.process = None
        if Path(program).exists():
            self.process = subprocess.Popen([str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line):
        if self.process is None:
            raise RuntimeError("peer_ggml is not in the peers' folder")
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        if not answer or answer.startswith("not understood"):
            raise RuntimeError(f"peer_ggml: {line}: {answer}")
        return answer

    def contender(self, make, inputs=None, shape=None):
        """A function that gives the result; its attribute `seconds` times the graph."""

        def prepare():
            self.ask(make)
            if inputs is not None:
                with tempfile.NamedTemporaryFile() as file:
                    for x in inputs:
                        file.write(x.float().contiguous().numpy().tobytes())
                    file.flush()
                    self.ask(f"fill {file.name}")

        def result():
            prepare()
            self.ask("run 1")
            if shape is None:
                return None
            with tempfile.NamedTemporaryFile() as file:
                self.ask(f"out {file.name}")
                n = torch.Size(shape).numel()
                data = bytearray(Path(file.name).read_bytes()[: 4 * n])  # the states follow
                return torch.frombuffer(data, dtype=torch.float32).reshape(shape)

        def seconds(wanted):
            count, once = 1, float(self.ask("run 1"))
            count = max(1, int(wanted / max(once, 1e-7)))
            return float(self.ask(f"run {count}")) / count

        result.seconds = seconds
        return result

    def gdn(self, x):
        b, t, h, d = x["q"].shape
        zero = torch.zeros_like(x["state"])
        run = self.contender(f"make gdn {b} {t} {h} {d} {self.threads}",
                             [x[n] for n in ("q", "k", "v", "g", "beta")] + [zero], (b, t, h, d))
        self.ask(f"make gdn {b} 1 {h} {d} 1")
        return run

    def scan(self, b, t, h, d):
        self.ask(f"make ssm {b} 1 {h} {d} 1")
        return self.contender(f"make ssm {b} {t} {h} {d} {self.threads}")
