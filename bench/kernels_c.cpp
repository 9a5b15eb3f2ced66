// The mixers' kernels behind plain C functions, for side_by_side.py. Tensors are contiguous: q, k
// [B,T,H,K], v, o [B,T,H,V], g, beta [B,T,H], states [B,H,K,V]; float32 unless a name says
// otherwise. Each head of each sequence is one unit of work, as in the plugins. Results: 0, or 1
// where memory runs out.
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "gdn_kernel.h"
#include "isa.h"
#include "linear.h"
#include "machine.h"

namespace {

using graft::kernels::bf16;
using graft::kernels::Rows;

struct Shape {
  int64_t batch, tokens, heads, key_dim, value_dim, chunk;
  int64_t rows() const { return batch * heads; }
  graft::gdn::HeadShape head() const { return {tokens, key_dim, value_dim, chunk}; }
};

struct Free {
  void operator()(float* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<float, Free>;

Buffer buffer(int64_t n) {
  const auto bytes = (static_cast<size_t>(n) * sizeof(float) + 63) / 64 * 64;
  Buffer out(static_cast<float*>(std::aligned_alloc(64, std::max<size_t>(bytes, 64))));
  if (out == nullptr) throw std::bad_alloc();
  return out;
}

// body(sequence, first head, heads, scratch) for groups of the heads of every sequence.
template <class Body>
int for_each_group(const Shape& s, int64_t at_once, int64_t scratch_size, int threads,
                   const Body& body) {
  try {
    std::vector<Buffer> scratch;
    for (int i = 0; i < threads; ++i) scratch.push_back(buffer(scratch_size));
    const int64_t groups = (s.heads + at_once - 1) / at_once;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t i = 0; i < s.batch * groups; ++i) {
      const int64_t first = i % groups * at_once;
      body(i / groups, first, std::min(at_once, s.heads - first),
           scratch[static_cast<size_t>(omp_get_thread_num())].get());
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// One head's rows of a tensor [B,T,H,width].
template <class T>
Rows<T> rows(T* data, const Shape& s, int64_t b, int64_t h, int64_t width) {
  if (data == nullptr) return {};
  return {data + (b * s.tokens * s.heads + h) * width, s.heads * width};
}

template <class E>
struct GdnInputs {
  const Shape& s;
  const E *q, *k, *v;
  const float *g, *beta;

  template <class Call>
  void set(Call& call, int64_t b, int64_t h) const {
    call.q = rows(q, s, b, h, s.key_dim);
    call.k = rows(k, s, b, h, s.key_dim);
    call.g = rows(g, s, b, h, 1);
    call.beta = rows(beta, s, b, h, 1);
    call.scale = 1 / std::sqrt(static_cast<float>(s.key_dim));
  }
  graft::gdn::HeadForward<float, E> head(int64_t b, int64_t h, E* o) const {
    graft::gdn::HeadForward<float, E> call;
    set(call, b, h);
    call.v = rows(v, s, b, h, s.value_dim);
    call.o = rows(o, s, b, h, s.value_dim);
    return call;
  }
};

template <class E>
int gdn_forward(const GdnInputs<E>& in, const graft::gdn::HeadKernels<float, E>& kernels, E* o,
                float* borders, float* err, int threads) {
  const Shape& s = in.s;
  const auto head = s.head();
  const int64_t border = head.chunks() * head.state_size();
  const int64_t at_once = graft::gdn::heads_at_once(head, s.heads, s.batch, threads);
  return for_each_group(s, at_once, kernels.scratch_size(head, at_once), threads,
                        [&](int64_t b, int64_t first, int64_t n, float* scratch) {
                          std::vector<graft::gdn::HeadForward<float, E>> heads;
                          for (int64_t h = first; h < first + n; ++h) {
                            auto& call = heads.emplace_back(in.head(b, h, o));
                            if (borders != nullptr)
                              call.borders = borders + (b * s.heads + h) * border;
                            call.err = rows(err, s, b, h, s.value_dim);
                          }
                          kernels.forward(head, heads.data(), n, scratch);
                        });
}

struct LinearInputs {
  const Shape& s;
  const float *q, *k, *v, *g, *w_q, *w_k;
  bool scan_alone = false;

  graft::linear::HeadShape shape() const {
    graft::linear::HeadShape out;
    out.tokens = s.tokens;
    out.head_dim = s.key_dim;
    out.features = scan_alone ? s.key_dim : 2 * s.key_dim;
    out.value_dim = s.value_dim;
    out.chunk = s.chunk;
    out.maps = out.normalise = !scan_alone;
    return out;
  }
  template <class Call>
  void set(Call& call, int64_t b, int64_t h) const {
    call.q = rows(q, s, b, h, s.key_dim);
    call.k = rows(k, s, b, h, s.key_dim);
    call.v = rows(v, s, b, h, s.value_dim);
    call.g = rows(g, s, b, h, 1);
    if (scan_alone) return;
    call.map_q.weight = w_q + h * s.key_dim * s.key_dim;
    call.map_k.weight = w_k + h * s.key_dim * s.key_dim;
  }
};

int linear_forward(const LinearInputs& in, float* o, float* borders, float* norm, int threads) {
  const Shape& s = in.s;
  const auto shape = in.shape();
  const auto& kernels = graft::linear::kernels().f32;
  const int64_t at_once = graft::linear::heads_at_once(shape, s.heads, s.batch, threads);
  return for_each_group(s, at_once, kernels.scratch_size(shape, at_once), threads,
                        [&](int64_t b, int64_t first, int64_t n, float* scratch) {
                          std::vector<graft::linear::HeadForward<float>> heads;
                          for (int64_t h = first; h < first + n; ++h) {
                            auto& call = heads.emplace_back();
                            in.set(call, b, h);
                            call.o = rows(o, s, b, h, s.value_dim);
                            if (borders != nullptr)
                              call.borders =
                                  borders + (b * s.heads + h) * shape.chunks() * shape.state_size();
                            call.norm = rows(norm, s, b, h, 1);
                          }
                          kernels.forward(shape, heads.data(), n, scratch);
                        });
}

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

extern "C" {

const char* graft_bench_isa() { return graft::gdn::kernels().isa; }

// float32 operations a second, all threads together: the best of a few tries.
double graft_bench_peak(int threads) {
  double best = 0;
  for (int i = 0; i < 5; ++i) {
    double flops = 0;
    const double start = seconds();
#pragma omp parallel num_threads(threads) reduction(+ : flops)
    {
      float sink = 1e-3f;
      flops += graft::bench::limits().multiply_add(4'000'000, &sink);
      volatile float keep = sink;
      (void)keep;
    }
    best = std::max(best, flops / (seconds() - start));
  }
  return best;
}

// Bytes a second of c = a + 3 b over arrays far beyond the caches, three streams counted.
double graft_bench_triad(int threads) {
  constexpr int64_t kSize = int64_t{1} << 25;
  const Buffer a = buffer(kSize), b = buffer(kSize), c = buffer(kSize);
  double best = 0;
  for (int i = 0; i < 6; ++i) {
    float *pa = a.get(), *pb = b.get(), *pc = c.get();
    const double start = seconds();
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t j = 0; j < kSize; ++j) {
      if (i == 0) pa[j] = pb[j] = 1;  // first touched by who uses it
      pc[j] = pa[j] + 3 * pb[j];
    }
    if (i > 0) best = std::max(best, 3.0 * sizeof(float) * kSize / (seconds() - start));
  }
  return best;
}

int graft_bench_gdn_forward(const Shape* s, const float* q, const float* k, const float* v,
                            const float* g, const float* beta, float* o, int threads) {
  return gdn_forward<float>({*s, q, k, v, g, beta}, graft::gdn::kernels().f32, o, nullptr, nullptr,
                            threads);
}

int graft_bench_gdn_forward_bf16(const Shape* s, const bf16* q, const bf16* k, const bf16* v,
                                 const float* g, const float* beta, bf16* o, int threads) {
  return gdn_forward<bf16>({*s, q, k, v, g, beta}, graft::gdn::kernels().bf16, o, nullptr, nullptr,
                           threads);
}

// T = 1 or more, token by token; the state is updated in place.
int graft_bench_gdn_step(const Shape* s, const float* q, const float* k, const float* v,
                         const float* g, const float* beta, float* state, float* o, int threads) {
  const auto& kernels = graft::gdn::kernels().f32;
  const GdnInputs<float> in{*s, q, k, v, g, beta};
  return for_each_group(*s, 1, kernels.scratch_size(s->head(), 1), threads,
                        [&](int64_t b, int64_t h, int64_t, float* scratch) {
                          graft::gdn::HeadForward<float> call = in.head(b, h, o);
                          call.state_out = state + (b * s->heads + h) * s->key_dim * s->value_dim;
                          call.state_in = call.state_out;
                          kernels.step(s->head(), call, scratch);
                        });
}

int graft_bench_gdn_forward_backward(const Shape* s, const float* q, const float* k, const float* v,
                                     const float* g, const float* beta, float* o, const float* d_o,
                                     float* dq, float* dk, float* dv, float* dg, float* dbeta,
                                     int threads) {
  const auto& kernels = graft::gdn::kernels().f32;
  const GdnInputs<float> in{*s, q, k, v, g, beta};
  const auto head = s->head();
  const int64_t border = head.chunks() * head.state_size();
  const Buffer borders = buffer(s->rows() * border);
  const Buffer err = buffer(s->rows() * s->tokens * s->value_dim);
  const int done = gdn_forward<float>(in, kernels, o, borders.get(), err.get(), threads);
  if (done != 0) return done;
  const int64_t at_once = graft::gdn::heads_at_once(head, s->heads, s->batch, threads);
  return for_each_group(*s, at_once, kernels.scratch_size(head, at_once), threads,
                        [&](int64_t b, int64_t first, int64_t n, float* scratch) {
                          std::vector<graft::gdn::HeadBackward<float>> heads;
                          for (int64_t h = first; h < first + n; ++h) {
                            auto& call = heads.emplace_back();
                            in.set(call, b, h);
                            call.zero_state_in = true;
                            call.borders = borders.get() + (b * s->heads + h) * border;
                            call.err = rows<const float>(err.get(), *s, b, h, s->value_dim);
                            call.d_o = rows(d_o, *s, b, h, s->value_dim);
                            call.dq = rows(dq, *s, b, h, s->key_dim);
                            call.dk = rows(dk, *s, b, h, s->key_dim);
                            call.dv = rows(dv, *s, b, h, s->value_dim);
                            call.dg = rows(dg, *s, b, h, 1);
                            call.dbeta = rows(dbeta, *s, b, h, 1);
                          }
                          kernels.backward(head, heads.data(), n, scratch);
                        });
}

// ---- linear attention; q, k [B,T,H,K] through feature maps w_q, w_k [H,K,K] (2 K features); g
// [B,T,H] or NULL

int graft_bench_linear_forward(const Shape* s, const float* q, const float* k, const float* v,
                               const float* g, const float* w_q, const float* w_k, float* o,
                               int threads) {
  return linear_forward({*s, q, k, v, g, w_q, w_k}, o, nullptr, nullptr, threads);
}

int graft_bench_linear_forward_backward(const Shape* s, const float* q, const float* k,
                                        const float* v, const float* g, const float* w_q,
                                        const float* w_k, float* o, const float* d_o, float* dq,
                                        float* dk, float* dv, float* dg, float* dw_q, float* dw_k,
                                        int threads) {
  const LinearInputs in{*s, q, k, v, g, w_q, w_k};
  const auto shape = in.shape();
  const int64_t border = shape.chunks() * shape.state_size(), map = s->key_dim * s->key_dim;
  const Buffer borders = buffer(s->rows() * border), norm = buffer(s->rows() * s->tokens);
  const Buffer maps_q = buffer(s->rows() * map), maps_k = buffer(s->rows() * map);
  const int done = linear_forward(in, o, borders.get(), norm.get(), threads);
  if (done != 0) return done;
  std::fill_n(maps_q.get(), s->rows() * map, 0.f);
  std::fill_n(maps_k.get(), s->rows() * map, 0.f);
  const auto& kernels = graft::linear::kernels().f32;
  const int64_t at_once = graft::linear::heads_at_once(shape, s->heads, s->batch, threads);
  const int failed = for_each_group(*s, at_once, kernels.scratch_size(shape, at_once), threads,
                                    [&](int64_t b, int64_t first, int64_t n, float* scratch) {
                                      std::vector<graft::linear::HeadBackward<float>> heads;
                                      for (int64_t h = first; h < first + n; ++h) {
                                        auto& call = heads.emplace_back();
                                        const int64_t row = b * s->heads + h;
                                        in.set(call, b, h);
                                        call.zero_state_in = true;
                                        call.borders = borders.get() + row * border;
                                        call.norm = rows<const float>(norm.get(), *s, b, h, 1);
                                        call.o = rows<const float>(o, *s, b, h, s->value_dim);
                                        call.d_o = rows(d_o, *s, b, h, s->value_dim);
                                        call.dq = rows(dq, *s, b, h, s->key_dim);
                                        call.dk = rows(dk, *s, b, h, s->key_dim);
                                        call.dv = rows(dv, *s, b, h, s->value_dim);
                                        call.dg = rows(dg, *s, b, h, 1);
                                        call.d_weight_q = maps_q.get() + row * map;
                                        call.d_weight_k = maps_k.get() + row * map;
                                      }
                                      kernels.backward(shape, heads.data(), n, scratch);
                                    });
  const int64_t per_sequence = s->heads * map;
  std::fill_n(dw_q, per_sequence, 0.f);
  std::fill_n(dw_k, per_sequence, 0.f);
  for (int64_t i = 0; i < s->batch * per_sequence; ++i) {
    dw_q[i % per_sequence] += maps_q.get()[i];
    dw_k[i % per_sequence] += maps_k.get()[i];
  }
  return failed;
}

// The scan alone: c, k [B,T,H,K] are the features, no normaliser.
int graft_bench_scan(const Shape* s, const float* c, const float* k, const float* v, const float* g,
                     float* o, int threads) {
  LinearInputs in{*s, c, k, v, g, nullptr, nullptr};
  in.scan_alone = true;
  return linear_forward(in, o, nullptr, nullptr, threads);
}

}  // extern "C"
