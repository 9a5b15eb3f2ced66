// Kernels with bfloat16 rows against those with float32 rows of the same numbers: all arithmetic is
// that of float32, so what comes out is the float32 result rounded once, to the last bit.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "gdn_kernel.h"
#include "linear.h"

namespace graft {
namespace {

using kernels::bf16;
using kernels::Rows;

bf16 rounded(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
float widened(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

// A head's rows in both types, the same numbers.
struct Twin {
  std::vector<bf16> narrow;
  std::vector<float> wide;
  int64_t width;

  Twin(int64_t rows, int64_t width_) : width(width_) {
    narrow.resize(static_cast<std::size_t>(rows * width));
    wide.resize(narrow.size());
  }
  Twin(int64_t rows, int64_t width_, std::mt19937& random) : Twin(rows, width_) {
    std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(width)));
    for (std::size_t i = 0; i < wide.size(); ++i) {
      narrow[i] = rounded(normal(random));
      wide[i] = widened(narrow[i]);
    }
  }
  template <class E>
  Rows<E> rows() {
    if constexpr (sizeof(E) == sizeof(bf16)) {
      return {narrow.data(), width};
    } else {
      return {wide.data(), width};
    }
  }
  void expect_rounded(const char* what) const {
    for (std::size_t i = 0; i < wide.size(); ++i) {
      ASSERT_TRUE(std::isfinite(wide[i])) << what << " " << i;
      ASSERT_EQ(narrow[i].bits, rounded(wide[i]).bits) << what << " " << i;
    }
  }
};

std::vector<float> gates(int64_t n, float low, float high, std::mt19937& random) {
  std::uniform_real_distribution<float> uniform(low, high);
  std::vector<float> out(static_cast<std::size_t>(n));
  for (float& x : out) x = uniform(random);
  return out;
}

struct Free {
  void operator()(float* p) const { std::free(p); }
};
std::unique_ptr<float, Free> scratch(int64_t n) {
  return std::unique_ptr<float, Free>(static_cast<float*>(
      std::aligned_alloc(64, (static_cast<std::size_t>(n) * sizeof(float) + 127) / 64 * 64)));
}

constexpr int64_t kLengths[] = {1, 15, 16, 17, 63, 65, 130};

template <class E>
void run_gdn(const gdn::HeadKernels<float, E>& kernels, const gdn::HeadShape& shape,
             std::vector<Twin>& x, std::vector<float>& g, std::vector<float>& beta) {
  const auto space = scratch(kernels.scratch_size(shape, 1));
  const auto n = static_cast<std::size_t>(shape.tokens);
  std::vector<float> borders(static_cast<std::size_t>(shape.chunks() * shape.state_size()));
  std::vector<float> err(n * static_cast<std::size_t>(shape.value_dim)), dg(n), dbeta(n);
  gdn::HeadForward<float, E> forward;
  forward.q = x[0].rows<const E>();
  forward.k = x[1].rows<const E>();
  forward.v = x[2].rows<const E>();
  forward.g = {g.data(), 1};
  forward.beta = {beta.data(), 1};
  forward.o = x[3].rows<E>();
  forward.borders = borders.data();
  forward.err = {err.data(), shape.value_dim};
  kernels.forward(shape, &forward, 1, space.get());
  gdn::HeadBackward<float, E> backward;
  backward.q = forward.q;
  backward.k = forward.k;
  backward.g = forward.g;
  backward.beta = forward.beta;
  backward.zero_state_in = true;
  backward.borders = borders.data();
  backward.err = {err.data(), shape.value_dim};
  backward.d_o = x[4].rows<const E>();
  backward.dq = x[5].rows<E>();
  backward.dk = x[6].rows<E>();
  backward.dv = x[7].rows<E>();
  backward.dg = {dg.data(), 1};
  backward.dbeta = {dbeta.data(), 1};
  kernels.backward(shape, &backward, 1, space.get());
}

TEST(Bf16Rows, OfTheDeltaRuleAreTheFloat32ResultRoundedOnce) {
  for (const char* isa : {"baseline", "avx2", "avx512"}) {
    const gdn::Kernels* const set = gdn::find_kernels(isa);
    if (set == nullptr) continue;
    for (const int64_t t : kLengths) {
      std::mt19937 random(static_cast<uint32_t>(t));
      gdn::HeadShape shape;
      shape.tokens = t;
      shape.key_dim = 24;
      shape.value_dim = 32;
      shape.chunk = 16;
      std::vector<Twin> x{{t, 24, random}, {t, 24, random}, {t, 32, random}, {t, 32},
                          {t, 32, random}, {t, 24},         {t, 24},         {t, 32}};
      std::vector<float> g = gates(t, -1, 0, random), beta = gates(t, 0, 1, random);
      run_gdn<bf16>(set->bf16, shape, x, g, beta);
      run_gdn<float>(set->f32, shape, x, g, beta);
      for (const std::size_t i : {3u, 5u, 6u, 7u}) x[i].expect_rounded(isa);
    }
  }
}

template <class E>
void run_linear(const linear::HeadKernels<float, E>& kernels, const linear::HeadShape& shape,
                std::vector<Twin>& x, std::vector<float>& maps, std::vector<float>& g,
                std::vector<float>& dt, std::vector<float>& d_maps) {
  const auto space = scratch(kernels.scratch_size(shape, 1));
  const auto n = static_cast<std::size_t>(shape.tokens);
  std::vector<float> borders(static_cast<std::size_t>(shape.chunks() * shape.state_size()));
  std::vector<float> norm(n), kept(n * static_cast<std::size_t>(shape.value_dim)), dg(n), ddt(n);
  const int64_t map = shape.features / 2 * shape.head_dim;
  linear::HeadForward<float, E> forward;
  forward.q = x[0].rows<const E>();
  forward.k = x[1].rows<const E>();
  forward.v = x[2].rows<const E>();
  forward.g = {g.data(), 1};
  forward.dt = {dt.data(), 1};
  forward.map_q.weight = maps.data();
  forward.map_k.weight = maps.data() + map;
  forward.floor = 1e-12f;
  forward.eps = 1e-20f;
  forward.o = x[3].rows<E>();
  forward.borders = borders.data();
  forward.norm = {norm.data(), 1};
  forward.o_kept = {kept.data(), shape.value_dim};
  kernels.forward(shape, &forward, 1, space.get());
  linear::HeadBackward<float, E> backward;
  backward.q = forward.q;
  backward.k = forward.k;
  backward.v = forward.v;
  backward.g = forward.g;
  backward.dt = forward.dt;
  backward.map_q = forward.map_q;
  backward.map_k = forward.map_k;
  backward.floor = forward.floor;
  backward.zero_state_in = true;
  backward.borders = borders.data();
  backward.norm = {norm.data(), 1};
  backward.o = {kept.data(), shape.value_dim};
  backward.d_o = x[4].rows<const E>();
  backward.dq = x[5].rows<E>();
  backward.dk = x[6].rows<E>();
  backward.dv = x[7].rows<E>();
  backward.dg = {dg.data(), 1};
  backward.ddt = {ddt.data(), 1};
  d_maps.assign(static_cast<std::size_t>(2 * map), 0);
  backward.d_weight_q = d_maps.data();
  backward.d_weight_k = d_maps.data() + map;
  kernels.backward(shape, &backward, 1, space.get());
}

TEST(Bf16Rows, OfLinearAttentionAreTheFloat32ResultRoundedOnce) {
  for (const char* isa : {"baseline", "avx2", "avx512"}) {
    const linear::Kernels* const set = linear::find_kernels(isa);
    if (set == nullptr) continue;
    for (const int64_t t : kLengths) {
      std::mt19937 random(static_cast<uint32_t>(t));
      linear::HeadShape shape;
      shape.tokens = t;
      shape.head_dim = 24;
      shape.features = 40;
      shape.value_dim = 32;
      shape.chunk = 16;
      std::vector<Twin> x{{t, 24, random}, {t, 24, random}, {t, 32, random}, {t, 32},
                          {t, 32, random}, {t, 24},         {t, 24},         {t, 32}};
      std::vector<float> maps = gates(2 * 20 * 24, -2, 2, random), g = gates(t, -5, 0, random),
                         dt = gates(t, 0, 1, random);
      std::vector<float> d_maps_narrow, d_maps_wide;
      run_linear<bf16>(set->bf16_rows, shape, x, maps, g, dt, d_maps_narrow);
      run_linear<float>(set->f32, shape, x, maps, g, dt, d_maps_wide);
      for (const std::size_t i : {3u, 5u, 6u, 7u}) x[i].expect_rounded(isa);
      EXPECT_EQ(d_maps_narrow, d_maps_wide) << isa << " " << t;
    }
  }
}

}  // namespace
}  // namespace graft
