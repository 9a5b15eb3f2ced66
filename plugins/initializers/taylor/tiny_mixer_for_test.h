// A gated delta rule of a few heads, token by token with LibTorch, that a test hands to the
// initializer.
#pragma once

#include <ATen/ATen.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "plugins/testing/fake_init_host.h"

namespace graft::testing {

struct TinyShape {
  int64_t heads = 2, dim = 4, model = 6;
  bool decay = true, write_gate = true, write_bias = true;
  bool gate = true, gate_bias = true;
  bool norm = true, silu_values = false, output_bias = false;
  std::string gate_domain = "silu-inv";
};

inline at::Tensor tensor_of(FakeTensor& fake) {
  return at::from_blob(fake.values.data(), fake.shape, at::TensorOptions(at::kFloat));
}

inline FakeTensor fake_of(std::string name, const at::Tensor& tensor) {
  const at::Tensor values = tensor.to(at::kFloat).contiguous();
  const float* const data = values.const_data_ptr<float>();
  return FakeTensor::filled(std::move(name), "", values.sizes().vec(),
                            [&](std::size_t i) { return data[i]; });
}

inline at::Tensor randn(at::IntArrayRef shape, uint64_t seed, double scale = 1) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator) * scale;
}

// The mixer as the initializer sees it through the ABI: parameters and natural values.
class TinyMixer final : public sdk::Mixer {
 public:
  explicit TinyMixer(const TinyShape& shape) : shape_(shape) {}

  void param_specs(sdk::ParamSpecs& specs) override {
    const int64_t H = shape_.heads, d = shape_.dim, D = shape_.model;
    const auto heads = static_cast<int32_t>(H), dim = static_cast<int32_t>(d);
    const auto add = [&](const char* name, const char* role, std::initializer_list<int64_t> size,
                         int32_t rows, const char* domain = "") {
      specs.add(name, role, size.size() == 2 ? "heads*key,model" : "heads*key", size)
          .heads(heads, rows)
          .domain(domain);
    };
    add("q_proj.weight", GRAFT_ROLE_QUERY, {H * d, D}, dim);
    add("k_proj.weight", GRAFT_ROLE_KEY, {H * d, D}, dim);
    add("v_proj.weight", GRAFT_ROLE_VALUE, {H * d, D}, dim);
    add("o_proj.weight", GRAFT_ROLE_OUTPUT, {D, H * d}, dim);
    if (shape_.output_bias) add("o_proj.bias", GRAFT_ROLE_OUTPUT_BIAS, {D}, 0);
    if (shape_.decay) {
      add("a_proj.weight", GRAFT_ROLE_DECAY_GATE, {H, D}, 1);
      add("A_log", GRAFT_ROLE_DECAY_SCALE, {H}, 1, "log");
      add("dt_bias", GRAFT_ROLE_DECAY_GATE_BIAS, {H}, 1, "softplus-inv");
    }
    if (shape_.write_gate) add("b_proj.weight", GRAFT_ROLE_WRITE_GATE, {H, D}, 1, "logit");
    if (shape_.write_bias) add("b_proj.bias", GRAFT_ROLE_WRITE_GATE_BIAS, {H}, 1, "logit");
    const char* const domain = shape_.gate_domain.c_str();
    if (shape_.gate) add("g_proj.weight", GRAFT_ROLE_OUTPUT_GATE, {H * d, D}, dim, domain);
    if (shape_.gate_bias) add("g_proj.bias", GRAFT_ROLE_OUTPUT_GATE_BIAS, {H * d}, dim, domain);
    if (shape_.norm) add("o_norm.weight", GRAFT_ROLE_NORM, {d}, 0);
  }
  void plan(const graft_plan_in&, sdk::Plan&) override {}
  void forward(const graft_exec&, const graft_mixer_forward&) override {}

  void set_natural(std::string_view what, std::span<const double> values,
                   sdk::NaturalParams& params) override {
    const auto fill = [&](const char* name, auto value) {
      const std::span<float> p = params.write(name);
      const std::size_t rows = p.size() / values.size();
      for (std::size_t i = 0; i < p.size(); ++i) {
        p[i] = static_cast<float>(value(values[i / rows]));
      }
    };
    const auto zero = [](double) { return 0.0; };
    if (what == GRAFT_NATURAL_HALF_LIFE && shape_.decay) {
      fill("a_proj.weight", zero);
      fill("A_log", zero);
      fill("dt_bias", [](double life) { return std::log(std::expm1(std::log(2.0) / life)); });
    } else if (what == GRAFT_NATURAL_WRITE_GATE && shape_.write_bias) {
      fill("b_proj.weight", zero);
      fill("b_proj.bias", [](double beta) { return std::log(beta / (1 - beta)); });
    } else if (what == GRAFT_NATURAL_OUTPUT_GATE && shape_.gate_bias) {
      fill("g_proj.weight", zero);
      fill("g_proj.bias", [&](double gate) { return raw_gate(gate); });
    } else {
      Mixer::set_natural(what, values, params);
    }
  }

 private:
  double raw_gate(double gate) const {
    if (shape_.gate_domain != "silu-inv") return gate;
    double low = -1, high = 20;
    for (int i = 0; i < 100; ++i) {
      const double middle = (low + high) / 2;
      (middle / (1 + std::exp(-middle)) < gate ? low : high) = middle;
    }
    return low;
  }
  TinyShape shape_;
};

// A host with a teacher of `kv` key/value heads, random calibration text, and the tiny mixer as
// target.
class TinyHost {
 public:
  static constexpr double kNormEps = 1e-5;

  TinyHost(const TinyShape& shape, int64_t kv, uint64_t seed)
      : shape_(shape), handle_(std::make_unique<TinyMixer>(shape), sdk::Description{}) {
    const int64_t H = shape.heads, d = shape.dim, D = shape.model;
    const auto add = [&](const char* name, const char* role, std::vector<int64_t> size,
                         int64_t heads, uint64_t offset) {
      FakeTensor t = fake_of(name, randn(size, seed + offset, 1 / std::sqrt(double(D))));
      t.role = role;
      t.heads = static_cast<int32_t>(heads);
      t.head_dim = static_cast<int32_t>(d);
      host.teacher.push_back(t);
    };
    add("q_proj.weight", GRAFT_ROLE_QUERY, {H * d, D}, H, 1);
    add("k_proj.weight", GRAFT_ROLE_KEY, {kv * d, D}, kv, 2);
    add("v_proj.weight", GRAFT_ROLE_VALUE, {kv * d, D}, kv, 3);
    add("o_proj.weight", GRAFT_ROLE_OUTPUT, {D, H * d}, H, 4);
    if (shape.output_bias) add("o_proj.bias", GRAFT_ROLE_OUTPUT_BIAS, {D}, 0, 5);
    reset_student(seed);
    host.mixer = &handle_.c;
    host.run_mixer = [this](std::size_t batch, const std::string& tap) {
      at::Tensor x = signal(batch, GRAFT_SIGNAL_BLOCK_INPUT);
      if (tap == GRAFT_TAP_HEAD_OUTPUT) return fake_of(tap, head_output(x));
      if (tap == GRAFT_TAP_PRE_OUTPUT) return fake_of(tap, pre_output(x));
      throw sdk::Status(GRAFT_NOT_FOUND, "tap:" + tap, "there are: head_output, pre_output");
    };
  }

  // Random parameters, as a mixer's defaults may be.
  void reset_student(uint64_t seed) {
    host.student.clear();
    for (const graft_param_spec* spec : handle_.specs) {
      const std::vector<int64_t> size(spec->shape, spec->shape + spec->ndim);
      const bool norm = std::string(spec->role) == GRAFT_ROLE_NORM;
      FakeTensor t = fake_of(spec->name, norm ? 1 + 0.1 * randn(size, seed + 7)
                                              : randn(size, seed + 50 + host.student.size(), 0.3));
      t.role = spec->role;
      t.heads = spec->heads;
      t.head_dim = spec->head_dim;
      t.domain = spec->domain;
      host.student.push_back(t);
    }
  }

  at::Tensor param(const std::string& role) { return tensor_of(find(host.student, role)); }
  at::Tensor teacher(const std::string& role) { return tensor_of(find(host.teacher, role)); }
  bool has(const std::string& role) {
    return std::ranges::find(host.student, role, &FakeTensor::role) != host.student.end();
  }
  at::Tensor signal(std::size_t batch, const std::string& name) {
    return tensor_of(*std::ranges::find(host.batches.at(batch), name, &FakeTensor::name));
  }
  // All sequences of a signal, in order; the host need not give it with every batch.
  at::Tensor all(const std::string& name) {
    std::vector<at::Tensor> parts;
    for (auto& batch : host.batches) {
      const auto found = std::ranges::find(batch, name, &FakeTensor::name);
      if (found != batch.end()) parts.push_back(tensor_of(*found));
    }
    return at::cat(parts);
  }

  // [B, T, H, d]
  at::Tensor head_output(const at::Tensor& x) {
    const int64_t B = x.size(0), T = x.size(1), H = shape_.heads, d = shape_.dim;
    const auto project = [&](const char* role) {
      return at::matmul(x, param(role).t()).reshape({B, T, H, d});
    };
    const auto unit = [](const at::Tensor& t) { return t / t.norm(2, {-1}, true); };
    const at::Tensor q = unit(at::silu(project(GRAFT_ROLE_QUERY))) / std::sqrt(double(d));
    const at::Tensor k = unit(at::silu(project(GRAFT_ROLE_KEY)));
    const at::Tensor values = project(GRAFT_ROLE_VALUE);
    const at::Tensor v = shape_.silu_values ? at::silu(values) : values;
    at::Tensor keep = at::ones({B, T, H}), beta = at::ones({B, T, H});
    if (shape_.decay) {
      const at::Tensor raw =
          at::matmul(x, param(GRAFT_ROLE_DECAY_GATE).t()) + param(GRAFT_ROLE_DECAY_GATE_BIAS);
      keep = (-param(GRAFT_ROLE_DECAY_SCALE).exp() * at::softplus(raw)).exp();
    }
    if (shape_.write_gate) {
      at::Tensor raw = at::matmul(x, param(GRAFT_ROLE_WRITE_GATE).t());
      if (shape_.write_bias) raw = raw + param(GRAFT_ROLE_WRITE_GATE_BIAS);
      beta = raw.sigmoid();
    }
    at::Tensor state = at::zeros({B, H, d, d});  // [d_k, d_v]
    std::vector<at::Tensor> outputs;
    for (int64_t t = 0; t < T; ++t) {
      const auto at_t = [t](const at::Tensor& all) { return all.select(1, t).unsqueeze(-1); };
      state = state * at_t(keep).unsqueeze(-1);
      const at::Tensor key = at_t(k), error = at_t(v) - at::matmul(state.transpose(2, 3), key);
      state = state + at_t(beta).unsqueeze(-1) * at::matmul(key, error.transpose(2, 3));
      outputs.push_back(at::matmul(state.transpose(2, 3), at_t(q)).squeeze(-1));
    }
    return at::stack(outputs, 1);
  }

  at::Tensor normalised(const at::Tensor& o, bool weighted) {
    if (!shape_.norm) return o;
    const at::Tensor unit = o * (o.square().mean(-1, true) + kNormEps).rsqrt();
    return weighted ? unit * param(GRAFT_ROLE_NORM) : unit;
  }

  // [B, T, H * d]
  at::Tensor pre_output(const at::Tensor& x) {
    const at::Tensor z = normalised(head_output(x), true).flatten(2);
    if (!shape_.gate) return z;
    at::Tensor raw = at::matmul(x, param(GRAFT_ROLE_OUTPUT_GATE).t());
    if (shape_.gate_bias) raw = raw + param(GRAFT_ROLE_OUTPUT_GATE_BIAS);
    return z * (shape_.gate_domain == "silu-inv" ? at::silu(raw) : raw);
  }

  at::Tensor output(const at::Tensor& x) {
    const at::Tensor y = at::matmul(pre_output(x), param(GRAFT_ROLE_OUTPUT).t());
    return shape_.output_bias ? y + param(GRAFT_ROLE_OUTPUT_BIAS) : y;
  }

  // Cuts [N, T, ...] signals into batches.
  void set_batches(const std::vector<std::pair<std::string, at::Tensor>>& signals, int64_t size) {
    host.batches.clear();
    const int64_t n = signals.front().second.size(0);
    for (int64_t first = 0; first < n; first += size) {
      FakeTensors& batch = host.batches.emplace_back();
      for (const auto& [name, tensor] : signals) {
        if (first >= tensor.size(0)) continue;
        batch.push_back(
            fake_of(name, tensor.narrow(0, first, std::min(size, tensor.size(0) - first))));
      }
    }
  }

  const TinyShape& shape() const { return shape_; }

  FakeInitHost host;

 private:
  TinyShape shape_;
  sdk::detail::Handle<sdk::Mixer> handle_;
};

}  // namespace graft::testing
