#!/usr/bin/env python3
"""graft's kernels beside their peers, on the same inputs, in turn, in one run.

    bench/peers.sh ~/peers                                     once
    cmake --preset release -DGRAFT_BUILD_BENCHMARKS=ON && cmake --build build/release --target graft_bench
    ~/peers/venv/bin/python bench/side_by_side.py --peers ~/peers [--only gdn.forward] [--threads 2] [--rounds 9]

Each line is one piece of work at one shape. Every contender's result is compared with a float64 recurrence first (at most
512 tokens of it); one that is wrong is not timed. Then each runs once a round, for `--rounds` rounds, in an order that
turns; a round's ratio is the peer's time over graft's. Printed are the median ratio, the quartiles, and how far graft is
from the machine's limit (floating-point peak, or bandwidth for decoding), measured in the same run.
"""
import argparse
import ctypes
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # several thread pools share the cores: none may spin
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from peers import Ggml, torch_peers, vllm_kernels  # noqa: E402

SHAPES = ((9, 64), (16, 128))  # heads, head dimension
LENGTHS = (512, 2048, 8192)
BATCHES = (1, 8, 32)  # of decoding
CHECKED = 512  # tokens that the float64 recurrence goes through


# ------------------------------------------------------------------ inputs and truth


def gdn_inputs(b, t, h, d, dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    unit = lambda: F.normalize(torch.randn(b, t, h, d, generator=rng), dim=-1)  # noqa: E731
    q, k = unit(), unit()
    v, beta = torch.randn(b, t, h, d, generator=rng), torch.rand(b, t, h, generator=rng)
    g = F.logsigmoid(torch.randn(b, t, h, generator=rng) + 3)
    state = torch.randn(b, h, d, d, generator=rng) * 0.1
    return dict(q=q.to(dtype), k=k.to(dtype), v=v.to(dtype), g=g, beta=beta, state=state)


def gdn_truth(x, with_state):
    q, k, v, g, beta, s = (x[n].double() for n in ("q", "k", "v", "g", "beta", "state"))
    s = s if with_state else torch.zeros_like(s)
    out = []
    for i in range(min(q.shape[1], CHECKED)):
        s = s * g[:, i, :, None, None].exp()
        u = (v[:, i] - torch.einsum("bhkv,bhk->bhv", s, k[:, i])) * beta[:, i, :, None]
        s = s + k[:, i, :, :, None] * u[:, :, None, :]
        out.append(torch.einsum("bhkv,bhk->bhv", s, q[:, i]) * q.shape[-1] ** -0.5)
    return torch.stack(out, 1)


def linear_inputs(b, t, h, d):
    x = gdn_inputs(b, t, h, d)
    rng = torch.Generator().manual_seed(1)
    x["w_q"], x["w_k"] = (torch.randn(h, d, d, generator=rng) * d**-0.5 for _ in range(2))
    return x


def features(u, w):
    y = torch.einsum("bthd,hed->bthe", u, w)
    return torch.softmax(torch.cat([y, -y], -1), -1)


def linear_truth(x, decay):
    q, k = features(x["q"].double(), x["w_q"].double()), features(x["k"].double(), x["w_k"].double())
    v, g = x["v"].double(), x["g"].double()
    n = min(q.shape[1], CHECKED)
    total = torch.cumsum(g[:, :n] if decay else torch.zeros_like(g[:, :n]), 1).transpose(1, 2)
    scores = torch.einsum("bthf,bshf->bhts", q[:, :n], k[:, :n])
    scores = (scores * (total[..., :, None] - total[..., None, :]).exp()).tril()
    return torch.einsum("bhts,bshv->bthv", scores / (scores.sum(-1, keepdim=True) + 1e-20), v[:, :n])


# ------------------------------------------------------------------ graft


class Graft:
    """The C functions of kernels_c.cpp."""

    class Shape(ctypes.Structure):
        _fields_ = [(n, ctypes.c_int64) for n in ("batch", "tokens", "heads", "key_dim", "value_dim", "chunk")]

    def __init__(self, library, threads):
        self.lib, self.threads = ctypes.CDLL(str(library)), ctypes.c_int(threads)
        self.lib.graft_bench_isa.restype = ctypes.c_char_p
        self.lib.graft_bench_peak.restype = ctypes.c_double
        self.lib.graft_bench_triad.restype = ctypes.c_double

    def call(self, name, shape, *tensors):
        pointers = [ctypes.c_void_p(t.data_ptr() if t is not None else None) for t in tensors]
        done = getattr(self.lib, "graft_bench_" + name)(ctypes.byref(shape), *pointers, self.threads)
        if done != 0:
            raise RuntimeError(f"graft_bench_{name} returned {done}")

    def shape(self, x, chunk=64):
        b, t, h, d = x["q"].shape
        return self.Shape(b, t, h, d, x["v"].shape[-1], chunk)

    def gdn_forward(self, x):
        shape, o = self.shape(x), torch.empty_like(x["v"])
        name = "gdn_forward_bf16" if o.dtype == torch.bfloat16 else "gdn_forward"
        return lambda: (self.call(name, shape, x["q"], x["k"], x["v"], x["g"], x["beta"], o), o)[1]

    def gdn_step(self, x):
        shape, o, state = self.shape(x), torch.empty_like(x["v"]), x["state"].clone()
        return lambda: (self.call("gdn_step", shape, x["q"], x["k"], x["v"], x["g"], x["beta"], state, o), o)[1]

    def gdn_both(self, x):
        shape, o = self.shape(x), torch.empty_like(x["v"])
        d_o, grads = torch.ones_like(o), [torch.empty_like(x[n]) for n in ("q", "k", "v", "g", "beta")]
        args = [x[n] for n in ("q", "k", "v", "g", "beta")]
        return lambda: (self.call("gdn_forward_backward", shape, *args, o, d_o, *grads), o)[1]

    def linear(self, x, decay, backward):
        shape, o, d_o = self.shape(x), torch.empty_like(x["v"]), torch.ones_like(x["v"])
        args = [x["q"], x["k"], x["v"], x["g"] if decay else None, x["w_q"], x["w_k"], o]
        if not backward:
            return lambda: (self.call("linear_forward", shape, *args), o)[1]
        grads = [torch.empty_like(x[n]) for n in ("q", "k", "v")] + [torch.empty_like(x["g"]) if decay else None]
        grads += [torch.empty_like(x["w_q"]), torch.empty_like(x["w_k"])]
        return lambda: (self.call("linear_forward_backward", shape, *args, d_o, *grads), o)[1]

    def scan(self, b, t, h, d):
        rng = torch.Generator().manual_seed(2)
        c, k = (torch.rand(b, t, h, 2 * d, generator=rng) for _ in range(2))
        v, g = torch.rand(b, t, h, d, generator=rng), -torch.rand(b, t, h, generator=rng) * 0.1
        shape, o = self.Shape(b, t, h, 2 * d, d, 64), torch.empty(b, t, h, d)
        return lambda: (self.call("scan", shape, c, k, v, g, o), o)[1]


def forward_backward(function, inputs):
    leaves = [x.detach().clone().requires_grad_(True) for x in inputs]
    upstream = torch.ones_like(function(*leaves).detach())

    def run():
        for x in leaves:
            x.grad = None
        y = function(*leaves)
        y.backward(upstream)
        return y.detach()

    return run


# ------------------------------------------------------------------ the work


class Case:
    """One piece of work at one shape: contenders by name, ours first; each is a function of no argument."""

    def __init__(self, name, where, flops=0, bytes_moved=0, truth=None, tolerance=1e-5):
        self.name, self.where, self.flops, self.bytes_moved = name, where, flops, bytes_moved
        self.truth, self.tolerance, self.contenders = truth, tolerance, {}

    with_peers = True

    def ours(self, graft, before, make):
        self.add("graft", lambda: make(graft))
        if before is not None:
            self.add("before", lambda: make(before))

    def add(self, name, make):
        if name not in ("graft", "before") and not self.with_peers:
            return
        try:
            self.contenders[name] = make()
        except Exception as error:  # a peer that this machine cannot run is said, not hidden
            print(f"  {self.name} {self.where}: no {name}: {str(error).splitlines()[0][:150]}", flush=True)


def peers_in(folder, threads):
    if folder is None:
        return None, None, None
    return torch_peers(folder), vllm_kernels(folder), Ggml(folder / "peer_ggml", threads)


def gdn_cases(graft, before, peers, vllm, ggml):
    for h, d in SHAPES:
        for t in LENGTHS:
            x, where = gdn_inputs(1, t, h, d), f"H{h} D{d} T={t}"
            flops = 6 * d * d * h * t
            args = [x[n] for n in ("q", "k", "v", "g", "beta")]
            case = Case("gdn.forward.fp32", where, flops, truth=lambda x=x: gdn_truth(x, False))
            case.ours(graft, before, lambda g: g.gdn_forward(x))
            case.add("transformers", lambda: no_grad(lambda: peers.gdn_chunk(*args)[0]))
            case.add("llama.cpp", lambda: ggml.gdn(x))
            yield case
            case = Case("gdn.forward_backward.fp32", where, 3 * flops, truth=lambda x=x: gdn_truth(x, False))
            case.ours(graft, before, lambda g: g.gdn_both(x))
            case.add("transformers", lambda: forward_backward(lambda *a: peers.gdn_chunk(*a)[0], args))
            yield case
            y = gdn_inputs(1, t, h, d, torch.bfloat16)
            case = Case("gdn.forward.bf16", where, flops, truth=lambda y=y: gdn_truth(y, False), tolerance=5e-3)
            case.ours(graft, before, lambda g: g.gdn_forward(y))
            case.add("vLLM", lambda: vllm.gdn(y))
            yield case
        for b in BATCHES:
            x = gdn_inputs(b, 1, h, d)
            case = Case("gdn.decode", f"H{h} D{d} B={b}", bytes_moved=8 * d * d * h * b)
            case.ours(graft, before, lambda g: g.gdn_step(x))
            case.add("llama.cpp", lambda: ggml.gdn(x))
            case.add("vLLM", lambda: vllm.gdn_step(x))
            yield case


def linear_cases(graft, before, peers, vllm, ggml):
    for h, d in SHAPES:
        for t in LENGTHS:
            x, where, flops = linear_inputs(1, t, h, d), f"H{h} D{d} T={t}", (8 * d * d + 4 * d * d) * h * t
            for mixer, peer, decay in (("hedgehog", "fla", False), ("hedgemamba", "mamba", True)):
                theirs = getattr(peers, mixer, None)
                args = [x[n] for n in (["q", "k", "v", "w_q", "w_k"] + (["g"] if decay else []))]
                for both in (False, True):
                    case = Case(f"{mixer}.forward" + ("_backward" if both else ""), where, flops * (3 if both else 1),
                                truth=lambda x=x, decay=decay: linear_truth(x, decay), tolerance=2e-3)
                    case.ours(graft, before, lambda g: g.linear(x, decay, both))
                    case.add(peer, lambda: forward_backward(theirs, args) if both else no_grad(lambda: theirs(*args)))
                    yield case
            case = Case("scan", where, 8 * d * d * h * t)
            case.ours(graft, before, lambda g: g.scan(1, t, h, d))
            case.add("llama.cpp", lambda: ggml.scan(1, t, h, d))
            case.add("vLLM", lambda: vllm.scan(t, h, d))
            yield case


def no_grad(function):
    def run():
        with torch.no_grad():
            return function()

    return run


# ------------------------------------------------------------------ measuring


def scaling(library):
    """How time grows with the tokens (the exponent of a least-squares line through the logarithms), and with a thread less."""
    lengths = [2048 * 2**i for i in range(5)]
    h, d = SHAPES[0]
    works = {
        "gdn.forward": lambda g, t: g.gdn_forward(gdn_inputs(1, t, h, d)),
        "gdn.forward_backward": lambda g, t: g.gdn_both(gdn_inputs(1, t, h, d)),
        "hedgehog.forward": lambda g, t: g.linear(linear_inputs(1, t, h, d), False, False),
        "hedgemamba.forward_backward": lambda g, t: g.linear(linear_inputs(1, t, h, d), True, True),
    }
    for name, make in works.items():
        times = {}
        for threads in (1, 2):
            graft = Graft(library, threads)
            runs = [make(graft, t) for t in lengths]
            for _ in range(3):
                for t, run in zip(lengths, runs):
                    times[threads, t] = min(times.get((threads, t), math.inf), timed(run, 0.05))
        x = [math.log(t) for t in lengths]
        y = [math.log(times[2, t]) for t in lengths]
        mx, my = statistics.mean(x), statistics.mean(y)
        exponent = sum((a - mx) * (b - my) for a, b in zip(x, y)) / sum((a - mx) ** 2 for a in x)
        faster = ", ".join(f"{times[1, t] / times[2, t]:.2f} at {t}" for t in lengths)
        print(f"{name:28} H{h} D{d}: time ~ T^{exponent:.3f} from {lengths[0]} to {lengths[-1]}; 2 threads against 1: {faster}", flush=True)



def checked(case):
    """The contenders whose result is right, with their errors."""
    errors = {}
    truth = case.truth() if case.truth else None
    for name, run in list(case.contenders.items()):
        try:
            result = run()
        except Exception as error:
            print(f"  {case.name} {case.where}: {name} failed: {str(error).splitlines()[0][:150]}", flush=True)
            del case.contenders[name]
            continue
        if truth is None or result is None:
            continue
        got = result[:, : truth.shape[1]].double()
        errors[name] = float((got - truth).abs().max())
        if not errors[name] < case.tolerance * max(1.0, float(truth.abs().max())):
            print(f"  {case.name} {case.where}: {name} is off by {errors[name]:.2e}: not timed", flush=True)
            del case.contenders[name]
    return errors


def timed(run, seconds):
    """Seconds a run, over as many as fill `seconds`."""
    count, start = 0, time.perf_counter()
    while True:
        run()
        count += 1
        passed = time.perf_counter() - start
        if passed >= seconds:
            return passed / count


def measure(case, rounds, seconds):
    names = list(case.contenders)
    times = {name: [] for name in names}
    for i in range(rounds):
        for name in names[i % len(names):] + names[: i % len(names)]:
            run = case.contenders[name]
            timer = getattr(run, "seconds", None)  # a peer in a process of its own tells its own time
            times[name].append(timer(seconds) if timer else timed(run, seconds))
    return times


def quartiles(values):
    values = sorted(values)
    pick = lambda p: values[min(len(values) - 1, int(p * len(values)))]  # noqa: E731
    return pick(0.25), statistics.median(values), pick(0.75)


def report(case, times, errors, limits):
    ours = times.get("graft")
    if not ours:
        return None
    best = min(ours)
    share = f"{case.flops / best / limits['flops']:5.0%} of peak" if case.flops else f"{case.bytes_moved / best / limits['bytes']:5.0%} of triad"
    line = f"{case.name:26} {case.where:16} {best * 1e3:10.3f} ms {share}"
    row = dict(work=case.name, where=case.where, graft_ms=best * 1e3, errors=errors, ratios={})
    for name, theirs in times.items():
        if name == "graft":
            continue
        low, middle, high = quartiles([t / o for t, o in zip(theirs, ours)])
        line += f"   {name} x{middle:.2f} ({low:.2f}..{high:.2f})"
        row["ratios"][name] = dict(median=middle, low=low, high=high, peer_ms=min(theirs) * 1e3)
    print(line, flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="the folder that peers.sh filled; without it graft is measured alone")
    parser.add_argument("--against", type=Path, help="another build's libgraft_bench.so, measured too, as 'before'")
    parser.add_argument("--scaling", action="store_true", help="graft alone: time against tokens, and 1 thread against 2")
    root = Path(__file__).resolve().parent.parent
    parser.add_argument("--library", type=Path, default=root / "build/release/lib/libgraft_bench.so")
    parser.add_argument("--only", default="", help="regular expression on 'work shape'")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.05, help="at least, of each contender in each round")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    if not args.library.exists():
        sys.exit(f"side_by_side.py: {args.library} is not there; build the target graft_bench (GRAFT_BUILD_BENCHMARKS=ON)")
    torch.set_num_threads(args.threads)
    graft = Graft(args.library, args.threads)
    limits = dict(flops=graft.lib.graft_bench_peak(args.threads), bytes=graft.lib.graft_bench_triad(args.threads))
    commit = subprocess.run(["git", "-C", root, "describe", "--always", "--dirty"], capture_output=True, text=True)
    print(f"graft {commit.stdout.strip()}, {graft.lib.graft_bench_isa().decode()}, {args.threads} threads; fp32 peak "
          f"{limits['flops'] / 1e9:.0f} GFLOP/s, triad {limits['bytes'] / 1e9:.1f} GB/s. xN: graft is N times as fast.")
    if args.scaling:
        return scaling(args.library)
    others = peers_in(args.peers, args.threads)
    Case.with_peers = args.peers is not None
    before = Graft(args.against, args.threads) if args.against else None
    rows = []
    for cases in (gdn_cases, linear_cases):
        for case in cases(graft, before, *others):
            if re.search(args.only, f"{case.name} {case.where}") and "graft" in case.contenders:
                errors = checked(case)
                if "graft" not in case.contenders:
                    continue
                rows.append(report(case, measure(case, args.rounds, args.seconds), errors, limits))
    if args.json:
        args.json.write_text(json.dumps(dict(commit=commit.stdout.strip(), limits=limits, rows=[r for r in rows if r]), indent=1))


if __name__ == "__main__":
    main()
