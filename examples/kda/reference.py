#!/usr/bin/env python3
"""Kimi Delta Attention as arXiv 2510.26692 defines it, token by token in numpy, for golden_test.c.

    python3 reference.py > golden.h

Nothing here comes from the plugin. The gradients need no derivation either: f(x + ih) = f(x) + ih f'(x) to rounding for
an analytic f, so each is the imaginary part of a run with one input moved by 1e-30i.
"""
import numpy as np

B, T, D, H, K, RANK = 2, 37, 6, 2, 4, 3
PAIRS, EPS, L2_EPS = 1, 1e-5, 1e-6
INV_FREQ = np.array([0.3])
SHAPES = {
    "q_proj.weight": (H * K, D), "q_proj.bias": (H * K,),
    "k_proj.weight": (H * K, D), "k_proj.bias": (H * K,),
    "v_proj.weight": (H * K, D), "v_proj.bias": (H * K,),
    "f_proj.0.weight": (RANK, D), "f_proj.1.weight": (H * K, RANK), "dt_bias": (H * K,), "A_log": (H,),
    "b_proj.weight": (H, D), "b_proj.bias": (H,),
    "g_proj.0.weight": (RANK, D), "g_proj.1.weight": (H * K, RANK), "g_proj.1.bias": (H * K,),
    "o_norm.weight": (K,), "o_proj.weight": (D, H * K), "o_proj.bias": (D,),
}
REAL = np.ones((B, T), bool)
REAL[0, :5] = False   # padded on the left
REAL[1, 20:23] = False  # and in the middle
START = np.array([3, 0])  # position of each row's first real token


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def silu(z):
    return z * sigmoid(z)


def rotate(u, position):
    """u [B,H,K]: the pair (i, i + PAIRS) of each head turns by position * INV_FREQ[i]."""
    angle = position[:, None, None] * INV_FREQ
    a, b = u[..., :PAIRS], u[..., PAIRS:2 * PAIRS]
    turned = [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
    return np.concatenate(turned + [u[..., 2 * PAIRS:]], -1)


def unit(u):
    return u / np.sqrt((u * u).sum(-1, keepdims=True) + L2_EPS)


def kda(x, S, p):
    """x [B,T,D], S [B,H,K,K] -> y, S, and the taps. Diag(alpha) acts on S before the delta rule."""
    heads = lambda u: u.reshape(B, H, K)
    shape = {"y": (D,), "head_output": (H, K), "pre_output": (H * K,), "log_decay": (H,), "write_gate": (H,)}
    out = {name: np.zeros((B, T, *s), complex) for name, s in shape.items()}
    for t in range(T):
        real, u = REAL[:, t], x[:, t]
        position = START + REAL[:, :t].sum(1)
        q = unit(rotate(heads(silu(u @ p["q_proj.weight"].T + p["q_proj.bias"])), position))
        k = unit(rotate(heads(silu(u @ p["k_proj.weight"].T + p["k_proj.bias"])), position))
        v = heads(silu(u @ p["v_proj.weight"].T + p["v_proj.bias"]))
        f = heads(u @ p["f_proj.0.weight"].T @ p["f_proj.1.weight"].T + p["dt_bias"])
        log_alpha = -np.exp(p["A_log"])[:, None] * np.log(1 + np.exp(f))
        beta = sigmoid(u @ p["b_proj.weight"].T + p["b_proj.bias"])
        # S = (I - beta k k^T) Diag(alpha) S + beta k v^T
        decayed = np.exp(log_alpha)[..., None] * S
        projector = np.eye(K) - beta[..., None, None] * k[..., :, None] * k[..., None, :]
        new = projector @ decayed + beta[..., None, None] * k[..., :, None] * v[..., None, :]
        S = np.where(real[:, None, None, None], new, S)
        o = np.einsum("bhkv,bhk->bhv", S, q) / np.sqrt(K)
        gate = sigmoid(heads(u @ p["g_proj.0.weight"].T @ p["g_proj.1.weight"].T + p["g_proj.1.bias"]))
        normed = o / np.sqrt((o * o).mean(-1, keepdims=True) + EPS) * p["o_norm.weight"]
        pre = (normed * gate).reshape(B, H * K)
        token = {"y": pre @ p["o_proj.weight"].T + p["o_proj.bias"], "head_output": o, "pre_output": pre,
                 "log_decay": log_alpha.mean(-1), "write_gate": beta}
        for name, value in token.items():
            out[name][real, t] = value[real]
    return {**out, "state": S}


def print_array(name, values):
    flat = np.ascontiguousarray(values).ravel()
    rows = [", ".join(repr(float(v)) for v in flat[i:i + 5]) for i in range(0, flat.size, 5)]
    print(f"static const double {name}[] = {{\n    " + ",\n    ".join(rows) + "};")


def main():
    rng = np.random.default_rng(7)
    inputs = {"x": rng.normal(size=(B, T, D)), "S": 0.5 * rng.normal(size=(B, H, K, K))}
    for name, shape in SHAPES.items():
        inputs[name] = (1 if name == "o_norm.weight" else 0) + 0.5 * rng.normal(size=shape)
    inputs["dt_bias"] -= 2.0
    inputs = {name: value.round(3) for name, value in inputs.items()}
    run = lambda values: kda(values["x"], values["S"], values)
    out = {name: value.real for name, value in run({n: v.astype(complex) for n, v in inputs.items()}).items()}
    weights = {name: rng.normal(size=value.shape).round(3) for name, value in out.items()}  # of a loss: their scalar product

    print("/* Written by reference.py. */\n/* clang-format off */")
    print(f"enum {{ B = {B}, T = {T}, D = {D}, H = {H}, K = {K}, RANK = {RANK}, PAIRS = {PAIRS} }};")
    print(f"static const double inv_freq[] = {{{', '.join(map(repr, INV_FREQ.tolist()))}}};")
    print("static const unsigned char real_tokens[] = {" + ", ".join(str(int(r)) for r in REAL.ravel()) + "};")
    print("static const long long start[] = {" + ", ".join(map(str, START)) + "};")
    print("static const long long end[] = {" + ", ".join(map(str, START + REAL.sum(1))) + "};")
    for name, value in out.items():
        print_array("want_" + name, value)
        print_array("d_" + name, weights[name])
    print("typedef struct golden { const char* name; const double *value, *gradient; } golden;")
    for i, (name, value) in enumerate(inputs.items()):
        gradient = np.zeros(value.shape)
        for at in np.ndindex(value.shape):
            moved = {n: v.astype(complex) for n, v in inputs.items()}
            moved[name][at] += 1e-30j
            result = run(moved)
            gradient[at] = sum((weights[n] * result[n].imag).sum() for n in result) / 1e-30
        print_array(f"value_{i}", value)
        print_array(f"gradient_{i}", gradient)
    print("static const golden inputs[] = {" +
          ", ".join(f'{{"{name}", value_{i}, gradient_{i}}}' for i, name in enumerate(inputs)) + "};")


main()
