// Linear attention's CUDA kernels: on the host's executor always, on a device where there is one.
#include "linear_cuda.h"

#include <gtest/gtest.h>

#include <tuple>

#include "core/cuda/devices.h"
#include "cuda_testing.h"
#include "device_testing.h"
#include "host_block.h"
#include "linear_kernels.h"
#include "linear_plain.h"
#include "problems.h"

namespace graft::cuda {
namespace {

void shift_maps(FeatureMaps& maps, std::ptrdiff_t by) {
  shift_all(by, maps.weight_q, maps.bias_q, maps.weight_k, maps.bias_k);
}
template <class E>
LinearForward<E> moved(LinearForward<E> io, std::ptrdiff_t by) {
  shift_maps(io.maps, by);
  shift_all(by, io.q.data, io.k.data, io.v.data, io.g.data, io.dt.data, io.state_in, io.o.data,
            io.state_out, io.borders, io.norm, io.o_kept.data, io.scratch);
  return io;
}
template <class E>
LinearBackward<E> moved(LinearBackward<E> io, std::ptrdiff_t by) {
  shift_maps(io.maps, by);
  shift_all(by, io.q.data, io.k.data, io.v.data, io.g.data, io.dt.data, io.borders, io.norm,
            io.o.data, io.d_o.data, io.d_state_out, io.dq.data, io.dk.data, io.dv.data, io.dg.data,
            io.ddt.data, io.d_weight_q, io.d_bias_q, io.d_weight_k, io.d_bias_k, io.d_state_in,
            io.scratch);
  return io;
}
template <class E>
LinearStep<E> moved(LinearStep<E> io, std::ptrdiff_t by) {
  shift_maps(io.maps, by);
  shift_all(by, io.q.data, io.k.data, io.v.data, io.g.data, io.dt.data, io.state_in, io.o.data,
            io.state_out, io.scratch);
  return io;
}

struct OnHost {
  Order order = Order::kForward;
  int shared = 99 * 1024;  // what the smallest of the devices has

  template <class E>
  std::string operator()(const Arena&, const LinearShape& shape, const LinearForward<E>& io) const {
    linear_forward_steps(shape, io, HostLaunch(shared, order));
    return problem_of(shape, io);
  }
  template <class E>
  std::string operator()(const Arena&, const LinearShape& shape,
                         const LinearBackward<E>& io) const {
    linear_backward_steps(shape, io, HostLaunch(shared, order));
    return problem_of(shape, io);
  }
  template <class E>
  std::string operator()(const Arena&, const LinearShape& shape, const LinearStep<E>& io) const {
    linear_step_steps(shape, io, HostLaunch(shared, order));
    return problem_of(shape, io);
  }
};

struct OnDevice {
  template <class E>
  std::string operator()(const Arena& arena, const LinearShape& shape,
                         const LinearForward<E>& io) const {
    return run_on_device(arena, [&](std::ptrdiff_t shift, void* stream) {
      return linear_forward(shape, moved(io, shift), stream);
    });
  }
  template <class E>
  std::string operator()(const Arena& arena, const LinearShape& shape,
                         const LinearBackward<E>& io) const {
    return run_on_device(arena, [&](std::ptrdiff_t shift, void* stream) {
      return linear_backward(shape, moved(io, shift), stream);
    });
  }
  template <class E>
  std::string operator()(const Arena& arena, const LinearShape& shape,
                         const LinearStep<E>& io) const {
    return run_on_device(arena, [&](std::ptrdiff_t shift, void* stream) {
      return linear_step(shape, moved(io, shift), stream);
    });
  }
};

// ------------------------------------------------------------------ one problem

struct Options {
  int batch = 1, heads = 1;
  int64_t tokens = 1;
  int head_dim = 16, rows = 16, value_dim = 16, gap = 0;  // rows of a feature map
  bool gates = true, state = true, maps = true, normalise = true;
  float floor = 0, eps = 0;
  bool resets = false, pads = false;

  int features() const { return maps ? 2 * rows : head_dim; }
  std::string text() const {
    std::string out = "B" + std::to_string(batch) + " H" + std::to_string(heads) + " T" +
                      std::to_string(tokens) + " " + std::to_string(head_dim) + "->" +
                      std::to_string(features()) + "x" + std::to_string(value_dim) + " gap " +
                      std::to_string(gap);
    out += gates ? " gates" : "";
    out += state ? " state" : "";
    out += maps ? " maps" : "";
    return out + (normalise ? " normalise" : "") + (resets ? " resets" : "") +
           (pads ? " pads" : "");
  }
};

// Inputs, outputs and room of a forward and a backward pass. Gradients of the maps start at 1: they
// are added to.
template <class E>
struct Problem {
  Arena arena;
  Options options;
  LinearShape shape;
  TestTensor<E> q, k, v, o, d_o, dq, dk, dv;
  TestTensor<float> g, dt, dg, ddt, o_kept;
  float *state_in, *state_out, *d_state_out, *d_state_in, *borders, *norm, *forward_scratch,
      *backward_scratch, *step_scratch;
  float *weight_q, *weight_k, *bias_q, *bias_k, *d_weight_q, *d_weight_k, *d_bias_q, *d_bias_k;

  explicit Problem(const Options& x)
      : options(x), shape{x.batch,      x.heads,     x.tokens, x.head_dim,
                          x.features(), x.value_dim, x.maps,   x.normalise} {
    const auto rows = [&](int width) {
      return TestTensor<E>(arena, x.batch, x.tokens, x.heads, width, x.gap);
    };
    const auto wide = [&](int width) {
      return TestTensor<float>(arena, x.batch, x.tokens, x.heads, width, x.gap);
    };
    q = rows(x.head_dim), k = rows(x.head_dim), v = rows(x.value_dim), o = rows(x.value_dim);
    d_o = rows(x.value_dim), dq = rows(x.head_dim), dk = rows(x.head_dim), dv = rows(x.value_dim);
    g = wide(1), dt = wide(1), dg = wide(1), ddt = wide(1), o_kept = wide(x.value_dim);
    for (float** p : {&state_in, &state_out, &d_state_out, &d_state_in})
      *p = arena.make_unwritten(shape.states_size());
    borders = arena.make_unwritten(shape.borders_size());
    norm = arena.make_unwritten(shape.norm_size());
    forward_scratch = arena.make_unwritten(shape.forward_scratch_size());
    backward_scratch = arena.make_unwritten(shape.backward_scratch_size());
    step_scratch = arena.make_unwritten(shape.step_scratch_size());
    for (float** p : {&weight_q, &weight_k, &d_weight_q, &d_weight_k})
      *p = arena.make<float>(weights());
    for (float** p : {&bias_q, &bias_k, &d_bias_q, &d_bias_k}) *p = arena.make<float>(biases());
    for (float* p : {d_weight_q, d_weight_k}) std::fill(p, p + weights(), 1.0f);
    for (float* p : {d_bias_q, d_bias_k}) std::fill(p, p + biases(), 1.0f);
  }
  int64_t weights() const {
    return static_cast<int64_t>(options.heads) * options.rows * options.head_dim;
  }
  int64_t biases() const { return static_cast<int64_t>(options.heads) * options.rows; }

  void randomise(unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> uniform(0, 1);
    const auto normals = [&](auto...) { return normal(random); };
    // Without maps the rows are features, which are positive where there is a normaliser.
    const auto rows = [&](auto...) {
      return options.maps ? normal(random) : 0.1 + uniform(random);
    };
    q.fill(rows), k.fill(rows), v.fill(normals), d_o.fill(normals);
    g.fill([&](auto...) { return -uniform(random); });
    dt.fill([&](auto...) { return 0.2 + uniform(random); });
    for (int b = 0; b < shape.batch; ++b)
      for (int h = 0; h < shape.heads; ++h)
        for (int64_t t = 0; t < shape.tokens; ++t) {
          if (options.resets && t % 29 == 17)
            g.at(b, t, h, 0) = -std::numeric_limits<float>::infinity();
          if (options.pads && t % 5 == 3) g.at(b, t, h, 0) = dt.at(b, t, h, 0) = 0;
        }
    for (int64_t i = 0; i < shape.states_size(); ++i) {
      state_in[i] = static_cast<float>(uniform(random));
      d_state_out[i] = static_cast<float>(normal(random));
    }
    const double size = 1 / std::sqrt(static_cast<double>(options.head_dim));
    for (float* p : {weight_q, weight_k})
      for (int64_t i = 0; i < weights(); ++i) p[i] = static_cast<float>(size * normal(random));
    for (float* p : {bias_q, bias_k})
      for (int64_t i = 0; i < biases(); ++i) p[i] = static_cast<float>(0.1 * normal(random));
  }

  template <class Call>
  void put_inputs(Call& io) const {
    io.q = q.template tensor<const E>(), io.k = k.template tensor<const E>();
    io.v = v.template tensor<const E>();
    if (options.gates)
      io.g = g.template tensor<const float>(), io.dt = dt.template tensor<const float>();
    if (options.maps) io.maps = {weight_q, bias_q, weight_k, bias_k};
    io.floor = options.floor;
  }
  LinearForward<E> forward() const {
    LinearForward<E> io;
    put_inputs(io);
    io.eps = options.eps, io.o = o.template tensor<E>();
    if (options.state) io.state_in = state_in;
    io.state_out = state_out, io.borders = borders, io.norm = norm, io.scratch = forward_scratch;
    io.o_kept = o_kept.template tensor<float>();
    return io;
  }
  LinearBackward<E> backward() const {
    LinearBackward<E> io;
    put_inputs(io);
    io.borders = borders, io.norm = norm, io.o = o_kept.template tensor<const float>();
    io.d_o = d_o.template tensor<const E>();
    if (options.state) io.d_state_out = d_state_out;
    io.dq = dq.template tensor<E>(), io.dk = dk.template tensor<E>(),
    io.dv = dv.template tensor<E>();
    io.dg = dg.template tensor<float>(), io.ddt = ddt.template tensor<float>();
    io.d_weight_q = d_weight_q, io.d_weight_k = d_weight_k;
    io.d_bias_q = d_bias_q, io.d_bias_k = d_bias_k;
    io.d_state_in = d_state_in, io.scratch = backward_scratch;
    return io;
  }
  LinearStep<E> step() const {
    LinearStep<E> io;
    put_inputs(io);
    io.eps = options.eps, io.o = o.template tensor<E>();
    if (options.state) io.state_in = state_in;
    io.state_out = state_out, io.scratch = step_scratch;
    return io;
  }

  LinearPlain plain(int b, int h) const {
    LinearPlainInput x;
    const auto size = [](int64_t n) { return static_cast<std::size_t>(n); };
    x.tokens = size(shape.tokens), x.head_dim = size(shape.head_dim);
    x.features = size(shape.features), x.value_dim = size(shape.value_dim);
    x.normalise = shape.normalise, x.floor = options.floor, x.eps = options.eps;
    x.q = q.head(b, h), x.k = k.head(b, h), x.v = v.head(b, h), x.d_o = d_o.head(b, h);
    x.g = options.gates ? g.head(b, h) : Numbers(x.tokens, 0);
    x.dt = options.gates ? dt.head(b, h) : Numbers(x.tokens, 1);
    if (options.maps) {
      x.map_q = {of_map(weight_q, h), of_bias(bias_q, h)};
      x.map_k = {of_map(weight_k, h), of_bias(bias_k, h)};
    }
    x.state = options.state ? of_head(state_in, b, h) : Numbers(size(shape.state_size()));
    x.d_state = options.state ? of_head(d_state_out, b, h) : Numbers(x.state.size());
    return linear_plain(x);
  }
  Numbers of_head(const float* states, int b, int h) const {
    return numbers(states + (b * shape.heads + h) * shape.state_size(), shape.state_size());
  }
  Numbers of_map(const float* weights_, int h) const {
    const int64_t n = static_cast<int64_t>(options.rows) * options.head_dim;
    return numbers(weights_ + h * n, n);
  }
  Numbers of_bias(const float* biases_, int h) const {
    return numbers(biases_ + h * options.rows, options.rows);
  }
  std::vector<std::byte> results() const { return {arena.data(), arena.data() + arena.used()}; }
};

template <class E>
void expect_plain(const Problem<E>& x, double tolerance) {
  const std::string what = x.options.text();
  std::vector<LinearPlain> by_head(static_cast<std::size_t>(x.shape.heads));
  const auto add = [](Numbers& to, const Numbers& from) {
    if (to.empty()) to.assign(from.size(), 1);  // where the kernels started
    for (std::size_t i = 0; i < from.size(); ++i) to[i] += from[i];
  };
  for (int b = 0; b < x.shape.batch; ++b) {
    for (int h = 0; h < x.shape.heads; ++h) {
      const LinearPlain wanted = x.plain(b, h);
      std::vector<std::tuple<const char*, Numbers, const Numbers*>> all = {
          {"o", x.o.head(b, h), &wanted.o},
          {"state", x.of_head(x.state_out, b, h), &wanted.state},
          {"dq", x.dq.head(b, h), &wanted.dq},
          {"dk", x.dk.head(b, h), &wanted.dk},
          {"dv", x.dv.head(b, h), &wanted.dv},
          {"dg", x.dg.head(b, h), &wanted.dg},
          {"ddt", x.ddt.head(b, h), &wanted.ddt},
          {"d_state_in", x.of_head(x.d_state_in, b, h), &wanted.d_state_in}};
      for (const auto& [name, got, want] : all)
        EXPECT_LE(error(got, *want), tolerance) << what << " " << name << " of " << b << ", " << h;
      LinearPlain& sums = by_head[static_cast<std::size_t>(h)];
      add(sums.d_map_q.weight, wanted.d_map_q.weight), add(sums.d_map_q.bias, wanted.d_map_q.bias);
      add(sums.d_map_k.weight, wanted.d_map_k.weight), add(sums.d_map_k.bias, wanted.d_map_k.bias);
    }
  }
  if (!x.options.maps) return;
  for (int h = 0; h < x.shape.heads; ++h) {
    const LinearPlain& sums = by_head[static_cast<std::size_t>(h)];
    EXPECT_LE(error(x.of_map(x.d_weight_q, h), sums.d_map_q.weight), tolerance)
        << what << " d_weight_q";
    EXPECT_LE(error(x.of_map(x.d_weight_k, h), sums.d_map_k.weight), tolerance)
        << what << " d_weight_k";
    EXPECT_LE(error(x.of_bias(x.d_bias_q, h), sums.d_map_q.bias), tolerance) << what << " d_bias_q";
    EXPECT_LE(error(x.of_bias(x.d_bias_k, h), sums.d_map_k.bias), tolerance) << what << " d_bias_k";
  }
}
template <class E>
void expect_gaps_untouched(const Problem<E>& x) {
  for (const auto* rows : {&x.o, &x.dq, &x.dk, &x.dv})
    rows->expect_gaps_untouched(x.options.text());
  for (const auto* rows : {&x.dg, &x.ddt, &x.o_kept}) rows->expect_gaps_untouched(x.options.text());
}

template <class E, class Where>
void run(const Where& where, const Problem<E>& x) {
  ASSERT_EQ(where(x.arena, x.shape, x.forward()), "") << x.options.text();
  ASSERT_EQ(where(x.arena, x.shape, x.backward()), "") << x.options.text();
}

std::vector<Options> shapes() {
  std::vector<Options> out;
  for (const int64_t tokens : {0, 1, 2, 63, 64, 65, 127, 193}) {
    out.push_back({.tokens = tokens, .head_dim = 16, .rows = 16, .value_dim = 32});
    out.push_back({.heads = 2,
                   .tokens = tokens,
                   .head_dim = 12,
                   .rows = 20,
                   .value_dim = 24,
                   .gap = 4,
                   .state = tokens % 2 == 0,
                   .floor = 0.01f,
                   .eps = 1e-3f,
                   .resets = tokens % 2 == 0});
    out.push_back({.tokens = tokens,
                   .head_dim = 16,
                   .rows = 8,
                   .value_dim = 8,
                   .gates = false,
                   .state = false});
  }
  out.push_back({.batch = 2,
                 .heads = 3,
                 .tokens = 70,
                 .head_dim = 11,
                 .rows = 9,
                 .value_dim = 17,
                 .gap = 3,
                 .pads = true});  // nothing is aligned
  out.push_back({.tokens = 130, .head_dim = 64, .rows = 64, .value_dim = 64});
  out.push_back({.tokens = 66, .head_dim = 40, .rows = 70, .value_dim = 128});
  out.push_back({.tokens = 67,
                 .head_dim = 80,
                 .rows = 33,
                 .value_dim = 65,
                 .normalise = false,
                 .resets = true});
  out.push_back({.batch = 2, .tokens = 66, .head_dim = 72, .value_dim = 24, .maps = false});
  out.push_back({.batch = 3, .tokens = 65, .head_dim = 1, .rows = 1, .value_dim = 1});
  return out;
}

template <class E, class Where>
void expect_every_shape_right(const Where& where, double tolerance) {
  unsigned seed = 1;
  for (const Options& options : shapes()) {
    Problem<E> x(options);
    x.randomise(seed++);
    run(where, x);
    expect_plain(x, tolerance);
    expect_gaps_untouched(x);
  }
}

// ------------------------------------------------------------------ tests

TEST(LinearCudaOnHost, EveryShapeIsThePlainRecurrenceWithAllGradients) {
  expect_every_shape_right<float>(OnHost{}, 2e-5);
}

// Threads of a phase in any order: a barrier that is missing shows as a different result, if the
// executor has not found it before.
TEST(LinearCudaOnHost, TheOrderOfThreadsAndBlocksDoesNotMatter) {
  std::vector<std::byte> first;
  for (const Order order : {Order::kForward, Order::kReverse, Order::kShuffled}) {
    Problem<float> x({.batch = 2,
                      .heads = 2,
                      .tokens = 150,
                      .head_dim = 20,
                      .rows = 40,
                      .value_dim = 72,
                      .floor = 0.01f,
                      .resets = true,
                      .pads = true});
    x.randomise(3);
    run(OnHost{order}, x);
    if (first.empty()) first = x.results();
    EXPECT_TRUE(first == x.results());
  }
}

// bfloat16 is a format of rows, not of arithmetic: results are those of float rows with the same
// numbers, rounded once.
template <class Where>
void expect_bf16_rounded_once(const Where& where) {
  for (const Options& options :
       {Options{.heads = 2, .tokens = 130, .head_dim = 32, .rows = 32, .value_dim = 64},
        Options{.batch = 2,
        .tokens = 65,
        .head_dim = 20,
        .rows = 12,
        .value_dim = 12,
        .gap = 4,
        .state = false}}) {
    Problem<bf16> narrow(options);
    Problem<float> wide(options);
    narrow.randomise(11);
    wide.randomise(11);
    const auto copy = [](const TestTensor<bf16>& from, TestTensor<float>& to) {
      to.fill([&](int b, int64_t t, int h, int c) { return number(from.at(b, t, h, c)); });
    };
    copy(narrow.q, wide.q), copy(narrow.k, wide.k), copy(narrow.v, wide.v),
        copy(narrow.d_o, wide.d_o);
    run(where, narrow);
    run(where, wide);
    const std::pair<const TestTensor<bf16>*, const TestTensor<float>*> rows[] = {
        {&narrow.o, &wide.o},
        {&narrow.dq, &wide.dq},
        {&narrow.dk, &wide.dk},
        {&narrow.dv, &wide.dv}};
    for (const auto& [got, exact] : rows)
      for (int64_t i = 0; i < got->size(); ++i)
        ASSERT_EQ(got->data[i].bits, stored<bf16>(exact->data[i]).bits)
            << options.text() << " " << i;
    for (int h = 0; h < options.heads; ++h) {
      EXPECT_EQ(narrow.of_head(narrow.state_out, 0, h), wide.of_head(wide.state_out, 0, h));
      EXPECT_EQ(narrow.of_map(narrow.d_weight_k, h), wide.of_map(wide.d_weight_k, h));
    }
  }
}
TEST(LinearCudaOnHost, Bf16RowsAreFloatRowsRoundedOnce) { expect_bf16_rounded_once(OnHost{}); }

TEST(LinearCudaOnHost, AResetIsExact) {
  Problem<float> x({.tokens = 100, .state = true});
  x.randomise(5);
  constexpr int64_t kReset = 70;
  x.g.at(0, kReset, 0, 0) = -std::numeric_limits<float>::infinity();
  for (int64_t t = 0; t < kReset; ++t)
    for (int c = 0; c < 16; ++c) x.d_o.at(0, t, 0, c) = 0;
  run(OnHost{}, x);
  for (int64_t t = 0; t < kReset; ++t) {
    for (int c = 0; c < 16; ++c) {
      ASSERT_EQ(x.dk.at(0, t, 0, c), 0) << t;
      ASSERT_EQ(x.dv.at(0, t, 0, c), 0) << t;
    }
    ASSERT_EQ(x.dg.at(0, t, 0, 0), 0) << t;
    ASSERT_EQ(x.ddt.at(0, t, 0, 0), 0) << t;
  }
  EXPECT_EQ(x.dg.at(0, kReset, 0, 0), 0);
  for (double d : x.of_head(x.d_state_in, 0, 0)) ASSERT_EQ(d, 0);
}

TEST(LinearCudaOnHost, PadsLeaveTheStateAsItIs) {
  Problem<float> x({.tokens = 66});
  x.randomise(6);
  x.g.fill([](auto...) { return 0; });
  x.dt.fill([](auto...) { return 0; });
  ASSERT_EQ(OnHost{}(x.arena, x.shape, x.forward()), "");
  EXPECT_EQ(x.of_head(x.state_out, 0, 0), x.of_head(x.state_in, 0, 0));
}

template <class E, class Where>
void expect_steps_right(const Where& where, double tolerance) {
  unsigned seed = 50;
  for (Options options :
       {Options{.head_dim = 64, .rows = 64, .value_dim = 64},
        Options{
            .head_dim = 13, .rows = 21, .value_dim = 31, .gap = 3, .floor = 0.01f, .eps = 1e-3f},
        Options{.head_dim = 150, .rows = 300, .value_dim = 40, .gates = false},
        Options{.head_dim = 24, .value_dim = 70, .maps = false, .normalise = false}}) {
    for (const int64_t tokens : {0, 1, 3}) {
      for (const bool state : {true, false}) {
        options.batch = options.heads = 2;
        options.tokens = tokens, options.state = state, options.pads = seed % 2 == 0 && state;
        Problem<E> x(options);
        x.randomise(seed++);
        ASSERT_EQ(where(x.arena, x.shape, x.step()), "");
        for (int b = 0; b < 2; ++b)
          for (int h = 0; h < 2; ++h) {
            const LinearPlain wanted = x.plain(b, h);
            EXPECT_LE(error(x.o.head(b, h), wanted.o), tolerance) << options.text();
            EXPECT_LE(error(x.of_head(x.state_out, b, h), wanted.state), 1e-5) << options.text();
          }
        x.o.expect_gaps_untouched(options.text());
        if (!state) continue;
        Problem<E> in_place(options);
        in_place.randomise(seed - 1);
        LinearStep<E> io = in_place.step();
        io.state_out = in_place.state_in;
        ASSERT_EQ(where(in_place.arena, in_place.shape, io), "");
        EXPECT_EQ(in_place.of_head(in_place.state_in, 1, 1), x.of_head(x.state_out, 1, 1))
            << options.text();
        EXPECT_EQ(in_place.o.head(1, 1), x.o.head(1, 1)) << options.text();
      }
    }
  }
}
TEST(LinearCudaOnHost, StepsAreThePlainRecurrence) {
  expect_steps_right<float>(OnHost{}, 1e-5);
  expect_steps_right<bf16>(OnHost{Order::kShuffled}, 1.0 / 200);
}

// ------------------------------------------------------------------ golden vectors

Numbers plus(const Numbers& a, const Numbers& b) {
  Numbers out(a);
  for (std::size_t i = 0; i < out.size(); ++i) out[i] += b[i];
  return out;
}

// A case of a golden file in the kernels' terms, and what its gradients are in the file's.
template <class E>
struct GoldenProblem {
  const Golden& golden;
  std::string name;
  Options options;
  Problem<E> x;

  GoldenProblem(const Golden& golden_, const std::string& name_, const Options& options_)
      : golden(golden_), name(name_), options(options_), x(options_) {
    fill(x.q, get("q")), fill(x.k, get("k")), fill(x.v, get("v")), fill(x.d_o, get("cot_o"));
    put(get("Wq"), x.weight_q), put(get("Wk"), x.weight_k);
    put(get("bq"), x.bias_q), put(get("bk"), x.bias_k);
    for (float* p : {x.d_weight_q, x.d_weight_k}) std::fill(p, p + x.weights(), 0.0f);
    for (float* p : {x.d_bias_q, x.d_bias_k}) std::fill(p, p + x.biases(), 0.0f);
    if (has("dt")) {
      Numbers g = get("dt");
      for (std::size_t i = 0; i < g.size(); ++i) g[i] *= rate(i);
      fill(x.dt, get("dt")), fill(x.g, g);
    } else {
      x.dt.fill([](auto...) { return 1; });
      if (has("g")) fill(x.g, get("g"));
    }
    const Numbers zero(static_cast<std::size_t>(x.shape.states_size()));
    put(has("S0") ? state(get("S0"), get("z0")) : zero, x.state_in);
    const bool z_in_state = !has("z_final");
    const Numbers cotangent = get("cot_S_final");
    put(z_in_state ? swapped(cotangent, x.shape.state_row(), x.shape.features)
                   : state(cotangent,
                           Numbers(zero.size() / static_cast<std::size_t>(x.shape.state_row()))),
        x.d_state_out);
  }

  bool has(const char* tensor) const { return golden.has(name + "." + tensor); }
  Numbers get(const std::string& tensor) const { return golden.get(name + "." + tensor); }
  // d g / d dt of an element of [B, T, H]
  double rate(std::size_t at) const {
    return -std::exp(get("A_log")[at % static_cast<std::size_t>(options.heads)]);
  }
  template <class Rows>
  static void fill(Rows& rows, const Numbers& stored) {
    std::size_t at = 0;
    rows.fill([&](auto...) { return stored[at++]; });
  }
  static void put(const Numbers& from, float* to) {
    std::transform(from.begin(), from.end(), to,
                   [](double number) { return static_cast<float>(number); });
  }
  // [.., Dv, F] and z [.., F] as one [.., F, Dv + 1].
  Numbers state(const Numbers& s, const Numbers& z) const {
    const auto f = static_cast<std::size_t>(x.shape.features),
               dv = static_cast<std::size_t>(x.shape.value_dim);
    Numbers out;
    for (std::size_t outer = 0; outer < z.size() / f; ++outer)
      for (std::size_t i = 0; i < f; ++i) {
        for (std::size_t c = 0; c < dv; ++c) out.push_back(s[(outer * dv + c) * f + i]);
        out.push_back(z[outer * f + i]);
      }
    return out;
  }
  template <class Rows>
  static Numbers all(const Rows& rows) {
    Numbers out;
    for (int b = 0; b < rows.batch; ++b)
      for (int64_t t = 0; t < rows.tokens; ++t)
        for (int h = 0; h < rows.heads; ++h)
          for (int c = 0; c < rows.width; ++c) out.push_back(number(rows.at(b, t, h, c)));
    return out;
  }

  void expect(double tolerance) const {
    const auto same = [&](const Numbers& got, const Numbers& wanted, const char* what) {
      EXPECT_LE(error(got, wanted), tolerance) << name << " " << what;
    };
    same(all(x.o), get("o"), "o");
    same(all(x.dq), get("grad_q"), "dq"), same(all(x.dk), get("grad_k"), "dk");
    same(all(x.dv), get("grad_v"), "dv");
    same(numbers(x.d_weight_q, x.weights()), get("grad_Wq"), "d_weight_q");
    same(numbers(x.d_weight_k, x.weights()), get("grad_Wk"), "d_weight_k");
    same(numbers(x.d_bias_q, x.biases()), get("grad_bq"), "d_bias_q");
    same(numbers(x.d_bias_k, x.biases()), get("grad_bk"), "d_bias_k");
    const Numbers state_out = numbers(x.state_out, x.shape.states_size());
    if (has("z_final")) {
      same(state_out, state(get("S_final"), get("z_final")), "state");
    } else {
      same(state_out, swapped(get("S_final"), x.shape.state_row(), x.shape.features), "state");
    }
    if (has("S0"))
      same(numbers(x.d_state_in, x.shape.states_size()), state(get("grad_S0"), get("grad_z0")),
           "d_state_in");
    if (has("g")) same(all(x.dg), get("grad_g"), "dg");
    if (has("dt")) expect_dt(same);
  }
  template <class Same>
  void expect_dt(const Same& same) const {
    const Numbers dg = all(x.dg), dt = get("dt");
    Numbers through_g(dg.size()), d_a_log(static_cast<std::size_t>(options.heads));
    for (std::size_t i = 0; i < dg.size(); ++i) {
      through_g[i] = dg[i] * rate(i);
      d_a_log[i % d_a_log.size()] += dg[i] * dt[i] * rate(i);
    }
    same(plus(all(x.ddt), through_g), get("grad_dt"), "ddt");
    same(d_a_log, get("grad_A_log"), "d_A_log");
  }
};

template <class E, class Where>
void check_golden(const Golden& golden, const std::string& name, const Where& where,
                  double tolerance) {
  const auto q = golden.shape(name + ".q"), v = golden.shape(name + ".v"),
             w = golden.shape(name + ".Wq");
  Options options;
  options.batch = static_cast<int>(q[0]), options.tokens = q[1],
  options.heads = static_cast<int>(q[2]);
  options.head_dim = static_cast<int>(q[3]), options.rows = static_cast<int>(w[1]);
  options.value_dim = static_cast<int>(v[3]);
  options.gates = golden.has(name + ".g") || golden.has(name + ".dt");
  options.eps = name.starts_with("eps1e-6") ? 1e-6f : 0.0f;
  GoldenProblem<E> problem(golden, name, options);
  run(where, problem.x);
  problem.expect(tolerance);
}

template <class Where>
void check_all_golden(const Where& where) {
  int checked = 0;
  for (const char* mixer : {"hedgehog", "hedgemamba"}) {
    const Golden golden(mixer);
    for (const std::string& name : golden.cases()) {
      if (name == "featuremap") continue;
      // The normaliser falls below float32's smallest number.
      if (name.starts_with("large_inputs")) continue;
      check_golden<float>(golden, name, where, 5e-5);
      // Gradients are rounded to bf16 once, at the end, and so is the cotangent.
      if (golden.is_bf16(name + ".q")) check_golden<bf16>(golden, name, where, 1.0 / 100);
      ++checked;
    }
  }
  EXPECT_EQ(checked, 30);
}
TEST(LinearCudaOnHost, EveryGoldenCaseWithAllGradients) { check_all_golden(OnHost{}); }

// ------------------------------------------------------------------ on a device

class LinearCudaOnDevice : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_device(); !why.empty()) GTEST_SKIP() << why;
  }
};

TEST_F(LinearCudaOnDevice, EveryShapeIsThePlainRecurrenceWithAllGradients) {
  expect_every_shape_right<float>(OnDevice{}, 2e-5);
}
TEST_F(LinearCudaOnDevice, Bf16RowsAreFloatRowsRoundedOnce) {
  expect_bf16_rounded_once(OnDevice{});
}
TEST_F(LinearCudaOnDevice, StepsAreThePlainRecurrence) {
  expect_steps_right<float>(OnDevice{}, 1e-5);
  expect_steps_right<bf16>(OnDevice{}, 1.0 / 200);
}
TEST_F(LinearCudaOnDevice, EveryGoldenCaseWithAllGradients) { check_all_golden(OnDevice{}); }

// ------------------------------------------------------------------ calls that cannot be

TEST(LinearCudaCalls, WhatIsMissingOrDoesNotFitIsNamed) {
  Problem<float> x({.tokens = 4});
  LinearForward<float> forward = x.forward();
  forward.maps.weight_k = nullptr;
  EXPECT_EQ(problem_of(x.shape, forward),
            "linear_forward: `maps.weight_k` is null; it must be given");
  LinearBackward<float> backward = x.backward();
  backward.o.data = nullptr;
  EXPECT_EQ(problem_of(x.shape, backward), "linear_backward: `o` is null; it must be given");
  LinearStep<float> step = x.step();
  step.scratch = nullptr;
  EXPECT_EQ(problem_of(x.shape, step), "linear_step: `scratch` is null; it must be given");
  LinearShape shape = x.shape;
  shape.features = 31;
  EXPECT_EQ(problem_of(shape, x.forward()),
            "linear_forward: `features` is 31; a feature map has two for each row of its weight");
  shape.maps = false;
  EXPECT_EQ(
      problem_of(shape, x.forward()),
      "linear_forward: `head_dim` is 16 and `features` 31; without feature maps they are the same");
}

}  // namespace
}  // namespace graft::cuda
