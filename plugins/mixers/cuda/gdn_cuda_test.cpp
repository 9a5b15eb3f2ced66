// The delta rule's CUDA kernels: on the host's executor always, on a device where there is one.
#include "gdn_cuda.h"

#include <gtest/gtest.h>

#include <tuple>

#include "core/cuda/devices.h"
#include "cuda_testing.h"
#include "device_testing.h"
#include "gdn_kernels.h"
#include "host_block.h"
#include "problems.h"

namespace graft::cuda {
namespace {

template <class E>
GdnForward<E> moved(GdnForward<E> io, std::ptrdiff_t by) {
  shift_all(by, io.q.data, io.k.data, io.v.data, io.g.data, io.beta.data, io.state_in, io.o.data,
            io.state_out, io.borders, io.err, io.scratch);
  return io;
}
template <class E>
GdnBackward<E> moved(GdnBackward<E> io, std::ptrdiff_t by) {
  shift_all(by, io.q.data, io.k.data, io.g.data, io.beta.data, io.borders, io.err, io.d_o.data,
            io.d_state_out, io.dq.data, io.dk.data, io.dv.data, io.dg.data, io.dbeta.data,
            io.d_state_in, io.scratch);
  return io;
}
template <class E>
GdnStep<E> moved(GdnStep<E> io, std::ptrdiff_t by) {
  shift_all(by, io.q.data, io.k.data, io.v.data, io.g.data, io.beta.data, io.state_in, io.o.data,
            io.state_out);
  return io;
}

struct OnHost {
  DeviceLimits limits{108, 163 * 1024};
  Order order = Order::kForward;

  template <class E>
  std::string operator()(const Arena&, const GdnShape& shape, const GdnForward<E>& io) const {
    HostLaunch launch(limits.shared, order);
    gdn_forward_steps(shape, io, limits, launch);
    return problem_of(shape, io);
  }
  template <class E>
  std::string operator()(const Arena&, const GdnShape& shape, const GdnBackward<E>& io) const {
    HostLaunch launch(limits.shared, order);
    gdn_backward_steps(shape, io, limits, launch);
    return problem_of(shape, io);
  }
  template <class E>
  std::string operator()(const Arena&, const GdnShape& shape, const GdnStep<E>& io) const {
    HostLaunch launch(limits.shared, order);
    gdn_step_steps(shape, io, limits, launch);
    return problem_of(shape, io);
  }
};

struct OnDevice {
  template <class E>
  std::string operator()(const Arena& arena, const GdnShape& shape, const GdnForward<E>& io) const {
    return run_on_device(arena, [&](std::ptrdiff_t shift, void* stream) {
      return gdn_forward(shape, moved(io, shift), stream);
    });
  }
  template <class E>
  std::string operator()(const Arena& arena, const GdnShape& shape,
                         const GdnBackward<E>& io) const {
    return run_on_device(arena, [&](std::ptrdiff_t shift, void* stream) {
      return gdn_backward(shape, moved(io, shift), stream);
    });
  }
  template <class E>
  std::string operator()(const Arena& arena, const GdnShape& shape, const GdnStep<E>& io) const {
    return run_on_device(arena, [&](std::ptrdiff_t shift, void* stream) {
      return gdn_step(shape, moved(io, shift), stream);
    });
  }
};

// ------------------------------------------------------------------ one problem

struct Options {
  int batch = 1, heads = 1;
  int64_t tokens = 1;
  int key_dim = 16, value_dim = 16, gap = 0;
  bool state = true;  // a state goes in and gradients flow from the one that comes out
  float least_g = -1;
  bool resets = false, pads = false;

  std::string text() const {
    std::string out = "B" + std::to_string(batch) + " H" + std::to_string(heads) + " T" +
                      std::to_string(tokens) + " " + std::to_string(key_dim) + "x" +
                      std::to_string(value_dim) + " gap " + std::to_string(gap);
    return out + (state ? " state" : "") + (resets ? " resets" : "") + (pads ? " pads" : "");
  }
};

// Inputs, outputs and room of a forward and a backward pass.
template <class E>
struct Problem {
  Arena arena;
  GdnShape shape;
  TestTensor<E> q, k, v, o, d_o, dq, dk, dv;
  TestTensor<float> g, beta, dg, dbeta;
  float *state_in, *state_out, *d_state_out, *d_state_in, *borders, *err, *forward_scratch,
      *backward_scratch;
  float scale = 1;
  bool state = true;

  Problem(const Options& x)
      : shape{x.batch, x.heads, x.tokens, x.key_dim, x.value_dim}, state(x.state) {
    const auto rows = [&](int width) {
      return TestTensor<E>(arena, x.batch, x.tokens, x.heads, width, x.gap);
    };
    const auto gate = [&] {
      return TestTensor<float>(arena, x.batch, x.tokens, x.heads, 1, x.gap);
    };
    q = rows(x.key_dim), k = rows(x.key_dim), v = rows(x.value_dim), o = rows(x.value_dim);
    d_o = rows(x.value_dim), dq = rows(x.key_dim), dk = rows(x.key_dim), dv = rows(x.value_dim);
    g = gate(), beta = gate(), dg = gate(), dbeta = gate();
    for (float** p : {&state_in, &state_out, &d_state_out, &d_state_in})
      *p = arena.make_unwritten(shape.states_size());
    borders = arena.make_unwritten(shape.borders_size());
    err = arena.make_unwritten(shape.err_size());
    forward_scratch = arena.make_unwritten(shape.forward_scratch_size());
    backward_scratch = arena.make_unwritten(shape.backward_scratch_size());
    scale = 1 / std::sqrt(static_cast<float>(x.key_dim));
  }

  void randomise(const Options& x, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> uniform(0, 1);
    const auto normals = [&](double size) {
      return [&, size](auto...) { return size * normal(random); };
    };
    const double key_size = 1 / std::sqrt(static_cast<double>(x.key_dim));
    q.fill(normals(key_size)), k.fill(normals(key_size)), v.fill(normals(1)), d_o.fill(normals(1));
    normalise_keys();  // longer ones make the recurrence grow
    g.fill([&](auto...) { return x.least_g * uniform(random); });
    beta.fill([&](auto...) { return uniform(random); });
    for (int b = 0; b < shape.batch; ++b)
      for (int h = 0; h < shape.heads; ++h)
        for (int64_t t = 0; t < shape.tokens; ++t) {
          if (x.resets && t % 29 == 17) g.at(b, t, h, 0) = -std::numeric_limits<float>::infinity();
          if (x.pads && t % 5 == 3) g.at(b, t, h, 0) = beta.at(b, t, h, 0) = 0;
        }
    for (int64_t i = 0; i < shape.states_size(); ++i) {
      state_in[i] = static_cast<float>(normal(random));
      d_state_out[i] = static_cast<float>(normal(random));
    }
  }

  void normalise_keys() {
    for (int b = 0; b < shape.batch; ++b)
      for (int h = 0; h < shape.heads; ++h)
        for (int64_t t = 0; t < shape.tokens; ++t) {
          double sum = 1e-6;
          for (int c = 0; c < shape.key_dim; ++c) sum += std::pow(number(k.at(b, t, h, c)), 2);
          for (int c = 0; c < shape.key_dim; ++c)
            k.at(b, t, h, c) =
                stored<E>(static_cast<float>(number(k.at(b, t, h, c)) / std::sqrt(sum)));
        }
  }

  GdnForward<E> forward() const {
    GdnForward<E> io;
    io.q = q.template tensor<const E>(), io.k = k.template tensor<const E>();
    io.v = v.template tensor<const E>(), io.o = o.template tensor<E>();
    io.g = g.template tensor<const float>(), io.beta = beta.template tensor<const float>();
    io.scale = scale;
    if (state) io.state_in = state_in;
    io.state_out = state_out, io.borders = borders, io.err = err, io.scratch = forward_scratch;
    return io;
  }
  GdnBackward<E> backward() const {
    GdnBackward<E> io;
    io.q = q.template tensor<const E>(), io.k = k.template tensor<const E>();
    io.g = g.template tensor<const float>(), io.beta = beta.template tensor<const float>();
    io.scale = scale;
    io.borders = borders, io.err = err, io.d_o = d_o.template tensor<const E>();
    if (state) io.d_state_out = d_state_out;
    io.dq = dq.template tensor<E>(), io.dk = dk.template tensor<E>(),
    io.dv = dv.template tensor<E>();
    io.dg = dg.template tensor<float>(), io.dbeta = dbeta.template tensor<float>();
    io.d_state_in = d_state_in, io.scratch = backward_scratch;
    return io;
  }
  GdnStep<E> step() const {
    GdnStep<E> io;
    io.q = q.template tensor<const E>(), io.k = k.template tensor<const E>();
    io.v = v.template tensor<const E>(), io.o = o.template tensor<E>();
    io.g = g.template tensor<const float>(), io.beta = beta.template tensor<const float>();
    io.scale = scale;
    if (state) io.state_in = state_in;
    io.state_out = state_out;
    return io;
  }

  GdnPlain plain(int b, int h) const {
    GdnPlainInput x;
    x.tokens = static_cast<std::size_t>(shape.tokens);
    x.key_dim = static_cast<std::size_t>(shape.key_dim);
    x.value_dim = static_cast<std::size_t>(shape.value_dim);
    x.scale = scale;
    x.q = q.head(b, h), x.k = k.head(b, h), x.v = v.head(b, h), x.d_o = d_o.head(b, h);
    x.g = g.head(b, h), x.beta = beta.head(b, h);
    x.state =
        state ? of_head(state_in, b, h) : Numbers(static_cast<std::size_t>(shape.state_size()));
    x.d_state = state ? of_head(d_state_out, b, h) : Numbers(x.state.size());
    return gdn_plain(x);
  }
  Numbers of_head(const float* states, int b, int h) const {
    return numbers(states + (b * shape.heads + h) * shape.state_size(), shape.state_size());
  }

  // Everything that was computed, to the last bit.
  std::vector<std::byte> results() const { return {arena.data(), arena.data() + arena.used()}; }
};

template <class E>
void expect_plain(const Problem<E>& x, double tolerance, const std::string& what) {
  for (int b = 0; b < x.shape.batch; ++b) {
    for (int h = 0; h < x.shape.heads; ++h) {
      const GdnPlain wanted = x.plain(b, h);
      const std::tuple<const char*, Numbers, const Numbers&> all[] = {
          {"o", x.o.head(b, h), wanted.o},
          {"state", x.of_head(x.state_out, b, h), wanted.state},
          {"dq", x.dq.head(b, h), wanted.dq},
          {"dk", x.dk.head(b, h), wanted.dk},
          {"dv", x.dv.head(b, h), wanted.dv},
          {"dg", x.dg.head(b, h), wanted.dg},
          {"dbeta", x.dbeta.head(b, h), wanted.dbeta},
          {"d_state_in", x.of_head(x.d_state_in, b, h), wanted.d_state_in}};
      for (const auto& [name, got, want] : all)
        EXPECT_LE(error(got, want), tolerance) << what << " " << name << " of " << b << ", " << h;
    }
  }
}
template <class E>
void expect_gaps_untouched(const Problem<E>& x, const std::string& what) {
  for (const auto* rows : {&x.o, &x.dq, &x.dk, &x.dv}) rows->expect_gaps_untouched(what);
  for (const auto* rows : {&x.dg, &x.dbeta}) rows->expect_gaps_untouched(what);
}

template <class E, class Where>
void run(const Where& where, const Problem<E>& x, const std::string& what) {
  ASSERT_EQ(where(x.arena, x.shape, x.forward()), "") << what;
  ASSERT_EQ(where(x.arena, x.shape, x.backward()), "") << what;
}

std::vector<Options> shapes() {
  std::vector<Options> out;
  for (const int64_t tokens : {0, 1, 2, 63, 64, 65, 127, 193}) {
    out.push_back({1, 1, tokens, 16, 32, 0});
    out.push_back({1, 2, tokens, 24, 20, 4, tokens % 2 == 0, -3, true});
  }
  out.push_back({2, 3, 70, 33, 17, 3, true, -1, true, true});  // nothing is aligned
  out.push_back({1, 1, 130, 5, 3, 1, true, -1, false, true});
  out.push_back({1, 1, 130, 64, 128, 0, true, -20});
  out.push_back({1, 1, 66, 128, 64, 0, false, -0.1f});
  out.push_back({1, 1, 129, 96, 80, 8, true, -0.01f, false, true});
  out.push_back({3, 1, 65, 2, 1, 0});
  return out;
}

// Devices that lead to each choice of value tiles; the last has too little shared memory for
// states.
constexpr DeviceLimits kDevices[] = {{1, 99 * 1024}, {3, 163 * 1024}, {132, 227 * 1024}};

template <class E, class Where>
void expect_every_shape_right(const Where& where, double tolerance) {
  unsigned seed = 1;
  for (const Options& options : shapes()) {
    Problem<E> x(options);
    x.randomise(options, seed++);
    run(where, x, options.text());
    expect_plain(x, tolerance, options.text());
    expect_gaps_untouched(x, options.text());
  }
}

// ------------------------------------------------------------------ tests

TEST(GdnCudaOnHost, EveryShapeAndValueTileIsThePlainRecurrenceWithAllGradients) {
  for (const DeviceLimits& device : kDevices) expect_every_shape_right<float>(OnHost{device}, 1e-5);
}

TEST(GdnCudaOnHost, StatesThatSharedMemoryCannotHoldAreKeptInGlobalMemory) {
  // Too little for the narrowest tile of a state of 256 keys, enough for everything else.
  const DeviceLimits device{1, 74 * 1024};
  for (const int64_t tokens : {0, 1, 65, 140}) {
    for (const bool state : {true, false}) {
      const Options options{1, 2, tokens, 1000, 20, 0, state, -0.2f};
      Problem<float> x(options);
      x.randomise(options, 7);
      run(OnHost{device}, x, options.text());
      expect_plain(x, 1e-5, options.text());
    }
  }
}

// Threads of a phase in any order: a barrier that is missing shows as a different result, if the
// executor has not found it before.
TEST(GdnCudaOnHost, TheOrderOfThreadsAndBlocksDoesNotMatter) {
  for (const Options& options :
       {Options{2, 2, 150, 40, 72, 0, true, -1, true, true}, Options{1, 1, 65, 70, 33, 1}}) {
    for (const DeviceLimits& device :
         {kDevices[0], kDevices[1], kDevices[2], DeviceLimits{1, 72 * 1024}}) {
      std::vector<std::byte> first;
      for (const Order order : {Order::kForward, Order::kReverse, Order::kShuffled}) {
        Problem<float> x(options);
        x.randomise(options, 3);
        run(OnHost{device, order}, x, options.text());
        if (first.empty()) first = x.results();
        EXPECT_TRUE(first == x.results()) << options.text();
      }
    }
  }
}

// bfloat16 is a format of rows, not of arithmetic: results are those of float rows with the same
// numbers, rounded once.
template <class Where>
void expect_bf16_rounded_once(const Where& where) {
  for (const Options& options :
       {Options{1, 2, 130, 32, 64, 0}, Options{2, 1, 65, 20, 12, 4, false, -2, true, true}}) {
    Problem<bf16> narrow(options);
    Problem<float> wide(options);
    narrow.randomise(options, 11);
    wide.randomise(options, 11);
    const auto copy = [](const TestTensor<bf16>& from, TestTensor<float>& to) {
      to.fill([&](int b, int64_t t, int h, int c) { return number(from.at(b, t, h, c)); });
    };
    copy(narrow.q, wide.q), copy(narrow.k, wide.k), copy(narrow.v, wide.v),
        copy(narrow.d_o, wide.d_o);
    run(where, narrow, options.text());
    run(where, wide, options.text());
    const std::pair<const TestTensor<bf16>*, const TestTensor<float>*> rows[] = {
        {&narrow.o, &wide.o},
        {&narrow.dq, &wide.dq},
        {&narrow.dk, &wide.dk},
        {&narrow.dv, &wide.dv}};
    for (const auto& [got, exact] : rows)
      for (int64_t i = 0; i < got->size(); ++i)
        ASSERT_EQ(got->data[i].bits, stored<bf16>(exact->data[i]).bits)
            << options.text() << " " << i;
    for (int b = 0; b < options.batch; ++b)
      for (int h = 0; h < options.heads; ++h) {
        EXPECT_EQ(narrow.of_head(narrow.state_out, b, h), wide.of_head(wide.state_out, b, h));
        EXPECT_EQ(narrow.dg.head(b, h), wide.dg.head(b, h));
      }
  }
}
TEST(GdnCudaOnHost, Bf16RowsAreFloatRowsRoundedOnce) { expect_bf16_rounded_once(OnHost{}); }

// A reset lets nothing through, exactly: tokens before it get no gradient from those after, and the
// reset itself none at all.
TEST(GdnCudaOnHost, AResetIsExact) {
  const Options options{1, 1, 100, 16, 24, 0};
  Problem<float> x(options);
  x.randomise(options, 5);
  constexpr int64_t kReset = 70;
  x.g.at(0, kReset, 0, 0) = -std::numeric_limits<float>::infinity();
  for (int64_t t = 0; t < kReset; ++t)
    for (int c = 0; c < 24; ++c) x.d_o.at(0, t, 0, c) = 0;
  run(OnHost{}, x, "reset");
  for (int64_t t = 0; t < kReset; ++t) {
    for (int c = 0; c < 16; ++c) ASSERT_EQ(x.dk.at(0, t, 0, c), 0) << t;
    for (int c = 0; c < 24; ++c) ASSERT_EQ(x.dv.at(0, t, 0, c), 0) << t;
    ASSERT_EQ(x.dg.at(0, t, 0, 0), 0) << t;
    ASSERT_EQ(x.dbeta.at(0, t, 0, 0), 0) << t;
  }
  EXPECT_EQ(x.dg.at(0, kReset, 0, 0), 0);
  for (double d : x.of_head(x.d_state_in, 0, 0)) ASSERT_EQ(d, 0);
}

TEST(GdnCudaOnHost, PadsLeaveTheStateAsItIs) {
  const Options options{1, 1, 66, 16, 24, 0};
  Problem<float> x(options);
  x.randomise(options, 6);
  x.g.fill([](auto...) { return 0; });
  x.beta.fill([](auto...) { return 0; });
  ASSERT_EQ(OnHost{}(x.arena, x.shape, x.forward()), "");
  EXPECT_EQ(x.of_head(x.state_out, 0, 0), x.of_head(x.state_in, 0, 0));
}

template <class E, class Where>
void expect_steps_right(const Where& where, double tolerance) {
  unsigned seed = 50;
  for (const int64_t tokens : {0, 1, 3}) {
    for (const auto& [dk, dv, gap] :
         {std::tuple(64, 64, 0), {33, 17, 3}, {128, 128, 0}, {5, 70, 1}, {300, 40, 0}}) {
      for (const bool state : {true, false}) {
        const Options options{2, 2, tokens, dk, dv, gap, state, -1, false, seed % 2 == 0};
        Problem<E> x(options);
        x.randomise(options, seed++);
        ASSERT_EQ(where(x.arena, x.shape, x.step()), "");
        for (int b = 0; b < 2; ++b)
          for (int h = 0; h < 2; ++h) {
            const GdnPlain wanted = x.plain(b, h);
            EXPECT_LE(error(x.o.head(b, h), wanted.o), tolerance) << options.text();
            EXPECT_LE(error(x.of_head(x.state_out, b, h), wanted.state), 1e-5) << options.text();
          }
        x.o.expect_gaps_untouched(options.text());
        if (!state) continue;
        Problem<E> in_place(options);
        in_place.randomise(options, seed - 1);
        GdnStep<E> io = in_place.step();
        io.state_out = in_place.state_in;
        ASSERT_EQ(where(in_place.arena, in_place.shape, io), "");
        EXPECT_EQ(in_place.of_head(in_place.state_in, 1, 1), x.of_head(x.state_out, 1, 1))
            << options.text();
      }
    }
  }
}
TEST(GdnCudaOnHost, StepsAreThePlainRecurrence) {
  expect_steps_right<float>(OnHost{}, 1e-5);
  expect_steps_right<bf16>(OnHost{{}, Order::kShuffled}, 1.0 / 200);
}

// ------------------------------------------------------------------ golden vectors

template <class E, class Where>
void check_golden(const Golden& golden, const std::string& name, const Where& where,
                  double tolerance) {
  const auto key = [&](const char* tensor) { return name + "." + tensor; };
  const auto q_shape = golden.shape(key("q")), v_shape = golden.shape(key("v"));
  Options options;
  options.batch = static_cast<int>(q_shape[0]), options.tokens = q_shape[1];
  options.heads = static_cast<int>(q_shape[2]);
  options.key_dim = static_cast<int>(q_shape[3]), options.value_dim = static_cast<int>(v_shape[3]);
  Problem<E> x(options);
  const auto fill = [&](auto& rows, const char* tensor) {
    const Numbers stored = golden.get(key(tensor));
    std::size_t at = 0;
    rows.fill([&](auto...) { return stored[at++]; });
  };
  fill(x.q, "q"), fill(x.k, "k"), fill(x.v, "v"), fill(x.g, "g"), fill(x.beta, "beta"),
      fill(x.d_o, "cot_o");
  const auto state = [&](const char* tensor) {
    return swapped(golden.get(key(tensor)), options.value_dim, options.key_dim);
  };
  const auto put = [](const Numbers& from, float* to) {
    std::transform(from.begin(), from.end(), to,
                   [](double number) { return static_cast<float>(number); });
  };
  const bool has_state = golden.has(key("S0"));
  put(has_state ? state("S0") : Numbers(static_cast<std::size_t>(x.shape.states_size())),
      x.state_in);
  put(state("cot_S_final"), x.d_state_out);
  run(where, x, name);

  const auto expect = [&](const auto& rows, const char* tensor) {
    Numbers got;
    for (int b = 0; b < options.batch; ++b)
      for (int64_t t = 0; t < options.tokens; ++t)
        for (int h = 0; h < options.heads; ++h)
          for (int c = 0; c < rows.width; ++c) got.push_back(number(rows.at(b, t, h, c)));
    EXPECT_LE(error(got, golden.get(key(tensor))), tolerance) << name << " " << tensor;
  };
  expect(x.o, "o"), expect(x.dq, "grad_q"), expect(x.dk, "grad_k"), expect(x.dv, "grad_v");
  expect(x.dg, "grad_g"), expect(x.dbeta, "grad_beta");
  const auto states = [&](const float* data) { return numbers(data, x.shape.states_size()); };
  EXPECT_LE(error(states(x.state_out), state("S_final")), tolerance) << name << " state";
  if (!has_state) return;
  EXPECT_LE(error(states(x.d_state_in), state("grad_S0")), tolerance) << name << " d state";
}

template <class Where>
void check_all_golden(const Where& where) {
  const Golden golden("gdn");
  int checked = 0;
  for (const std::string& name : golden.cases()) {
    if (name.starts_with("raw_l2norm")) continue;  // its queries and keys are not normalised yet
    check_golden<float>(golden, name, where, 2e-5);
    // Outputs and gradients are rounded to bf16 once, at the end, and so is the cotangent.
    if (golden.is_bf16(name + ".q")) check_golden<bf16>(golden, name, where, 1.0 / 100);
    ++checked;
  }
  EXPECT_EQ(checked, 20);
}
TEST(GdnCudaOnHost, EveryGoldenCaseWithAllGradients) { check_all_golden(OnHost{}); }

// ------------------------------------------------------------------ on a device

class GdnCudaOnDevice : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_device(); !why.empty()) GTEST_SKIP() << why;
  }
};

TEST_F(GdnCudaOnDevice, EveryShapeIsThePlainRecurrenceWithAllGradients) {
  expect_every_shape_right<float>(OnDevice{}, 1e-5);
}
TEST_F(GdnCudaOnDevice, Bf16RowsAreFloatRowsRoundedOnce) { expect_bf16_rounded_once(OnDevice{}); }
TEST_F(GdnCudaOnDevice, StepsAreThePlainRecurrence) {
  expect_steps_right<float>(OnDevice{}, 1e-5);
  expect_steps_right<bf16>(OnDevice{}, 1.0 / 200);
}
TEST_F(GdnCudaOnDevice, EveryGoldenCaseWithAllGradients) { check_all_golden(OnDevice{}); }

// ------------------------------------------------------------------ calls that cannot be

TEST(GdnCudaCalls, WhatIsMissingOrOutOfRangeIsNamed) {
  const Options options{1, 1, 4, 8, 8};
  Problem<float> x(options);
  GdnForward<float> forward = x.forward();
  forward.v.data = nullptr;
  EXPECT_EQ(problem_of(x.shape, forward), "gdn_forward: `v` is null; it must be given");
  GdnBackward<float> backward = x.backward();
  backward.scratch = nullptr;
  EXPECT_EQ(problem_of(x.shape, backward), "gdn_backward: `scratch` is null; it must be given");
  GdnStep<float> step = x.step();
  step.state_out = nullptr;
  EXPECT_EQ(problem_of(x.shape, step), "gdn_step: `state_out` is null; it must be given");
  GdnShape shape = x.shape;
  shape.heads = 70000;
  EXPECT_EQ(problem_of(shape, x.forward()),
            "gdn_forward: `heads` is 70000; it goes from 1 to 65535");
}

TEST(GdnCudaCalls, WithoutADeviceTheLauncherSaysSo) {
  if (why_no_device().empty()) GTEST_SKIP() << "there is a device";
  const Options options{1, 1, 4, 8, 8};
  Problem<float> x(options);
  EXPECT_NE(gdn_forward(x.shape, x.forward(), nullptr), "");
}

// ------------------------------------------------------------------ the executor itself

struct Broken {
  enum class Fault { kNone, kUnwritten, kRace, kOutside, kUnaligned } fault;
  Grid grid() const { return {}; }
  int shared() const { return kThreads; }
  template <class Block>
  void operator()(Block& block) const {
    const auto memory = tile(block, Place{0, 0});
    block.phase([&](int t) {
      if (fault != Fault::kUnwritten || t != 9) memory.set(t, 1);
    });
    block.phase([&](int t) {
      if (fault == Fault::kRace) memory.set(t, memory((t + 1) % kThreads));
      if (fault == Fault::kOutside && t == 3) memory.set(kThreads, 1);
      if (fault == Fault::kUnaligned && t == 3) static_cast<void>(memory.template pack<4>(0, 2));
      static_cast<void>(memory(t));
    });
  }
};

std::string complaint(Broken::Fault fault) {
  try {
    HostLaunch(48 * 1024, Order::kForward)(Broken{fault});
  } catch (const std::logic_error& error) {
    return error.what();
  }
  return "";
}

TEST(HostExecutor, FindsWhatADeviceWouldNotForgive) {
  using Fault = Broken::Fault;
  EXPECT_EQ(complaint(Fault::kNone), "");
  EXPECT_EQ(complaint(Fault::kUnwritten),
            "phase 2: thread 9 reads float 9 of shared memory, which nobody wrote");
  EXPECT_EQ(
      complaint(Fault::kRace),
      "phase 2: thread 1 writes float 1 of shared memory, which thread 0 read in the same phase");
  EXPECT_EQ(
      complaint(Fault::kOutside),
      "phase 2: thread 3 writes float 256 of shared memory, outside of the 256 that the block has");
  EXPECT_EQ(complaint(Fault::kUnaligned),
            "phase 2: thread 3 reads float 2 of shared memory, as a pack of 4 that is not aligned");
  EXPECT_THROW(HostLaunch(512, Order::kForward)(Broken{Fault::kNone}), std::logic_error);
}

}  // namespace
}  // namespace graft::cuda
