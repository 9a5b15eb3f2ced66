#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "plugins/initializers/taylor/tiny_mixer_for_test.h"

namespace graft::testing {
namespace {

// The problems are tiny: threads would only wait for each other.
const bool one_thread = [] {
  at::set_num_threads(1);
  return true;
}();

using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

using Options = std::map<std::string, sdk::Value>;

PluginUnderTest& plugin() {
  static PluginUnderTest library(PLUGIN_FILE);
  return library;
}

sdk::Value text(const char* value) { return sdk::Value::of(std::string(value)); }
sdk::Value real(double value) { return sdk::Value::of(value); }
sdk::Value integer(int64_t value) { return sdk::Value::of(value); }

Outcome create(const Options& options, std::shared_ptr<graft_initializer>* made) {
  return plugin().create<graft_initializer_factory>(GRAFT_EXT_INITIALIZER_FACTORY, options, made);
}

std::shared_ptr<graft_initializer> initializer(const Options& options = {}) {
  std::shared_ptr<graft_initializer> made;
  const Outcome outcome = create(options, &made);
  EXPECT_TRUE(outcome.ok()) << outcome.where << ": " << outcome.message;
  return made;
}

double largest(const at::Tensor& difference) { return difference.abs().max().item<double>(); }

// ---------------------------------------------------------------- a teacher's signals

// Softmax attention of the tiny teacher on random text, as the host would hand it over.
void give_signals(TinyHost& tiny, int64_t sequences, int64_t tokens, int64_t batch, uint64_t seed,
                  int64_t context_sequences = 1000) {
  const TinyShape& shape = tiny.shape();
  const int64_t H = shape.heads, d = shape.dim;
  const at::Tensor x = randn({sequences, tokens, shape.model}, seed);
  const auto project = [&](const char* role) {
    const at::Tensor rows = tiny.teacher(role).reshape({-1, d, shape.model});
    const at::Tensor repeated = rows.repeat_interleave(H / rows.size(0), 0).flatten(0, 1);
    return at::matmul(x, repeated.t()).reshape({sequences, tokens, H, d}).transpose(1, 2);
  };
  at::Tensor scores =
      at::matmul(project(GRAFT_ROLE_QUERY), project(GRAFT_ROLE_KEY).transpose(2, 3));
  const at::Tensor future = at::ones({tokens, tokens}, at::kBool).triu(1);
  const at::Tensor probs = scores.masked_fill(future, -1e30).softmax(-1);
  const at::Tensor context =
      at::matmul(probs, project(GRAFT_ROLE_VALUE)).transpose(1, 2).contiguous();
  at::Tensor y = at::matmul(context.flatten(2), tiny.teacher(GRAFT_ROLE_OUTPUT).t());
  if (shape.output_bias) y = y + tiny.teacher(GRAFT_ROLE_OUTPUT_BIAS);
  at::Tensor residual = randn({sequences, tokens, shape.model}, seed + 1) + y;
  residual.select(1, 0).mul_(20);  // the massive activation of the first position
  const int64_t with_context = std::min(sequences, context_sequences);
  tiny.set_batches({{GRAFT_SIGNAL_BLOCK_INPUT, x},
                    {GRAFT_SIGNAL_BLOCK_OUTPUT, y},
                    {GRAFT_SIGNAL_RESIDUAL, residual},
                    {GRAFT_SIGNAL_HEAD_CONTEXT, context.narrow(0, 0, with_context)},
                    {GRAFT_SIGNAL_ATTENTION_PROBS, probs}},
                   batch);
}

// ---------------------------------------------------------------- the closed form written out

struct Constants {
  std::vector<double> half_lives = {1, 2, 4, 8, 16, 32, 64, 256};
  std::vector<double> betas = {0.05, 0.15, 0.4, 0.8};
  int64_t grid_sequences = 4, context_sequences = 16;
  double position0 = 4;
  bool all_pairs = false;  // decay = grid
};

at::Tensor ridge(const at::Tensor& z, const at::Tensor& y, double lambda,
                 const at::Tensor& prior = {}) {
  const at::Tensor z64 = z.to(at::kDouble), y64 = y.to(at::kDouble);
  at::Tensor gram = at::matmul(z64.t(), z64), moment = at::matmul(z64.t(), y64);
  const at::Tensor scale = gram.diagonal().mean() * lambda;
  gram = gram + scale * at::eye(gram.size(0), at::kDouble);
  if (prior.defined()) moment = moment + scale * prior;
  return at::linalg_solve(gram, moment);
}

at::Tensor head(const at::Tensor& by_token, int64_t h) {
  return by_token.select(2, h).flatten(0, 1).to(at::kDouble);
}

// All tokens at once, head by head, in the order of the formulas; writes the student of `tiny`.
class ByHand {
 public:
  ByHand(TinyHost& tiny, const Constants& constants)
      : tiny_(tiny), k_(constants), H_(tiny.shape().heads), d_(tiny.shape().dim) {}

  void run() {
    copy();
    tiny_.param(GRAFT_ROLE_OUTPUT_GATE).zero_();
    tiny_.param(GRAFT_ROLE_OUTPUT_GATE_BIAS).fill_(1.2784645427610738);
    k_.all_pairs ? grid() : search();
    gate();
    output();
  }

  std::vector<double> half_lives, betas;

 private:
  void copy() {
    for (const char* role : {GRAFT_ROLE_QUERY, GRAFT_ROLE_KEY, GRAFT_ROLE_VALUE}) {
      const at::Tensor rows = tiny_.teacher(role).reshape({-1, d_, tiny_.shape().model});
      tiny_.param(role).copy_(rows.repeat_interleave(H_ / rows.size(0), 0).flatten(0, 1));
    }
    tiny_.param(GRAFT_ROLE_OUTPUT).copy_(tiny_.teacher(GRAFT_ROLE_OUTPUT));
  }

  void set_dynamics(const std::vector<double>& lives, const std::vector<double>& betas) {
    tiny_.param(GRAFT_ROLE_DECAY_GATE).zero_();
    tiny_.param(GRAFT_ROLE_DECAY_SCALE).zero_();
    tiny_.param(GRAFT_ROLE_WRITE_GATE).zero_();
    for (std::size_t h = 0; h < lives.size(); ++h) {
      const auto i = static_cast<int64_t>(h);
      tiny_.param(GRAFT_ROLE_DECAY_GATE_BIAS)[i] = std::log(std::expm1(std::log(2.0) / lives[h]));
      tiny_.param(GRAFT_ROLE_WRITE_GATE_BIAS)[i] = std::log(betas[h] / (1 - betas[h]));
    }
  }

  // Tries one setting on all heads; each takes it where its residual is the smallest so far.
  void try_dynamics(const std::vector<double>& lives, const std::vector<double>& write_gates) {
    const int64_t n = std::min(k_.grid_sequences, tiny_.all(GRAFT_SIGNAL_BLOCK_INPUT).size(0));
    const at::Tensor x = tiny_.all(GRAFT_SIGNAL_BLOCK_INPUT).narrow(0, 0, n);
    const at::Tensor c = tiny_.all(GRAFT_SIGNAL_HEAD_CONTEXT).narrow(0, 0, n);
    set_dynamics(lives, write_gates);
    const at::Tensor o = tiny_.normalised(tiny_.head_output(x), false);
    for (std::size_t h = 0; h < lives.size(); ++h) {
      const auto i = static_cast<int64_t>(h);
      const at::Tensor z = head(o, i), y = head(c, i);
      const at::Tensor rest = y - at::matmul(z, ridge(z, y, 1e-2));
      const double error = (rest.square().sum() / y.square().sum()).item<double>();
      if (error >= least_[h]) continue;
      least_[h] = error;
      half_lives[h] = lives[h];
      betas[h] = write_gates[h];
    }
  }

  void begin() {
    const auto heads = static_cast<std::size_t>(H_);
    least_.assign(heads, 1e9);
    half_lives.assign(heads, 0);
    betas.assign(heads, 0);
  }

  void grid() {
    begin();
    for (const double life : k_.half_lives) {
      for (const double beta : k_.betas) {
        const auto heads = static_cast<std::size_t>(H_);
        try_dynamics(std::vector<double>(heads, life), std::vector<double>(heads, beta));
      }
    }
    set_dynamics(half_lives, betas);
  }

  void search() {
    begin();
    const auto heads = static_cast<std::size_t>(H_);
    for (const double life : k_.half_lives)
      try_dynamics(std::vector<double>(heads, life), std::vector<double>(heads, 0.1));
    const std::vector<double> first = half_lives;
    for (const double beta : k_.betas) try_dynamics(first, std::vector<double>(heads, beta));
    const std::vector<double> lives = half_lives, write_gates = betas;
    for (const int step : {-1, 1}) {
      std::vector<double> next = lives;
      for (double& life : next) {
        const auto at = std::find(k_.half_lives.begin(), k_.half_lives.end(), life);
        if (step < 0 && at != k_.half_lives.begin()) life = at[-1];
        if (step > 0 && at + 1 != k_.half_lives.end()) life = at[1];
      }
      try_dynamics(next, write_gates);
    }
    set_dynamics(half_lives, betas);
  }

  void gate() {
    const int64_t n = std::min(k_.context_sequences, tiny_.all(GRAFT_SIGNAL_HEAD_CONTEXT).size(0));
    const at::Tensor x = tiny_.all(GRAFT_SIGNAL_BLOCK_INPUT).narrow(0, 0, n);
    const at::Tensor c = tiny_.all(GRAFT_SIGNAL_HEAD_CONTEXT).narrow(0, 0, n);
    const at::Tensor z = tiny_.pre_output(x).unflatten(2, {H_, d_});
    const at::Tensor rows = x.flatten(0, 1).to(at::kDouble);
    const at::Tensor inputs = at::cat({rows, at::ones({rows.size(0), 1}, at::kDouble)}, 1);
    std::vector<at::Tensor> weights, biases;
    for (int64_t h = 0; h < H_; ++h) {
      at::Tensor s = at::ones({rows.size(0)}, at::kDouble), solution;
      for (int round = 0; round < 2; ++round) {
        const at::Tensor map = ridge(head(z, h) * s.unsqueeze(1), head(c, h), 1e-2);
        const at::Tensor p = at::matmul(head(z, h), map), energy = p.square().sum(-1);
        const at::Tensor best = ((p * head(c, h)).sum(-1) / energy).clamp(0.02, 4.0);
        at::Tensor raw = best + 0.3;
        for (int i = 0; i < 40; ++i) {
          const at::Tensor g = raw.sigmoid();
          raw = raw - (raw * g - best) / (g * (1 + raw * (1 - g))).clamp_min(0.2);
        }
        at::Tensor gram = at::matmul(inputs.t(), inputs * energy.unsqueeze(1));
        const at::Tensor mean = gram.diagonal().narrow(0, 0, rows.size(1)).mean();
        gram = gram + 0.1 * mean * at::eye(gram.size(0), at::kDouble);
        solution = at::linalg_solve(gram, at::mv(inputs.t(), raw * energy));
        s = at::silu(at::mv(inputs, solution));
      }
      weights.push_back(solution.narrow(0, 0, rows.size(1)));
      biases.push_back(solution[rows.size(1)]);
    }
    tiny_.param(GRAFT_ROLE_OUTPUT_GATE).copy_(at::stack(weights).repeat_interleave(d_, 0));
    tiny_.param(GRAFT_ROLE_OUTPUT_GATE_BIAS).copy_(at::stack(biases).repeat_interleave(d_));
  }

  void output() {
    const at::Tensor x = tiny_.all(GRAFT_SIGNAL_BLOCK_INPUT),
                     y = tiny_.all(GRAFT_SIGNAL_BLOCK_OUTPUT);
    const at::Tensor c = tiny_.all(GRAFT_SIGNAL_HEAD_CONTEXT);
    const at::Tensor z = tiny_.pre_output(x);
    const int64_t n = std::min(k_.context_sequences, c.size(0));
    const at::Tensor wo = tiny_.teacher(GRAFT_ROLE_OUTPUT).to(at::kDouble);
    std::vector<at::Tensor> prior;
    for (int64_t h = 0; h < H_; ++h) {
      const at::Tensor map =
          ridge(head(z.narrow(0, 0, n).unflatten(2, {H_, d_}), h), head(c.narrow(0, 0, n), h), 0.1);
      prior.push_back(at::matmul(wo.narrow(1, h * d_, d_), map.t()));
    }
    at::Tensor w = tiny_.all(GRAFT_SIGNAL_RESIDUAL).to(at::kDouble).square().sum(-1).reciprocal();
    w = w / w.mean();
    w.select(1, 0).mul_(1 + k_.position0);
    w = w / w.mean();
    const at::Tensor root = w.sqrt().unsqueeze(-1);
    at::Tensor target = y;
    if (tiny_.has(GRAFT_ROLE_OUTPUT_BIAS)) target = y - tiny_.param(GRAFT_ROLE_OUTPUT_BIAS);
    tiny_.param(GRAFT_ROLE_OUTPUT)
        .copy_(ridge((z * root).flatten(0, 1), (target * root).flatten(0, 1), 0.3,
                     at::cat(prior, 1).t())
                   .t());
  }

  std::vector<double> least_;  // residual of each head
  TinyHost& tiny_;
  const Constants& k_;
  int64_t H_, d_;
};

void expect_same_students(TinyHost& got, TinyHost& expected, double tolerance) {
  for (std::size_t i = 0; i < got.host.student.size(); ++i) {
    const at::Tensor a = tensor_of(got.host.student[i]), b = tensor_of(expected.host.student[i]);
    EXPECT_LT(largest(a - b), tolerance * std::max(1.0, largest(b))) << got.host.student[i].name;
  }
}

TEST(ClosedForm, EqualsTheFormulasWrittenOut) {
  for (const int64_t kv : {1, 2, 4}) {
    for (const int64_t batch : {1, 3, 20}) {
      TinyShape shape;
      shape.heads = 4;
      TinyHost got(shape, kv, 11), expected(shape, kv, 11);
      give_signals(got, 20, 24, batch, 5);
      give_signals(expected, 20, 24, batch, 5);
      const Outcome outcome = got.host.run(*initializer());
      ASSERT_TRUE(outcome.ok()) << outcome.where << ": " << outcome.message;
      ByHand(expected, {}).run();
      expect_same_students(got, expected, 2e-3);
    }
  }
}

TEST(ClosedForm, AllPairsCanBeTried) {
  TinyHost got({}, 2, 17), expected({}, 2, 17);
  give_signals(got, 8, 32, 4, 9);
  give_signals(expected, 8, 32, 4, 9);
  ASSERT_TRUE(got.host.run(*initializer({{"decay", text("grid")}})).ok());
  Constants constants;
  constants.all_pairs = true;
  ByHand(expected, constants).run();
  expect_same_students(got, expected, 2e-3);
}

TEST(ClosedForm, PositionZeroWeighsMoreInTheFirstLayersOnly) {
  for (const auto& [layer, weight, effective] :
       {std::tuple{0, 64.0, 64.0}, {11, 64.0, 64.0}, {12, 64.0, 0.0}, {3, 0.0, 0.0}}) {
    TinyHost got({}, 1, 12), expected({}, 1, 12);
    give_signals(got, 6, 16, 4, 6);
    give_signals(expected, 6, 16, 4, 6);
    got.host.layer.layer = layer;
    ASSERT_TRUE(got.host.run(*initializer({{"position0_weight", real(weight)}})).ok());
    Constants constants;
    constants.position0 = effective;
    ByHand(expected, constants).run();
    expect_same_students(got, expected, 2e-3);
  }
}

TEST(ClosedForm, TheOutputBiasIsTakenOffTheTarget) {
  TinyShape shape;
  shape.output_bias = true;
  TinyHost got(shape, 2, 13), expected(shape, 2, 13);
  give_signals(got, 6, 16, 4, 7);
  give_signals(expected, 6, 16, 4, 7);
  ASSERT_TRUE(got.host.run(*initializer()).ok());
  expected.param(GRAFT_ROLE_OUTPUT_BIAS).copy_(expected.teacher(GRAFT_ROLE_OUTPUT_BIAS));
  ByHand(expected, {}).run();
  expect_same_students(got, expected, 2e-3);
}

// ---------------------------------------------------------------- recovery

// A teacher that is the tiny mixer itself with other half-lives, write gates, output gate and
// projection.
void give_signals_of_a_mixer(TinyHost& tiny, int64_t sequences, int64_t tokens) {
  const TinyShape& shape = tiny.shape();
  TinyHost planted(shape, shape.heads, 21);
  for (const char* role : {GRAFT_ROLE_QUERY, GRAFT_ROLE_KEY, GRAFT_ROLE_VALUE}) {
    planted.param(role).copy_(tiny.teacher(role));
  }
  const double lives[] = {2, 64}, betas[] = {0.8, 0.15};
  planted.param(GRAFT_ROLE_DECAY_GATE).zero_();
  planted.param(GRAFT_ROLE_DECAY_SCALE).zero_();
  planted.param(GRAFT_ROLE_WRITE_GATE).zero_();
  for (int64_t h = 0; h < 2; ++h) {
    planted.param(GRAFT_ROLE_DECAY_GATE_BIAS)[h] = std::log(std::expm1(std::log(2.0) / lives[h]));
    planted.param(GRAFT_ROLE_WRITE_GATE_BIAS)[h] = std::log(betas[h] / (1 - betas[h]));
  }
  planted.param(GRAFT_ROLE_OUTPUT_GATE)
      .copy_(randn({shape.heads, shape.model}, 22, 0.1).repeat_interleave(shape.dim, 0));
  planted.param(GRAFT_ROLE_OUTPUT_GATE_BIAS).fill_(1.2);
  planted.param(GRAFT_ROLE_OUTPUT).copy_(tiny.teacher(GRAFT_ROLE_OUTPUT));
  const at::Tensor x = randn({sequences, tokens, shape.model}, 23);
  const at::Tensor context = planted.pre_output(x).unflatten(2, {shape.heads, shape.dim});
  tiny.set_batches({{GRAFT_SIGNAL_BLOCK_INPUT, x},
                    {GRAFT_SIGNAL_BLOCK_OUTPUT, planted.output(x)},
                    {GRAFT_SIGNAL_HEAD_CONTEXT, context}},
                   4);
}

TEST(ClosedForm, RecoversATeacherThatTheMixerCanBe) {
  TinyShape shape;
  TinyHost tiny(shape, shape.heads, 31);
  give_signals_of_a_mixer(tiny, 24, 64);
  const Outcome outcome = tiny.host.run(*initializer({{"gate_rounds", integer(8)},
                                                      {"gate_map_ridge", real(1e-6)},
                                                      {"gate_ridge", real(1e-6)},
                                                      {"context_sequences", integer(0)},
                                                      {"prior_ridge", real(1e-6)},
                                                      {"output_ridge", real(1e-6)}}));
  ASSERT_TRUE(outcome.ok()) << outcome.message;
  const at::Tensor decay = at::softplus(tiny.param(GRAFT_ROLE_DECAY_GATE_BIAS));
  EXPECT_NEAR(std::log(2.0) / decay[0].item<double>(), 2, 1e-3);
  EXPECT_NEAR(std::log(2.0) / decay[1].item<double>(), 64, 1e-2);
  const at::Tensor beta = tiny.param(GRAFT_ROLE_WRITE_GATE_BIAS).sigmoid();
  EXPECT_NEAR(beta[0].item<double>(), 0.8, 1e-5);
  EXPECT_NEAR(beta[1].item<double>(), 0.15, 1e-5);
  const at::Tensor y = tiny.all(GRAFT_SIGNAL_BLOCK_OUTPUT);
  const at::Tensor error = tiny.output(tiny.all(GRAFT_SIGNAL_BLOCK_INPUT)) - y;
  EXPECT_LT((error.square().sum() / y.square().sum()).item<double>(), 1e-3);
}

TEST(ClosedForm, WithoutARegressionOnlyThePriorIsWritten) {
  TinyHost fitted({}, 1, 32), prior({}, 1, 32), copied({}, 1, 32);
  for (TinyHost* tiny : {&fitted, &prior, &copied}) give_signals(*tiny, 6, 16, 4, 8);
  ASSERT_TRUE(fitted.host.run(*initializer({{"output_ridge", real(1e9)}})).ok());
  ASSERT_TRUE(prior.host.run(*initializer({{"solve_output", sdk::Value::of(false)}})).ok());
  ASSERT_TRUE(copied.host
                  .run(*initializer({{"solve_output", sdk::Value::of(false)},
                                     {"head_prior", sdk::Value::of(false)}}))
                  .ok());
  EXPECT_LT(largest(fitted.param(GRAFT_ROLE_OUTPUT) - prior.param(GRAFT_ROLE_OUTPUT)), 1e-5);
  EXPECT_EQ(largest(copied.param(GRAFT_ROLE_OUTPUT) - copied.teacher(GRAFT_ROLE_OUTPUT)), 0.0);
}

// ---------------------------------------------------------------- median and mean

TEST(ClosedForm, HalfLivesFromTheAttention) {
  // Head 0 looks two tokens back, head 1 nine; both give half their mass to the sink.
  TinyHost tiny({}, 2, 41);
  give_signals(tiny, 2, 40, 2, 9);
  at::Tensor probs = at::zeros({2, 2, 40, 40});
  for (int64_t t = 0; t < 40; ++t) {
    for (int64_t h = 0; h < 2; ++h) {
      probs.select(1, h).select(1, t).select(1, 0) += 0.5;
      probs.select(1, h).select(1, t).select(1, std::max<int64_t>(0, t - (h == 0 ? 2 : 9))) += 0.5;
    }
  }
  tensor_of(
      *std::ranges::find(tiny.host.batches[0], GRAFT_SIGNAL_ATTENTION_PROBS, &FakeTensor::name))
      .copy_(probs);
  const auto lives = [&](const char* decay, bool exclude_sink) {
    tiny.reset_student(41);
    const Outcome outcome =
        tiny.host.run(*initializer({{"decay", text(decay)},
                                    {"beta", real(0.2)},
                                    {"exclude_sink", sdk::Value::of(exclude_sink)}}));
    EXPECT_TRUE(outcome.ok()) << outcome.message;
    EXPECT_NEAR(tiny.param(GRAFT_ROLE_WRITE_GATE_BIAS).sigmoid()[1].item<double>(), 0.2, 1e-6);
    const at::Tensor decays = at::softplus(tiny.param(GRAFT_ROLE_DECAY_GATE_BIAS));
    return std::pair{std::log(2.0) / decays[0].item<double>(),
                     std::log(2.0) / decays[1].item<double>()};
  };
  const auto [near_median, far_median] = lives("median", true);
  EXPECT_NEAR(near_median, 2, 1e-4);
  EXPECT_NEAR(far_median, 9, 1e-4);
  const auto [near_mean, far_mean] = lives("mean", true);
  EXPECT_NEAR(near_mean, 2, 1e-4);
  EXPECT_NEAR(far_mean, 9, 1e-4);
  // With the sink the mean is far longer than what the head looks at.
  EXPECT_GT(lives("mean", false).first, 10);
}

// ---------------------------------------------------------------- the paper's Phase 1

// The published formulas in loops over tokens, heads and channels.
struct PaperByHand {
  explicit PaperByHand(TinyHost& tiny) : t(tiny), H(tiny.shape().heads), d(tiny.shape().dim) {}

  void run() {
    for (const char* role : {GRAFT_ROLE_QUERY, GRAFT_ROLE_KEY, GRAFT_ROLE_VALUE}) {
      const at::Tensor rows = t.teacher(role).reshape({-1, d, t.shape().model});
      t.param(role).copy_(rows.repeat_interleave(H / rows.size(0), 0).flatten(0, 1));
    }
    t.param(GRAFT_ROLE_OUTPUT).copy_(t.teacher(GRAFT_ROLE_OUTPUT));
    gates();
    scale_values();
    output_gate();
  }

  void gates() {
    const at::Tensor a = t.all(GRAFT_SIGNAL_ATTENTION_PROBS);
    const int64_t B = a.size(0), T = a.size(2);
    std::vector<double> entropy;
    t.param(GRAFT_ROLE_DECAY_SCALE).zero_();
    for (int64_t h = 0; h < H; ++h) {
      double distance = 0, bits = 0;
      for (int64_t b = 0; b < B; ++b) {
        for (int64_t q = 0; q < T; ++q) {
          for (int64_t s = 0; s <= q; ++s) {
            const double p = a[b][h][q][s].item<double>();
            distance += p * std::max(0.5, static_cast<double>(q - s));
            bits -= p * std::log(std::max(p, 1e-10));
          }
        }
      }
      distance = std::max(0.5, distance / static_cast<double>(B * T));
      const double g = std::clamp(std::log(2.0) / distance, 1e-3, 5.0);
      t.param(GRAFT_ROLE_DECAY_GATE_BIAS)[h] = g + std::log(-std::expm1(-g));
      entropy.push_back(bits / static_cast<double>(B * T));
    }
    const auto [low, high] = std::ranges::minmax(entropy);
    at::Tensor b = t.param(GRAFT_ROLE_WRITE_GATE);
    for (int64_t h = 0; h < H; ++h) {
      const double concentration =
          1 - (entropy[static_cast<std::size_t>(h)] - low) / std::max(high - low, 1e-3);
      const double beta = 0.3 + 0.4 * concentration, logit = std::log(beta / (1 - beta));
      const double size = b[h].abs().mean().item<double>();
      b[h].mul_(logit / std::sqrt(static_cast<double>(t.shape().model)) / size);
    }
  }

  void scale_values() {
    const at::Tensor c = t.all(GRAFT_SIGNAL_HEAD_CONTEXT);
    const at::Tensor o = t.head_output(t.all(GRAFT_SIGNAL_BLOCK_INPUT)) * std::sqrt(double(d));
    for (int64_t h = 0; h < H; ++h) {
      const double inner = (head(c, h) * head(o, h)).sum().item<double>();
      const double sigma =
          std::clamp(inner / std::max(head(o, h).square().sum().item<double>(), 1e-8), 0.1, 10.0);
      t.param(GRAFT_ROLE_VALUE).narrow(0, h * d, d).mul_(sigma);
    }
  }

  void output_gate() {
    const at::Tensor c = t.all(GRAFT_SIGNAL_HEAD_CONTEXT), x = t.all(GRAFT_SIGNAL_BLOCK_INPUT);
    const double context_rms = c.square().mean(-1).sqrt().mean().item<double>();
    const at::Tensor v = at::silu(at::matmul(x, t.param(GRAFT_ROLE_VALUE).t()));
    const double alpha = 0.01 * context_rms / v.square().mean().sqrt().item<double>();
    t.param(GRAFT_ROLE_OUTPUT_GATE).copy_(t.param(GRAFT_ROLE_VALUE) * alpha);
  }

  TinyHost& t;
  int64_t H, d;
};

TinyShape published_shape() {
  TinyShape shape;
  shape.heads = 3;
  shape.silu_values = true;
  shape.gate_bias = shape.write_bias = false;
  return shape;
}

TEST(Paper, EqualsThePublishedFormulas) {
  for (const int64_t kv : {1, 3}) {
    TinyHost got(published_shape(), kv, 51), expected(published_shape(), kv, 51);
    for (TinyHost* tiny : {&got, &expected}) give_signals(*tiny, 4, 20, 3, 10);
    const Outcome outcome = got.host.run(*initializer({{"variant", text("paper")}}));
    ASSERT_TRUE(outcome.ok()) << outcome.message;
    PaperByHand(expected).run();
    expect_same_students(got, expected, 1e-4);
    EXPECT_THAT(
        got.host.written_names(),
        UnorderedElementsAre("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight",
                             "A_log", "dt_bias", "b_proj.weight", "g_proj.weight"));
  }
}

TEST(Paper, ReadsOnlyTheSequencesItWants) {
  TinyHost all(published_shape(), 1, 52), first(published_shape(), 1, 52);
  give_signals(all, 10, 12, 4, 11);
  give_signals(first, 10, 12, 4, 11);
  first.set_batches(
      {{GRAFT_SIGNAL_BLOCK_INPUT, all.all(GRAFT_SIGNAL_BLOCK_INPUT).narrow(0, 0, 6)},
       {GRAFT_SIGNAL_HEAD_CONTEXT, all.all(GRAFT_SIGNAL_HEAD_CONTEXT).narrow(0, 0, 6)},
       {GRAFT_SIGNAL_ATTENTION_PROBS, all.all(GRAFT_SIGNAL_ATTENTION_PROBS).narrow(0, 0, 6)}},
      6);
  const Options six = {{"variant", text("paper")}, {"statistics_sequences", integer(6)}};
  ASSERT_TRUE(all.host.run(*initializer(six)).ok());
  ASSERT_TRUE(first.host.run(*initializer(six)).ok());
  expect_same_students(all, first, 1e-5);
  EXPECT_EQ(all.host.batches_read, 2U * 3);  // two batches in each of three passes
}

TEST(Paper, RefusesAnotherParametrisationByRoleAndDomain) {
  for (const auto& [role, domain] : {std::pair{GRAFT_ROLE_DECAY_GATE_BIAS, "log"},
                                     {GRAFT_ROLE_WRITE_GATE, ""},
                                     {GRAFT_ROLE_DECAY_SCALE, "logit"}}) {
    TinyHost tiny(published_shape(), 1, 53);
    give_signals(tiny, 2, 12, 4, 12);
    find(tiny.host.student, role).domain = domain;
    const Outcome outcome = tiny.host.run(*initializer({{"variant", text("paper")}}));
    EXPECT_EQ(outcome.status, GRAFT_FAILED_PRECONDITION);
    EXPECT_EQ(outcome.where, std::string("role:") + role);
    EXPECT_THAT(outcome.message, HasSubstr(sdk::cat("got '", domain, "'")));
    EXPECT_THAT(outcome.message, HasSubstr("variant = closed_form works with any"));
  }
}

// ---------------------------------------------------------------- mixers that lack something

std::vector<std::string> messages() {
  std::vector<std::string> texts;
  for (const LogLine& line : plugin().take_log()) texts.push_back(line.text);
  return texts;
}

struct Lacking {
  const char* name;
  TinyShape shape;
  std::vector<std::string> notes;
};

std::vector<Lacking> lacking_mixers() {
  std::vector<Lacking> all(6);
  all[0].name = "no decay";
  all[0].shape.decay = false;
  all[0].notes = {"no constant decay to set"};
  all[1].name = "write gate without bias";
  all[1].shape.write_bias = false;
  all[1].notes = {"no constant write gate to set"};
  all[2].name = "output gate without bias";
  all[2].shape.gate_bias = false;
  all[2].notes = {"cannot hold its output gate constant"};
  all[3].name = "no gates at all";
  all[3].shape.decay = all[3].shape.write_gate = all[3].shape.write_bias = false;
  all[3].shape.gate = all[3].shape.gate_bias = all[3].shape.norm = false;
  all[3].notes = {"no constant decay to set", "no constant write gate to set"};
  all[4].name = "no norm";
  all[4].shape.norm = false;
  all[5].name = "identity gate";
  all[5].shape.gate_domain = "";
  return all;
}

TEST(ClosedForm, WorksWithWhatTheMixerHasAndSaysWhatItHasNot) {
  for (const Lacking& lacking : lacking_mixers()) {
    SCOPED_TRACE(lacking.name);
    TinyHost tiny(lacking.shape, 1, 61);
    give_signals(tiny, 8, 32, 4, 13);
    plugin().take_log();
    const Outcome outcome = tiny.host.run(*initializer());
    ASSERT_TRUE(outcome.ok()) << outcome.where << ": " << outcome.message;
    const std::vector<std::string> log = messages();
    for (const std::string& note : lacking.notes) EXPECT_THAT(log, Contains(HasSubstr(note)));
    EXPECT_EQ(log.size(), lacking.notes.size() + 1);
    EXPECT_THAT(log.back(), HasSubstr("output error "));
    EXPECT_THAT(log, Each(HasSubstr("layer 0: ")));
    // Better than no block at all, whatever is missing.
    const at::Tensor y = tiny.all(GRAFT_SIGNAL_BLOCK_OUTPUT);
    const at::Tensor error = tiny.output(tiny.all(GRAFT_SIGNAL_BLOCK_INPUT)) - y;
    EXPECT_LT((error.square().sum() / y.square().sum()).item<double>(), 0.9);
  }
}

TEST(ClosedForm, AnOutputGateItCannotRegressIsLeftAndNamed) {
  TinyHost tiny({}, 1, 62);
  give_signals(tiny, 4, 16, 4, 14);
  find(tiny.host.student, GRAFT_ROLE_OUTPUT_GATE).domain = "org.example.other";
  plugin().take_log();
  ASSERT_TRUE(tiny.host.run(*initializer()).ok());
  EXPECT_THAT(messages(), Contains(HasSubstr("g_proj.weight (domain 'org.example.other', shape "
                                             "[8, 6]) is no function of the block's input")));
}

TEST(ClosedForm, WritesAndMarksOnlyWhatItSets) {
  TinyHost tiny({}, 1, 63);
  give_signals(tiny, 4, 16, 4, 15);
  const at::Tensor norm = tiny.param(GRAFT_ROLE_NORM).clone();
  ASSERT_TRUE(tiny.host.run(*initializer()).ok());
  EXPECT_THAT(tiny.host.written_names(), Not(Contains("o_norm.weight")));
  EXPECT_EQ(tiny.host.written_names().size(), tiny.host.student.size() - 1);
  EXPECT_EQ(largest(tiny.param(GRAFT_ROLE_NORM) - norm), 0.0);

  TinyShape shape;
  shape.write_bias = false;
  TinyHost without(shape, 1, 63);
  give_signals(without, 4, 16, 4, 15);
  const at::Tensor gate = without.param(GRAFT_ROLE_WRITE_GATE).clone();
  ASSERT_TRUE(without.host.run(*initializer()).ok());
  EXPECT_THAT(without.host.written_names(), Not(Contains("b_proj.weight")));
  EXPECT_EQ(largest(without.param(GRAFT_ROLE_WRITE_GATE) - gate), 0.0);
}

// ---------------------------------------------------------------- passes over the text

TEST(ClosedForm, IsTheSameEachTimeToTheBit) {
  std::vector<std::vector<float>> runs[2];
  for (auto& run : runs) {
    TinyHost tiny({}, 1, 71);
    give_signals(tiny, 9, 20, 4, 16);
    ASSERT_TRUE(tiny.host.run(*initializer()).ok());
    for (const FakeTensor& t : tiny.host.student) run.push_back(t.values);
  }
  EXPECT_EQ(runs[0], runs[1]);
}

TEST(ClosedForm, OneInstanceServesSeveralLayers) {
  const auto made = initializer();
  TinyHost first({}, 1, 72), second({}, 2, 73), alone({}, 2, 73);
  give_signals(first, 5, 16, 4, 17);
  give_signals(second, 5, 16, 4, 18);
  give_signals(alone, 5, 16, 4, 18);
  ASSERT_TRUE(first.host.run(*made).ok());
  ASSERT_TRUE(second.host.run(*made).ok());
  ASSERT_TRUE(alone.host.run(*initializer()).ok());
  expect_same_students(second, alone, 1e-12);
}

TEST(ClosedForm, StopsReadingWhereAStepHasEnough) {
  TinyHost tiny({}, 1, 74);
  give_signals(tiny, 40, 12, 4, 19);
  ASSERT_TRUE(tiny.host
                  .run(*initializer({{"grid_sequences", integer(3)},
                                     {"context_sequences", integer(8)},
                                     {"half_lives", sdk::Value::of(std::vector<double>{2, 8})},
                                     {"betas", sdk::Value::of(std::vector<double>{0.1})}}))
                  .ok());
  // Search: 1 batch and 2 probes. Gate: 2 batches, kept for its four passes. Output: all 10.
  EXPECT_EQ(tiny.host.batches_read, 1U + 2 + 10);
  EXPECT_EQ(tiny.host.probes, 2 + 2 + 10);
}

TEST(ClosedForm, UsesTheContextsTheHostHas) {
  // The host gives contexts for 6 sequences of 20, fewer than the default asks for.
  TinyHost got({}, 1, 75), expected({}, 1, 75);
  give_signals(got, 20, 16, 2, 20, 6);
  give_signals(expected, 20, 16, 2, 20, 6);
  ASSERT_TRUE(got.host.run(*initializer()).ok());
  ByHand(expected, {}).run();
  expect_same_students(got, expected, 2e-3);
}

TEST(ClosedForm, WithoutAResidualAllTokensWeighTheSame) {
  TinyHost without({}, 1, 76), none({}, 1, 76);
  give_signals(without, 6, 16, 4, 21);
  give_signals(none, 6, 16, 4, 21);
  for (FakeTensors& batch : without.host.batches) {
    std::erase_if(batch, [](const FakeTensor& t) { return t.name == GRAFT_SIGNAL_RESIDUAL; });
  }
  ASSERT_TRUE(without.host.run(*initializer()).ok());
  ASSERT_TRUE(none.host.run(*initializer({{"token_weight", text("none")}})).ok());
  expect_same_students(without, none, 1e-12);
}

// ---------------------------------------------------------------- needs, options, errors

std::vector<std::string> calibration_of(const Options& options) {
  const auto made = initializer(options);
  std::vector<std::string> needs;
  for (uint32_t i = 0; i < made->v->n_calibration; ++i) {
    const graft_calibration_need& need = made->v->calibration[i];
    needs.push_back(sdk::cat(need.name,
                             (need.flags & GRAFT_NEED_REQUIRED) != 0 ? " " : " optional ",
                             need.max_sequences));
  }
  return needs;
}

TEST(Taylor, AsksOnlyForTheSignalsItReads) {
  EXPECT_THAT(calibration_of({}), UnorderedElementsAre("block.input 0", "block.output 0",
                                                       "head.context 16", "residual optional 0"));
  EXPECT_THAT(calibration_of({{"grid_sequences", integer(20)}, {"token_weight", text("none")}}),
              UnorderedElementsAre("block.input 0", "block.output 0", "head.context 20"));
  EXPECT_THAT(
      calibration_of({{"context_sequences", integer(0)}, {"solve_output", sdk::Value::of(false)}}),
      UnorderedElementsAre("block.input 0", "head.context 0"));
  EXPECT_THAT(calibration_of({{"decay", text("median")}}), Contains("attention.probs 16"));
  EXPECT_THAT(calibration_of({{"variant", text("paper")}, {"statistics_sequences", integer(4)}}),
              UnorderedElementsAre("attention.probs 4", "block.input 4", "head.context 4"));
}

TEST(Taylor, NeedsTheRolesOfItsVariant) {
  const auto roles = [](const Options& options) {
    const auto made = initializer(options);
    std::vector<std::string> names;
    for (uint32_t i = 0; i < made->v->n_needs; ++i) {
      names.push_back(
          sdk::cat((made->v->needs[i].flags & GRAFT_NEED_TEACHER) != 0 ? "teacher " : "student ",
                   made->v->needs[i].role));
    }
    return names;
  };
  EXPECT_THAT(roles({}),
              UnorderedElementsAre("teacher graft.role.query", "student graft.role.query",
                                   "teacher graft.role.key", "student graft.role.key",
                                   "teacher graft.role.value", "student graft.role.value",
                                   "teacher graft.role.output", "student graft.role.output"));
  const auto paper = roles({{"variant", text("paper")}});
  EXPECT_EQ(paper.size(), 12U);
  EXPECT_THAT(paper, Contains("student graft.role.decay-gate-bias"));
  EXPECT_THAT(paper, Contains("student graft.role.output-gate"));
}

TEST(Taylor, EveryDefaultIsWithinItsBounds) {
  const graft_desc& desc = plugin().desc(GRAFT_EXT_INITIALIZER_FACTORY);
  EXPECT_STREQ(desc.alias, "taylor");
  EXPECT_GE(desc.n_options, 20U);
  for (uint32_t i = 0; i < desc.n_options; ++i) {
    const graft_option& option = *desc.options[i];
    EXPECT_GT(std::string(option.doc).size(), 10U) << option.key;
    if (option.min.type == GRAFT_FLOAT && option.def.type == GRAFT_FLOAT) {
      EXPECT_GE(option.def.u.f, option.min.u.f) << option.key;
    }
  }
}

TEST(Taylor, RefusesOptionsThatContradict) {
  std::shared_ptr<graft_initializer> made;
  Outcome outcome = create({{"gate_least", real(5)}}, &made);
  EXPECT_EQ(outcome.where, "config.gate_least");
  EXPECT_EQ(outcome.message, "expected at most gate_most = 4, got 5");
  outcome = create({{"betas", sdk::Value::of(std::vector<double>{})}}, &made);
  EXPECT_EQ(outcome.where, "config.betas");
  EXPECT_EQ(outcome.message, "expected at least one value, got an empty list");
  EXPECT_EQ(made, nullptr);
}

TEST(Taylor, WithoutTextItSaysWhatWorksWithout) {
  for (const char* variant : {"paper", "closed_form"}) {
    TinyHost tiny({}, 1, 81);
    const Outcome outcome = tiny.host.run(*initializer({{"variant", text(variant)}}));
    EXPECT_EQ(outcome.status, GRAFT_FAILED_PRECONDITION);
    EXPECT_EQ(outcome.where, "calibration");
    EXPECT_THAT(outcome.message, HasSubstr("projection_copy works without"));
  }
}

TEST(Taylor, AMissingSignalIsNamedWithThoseThereAre) {
  TinyHost tiny({}, 1, 82);
  give_signals(tiny, 4, 16, 4, 22);
  for (FakeTensors& batch : tiny.host.batches) {
    std::erase_if(batch, [](const FakeTensor& t) { return t.name == GRAFT_SIGNAL_HEAD_CONTEXT; });
  }
  const Outcome outcome = tiny.host.run(*initializer());
  EXPECT_EQ(outcome.status, GRAFT_NOT_FOUND);
  EXPECT_EQ(outcome.where, "signal:head.context");
  EXPECT_THAT(outcome.message, HasSubstr("which has: block.input, block.output, residual"));
}

TEST(Taylor, ASignalWithTooFewSequencesIsRefused) {
  TinyHost tiny({}, 1, 83);
  give_signals(tiny, 4, 16, 4, 23, 2);
  const Outcome outcome = tiny.host.run(*initializer());
  EXPECT_EQ(outcome.where, "signal:head.context");
  EXPECT_EQ(outcome.message, "expected at least 4 sequences, got shape [2, 16, 2, 4]");
}

TEST(Taylor, AMissingTapIsNamed) {
  TinyHost tiny({}, 1, 84);
  give_signals(tiny, 4, 16, 4, 24);
  tiny.host.run_mixer = [](std::size_t, const std::string& tap) -> FakeTensor {
    throw sdk::Status(GRAFT_NOT_FOUND, "probe", "mixer 'x' has no tap '" + tap + "'");
  };
  const Outcome outcome = tiny.host.run(*initializer());
  EXPECT_EQ(outcome.status, GRAFT_NOT_FOUND);
  EXPECT_THAT(outcome.message, HasSubstr("mixer 'x' has no tap 'head_output'"));
}

TEST(Taylor, SignalsThatAreNotFiniteAreAnErrorThatSaysWhere) {
  for (const auto& [signal, step] : {std::pair{GRAFT_SIGNAL_HEAD_CONTEXT, "step:grid"},
                                     {GRAFT_SIGNAL_BLOCK_OUTPUT, "step:output projection"}}) {
    TinyHost tiny({}, 1, 85);
    give_signals(tiny, 4, 16, 4, 25);
    tiny.signal(0, signal).flatten()[3] = std::numeric_limits<float>::quiet_NaN();
    const Outcome outcome = tiny.host.run(*initializer());
    EXPECT_EQ(outcome.status, GRAFT_FAILED_PRECONDITION) << signal;
    EXPECT_EQ(outcome.where, step);
    EXPECT_THAT(outcome.message, HasSubstr("not finite"));
  }
}

TEST(Taylor, ASingularRegressionNamesItsOption) {
  TinyHost tiny({}, 1, 86);
  give_signals(tiny, 1, 2, 1, 26);  // two tokens for eight unknowns
  const Outcome outcome = tiny.host.run(*initializer({{"output_ridge", real(0)}}));
  EXPECT_EQ(outcome.where, "step:output projection");
  EXPECT_THAT(outcome.message, HasSubstr("a larger ridge is needed (option output_ridge)"));
}

TEST(Taylor, StopsWhenAsked) {
  TinyHost tiny({}, 1, 87);
  give_signals(tiny, 4, 16, 4, 27);
  plugin().stop = true;
  const Outcome outcome = tiny.host.run(*initializer());
  plugin().stop = false;
  EXPECT_EQ(outcome.status, GRAFT_CANCELLED);
}

TEST(Taylor, AMissingRoleIsNamed) {
  for (const char* role : {GRAFT_ROLE_VALUE, GRAFT_ROLE_OUTPUT}) {
    TinyHost tiny({}, 1, 88);
    give_signals(tiny, 2, 8, 4, 28);
    std::erase_if(tiny.host.student, [&](const FakeTensor& t) { return t.role == role; });
    const Outcome outcome = tiny.host.run(*initializer());
    EXPECT_EQ(outcome.status, GRAFT_NOT_FOUND);
    EXPECT_EQ(outcome.where, std::string("role:") + role);
    EXPECT_THAT(outcome.message, HasSubstr("student has no parameter of this role; it has: "));
  }
}

}  // namespace
}  // namespace graft::testing
