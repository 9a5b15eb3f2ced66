// llama.cpp's recurrences, one graph at a time, driven line by line through stdin so that they can
// be timed in turn with others. Built by peers.sh against the ggml of the peers' folder; no part of
// the product.
//
//   make gdn BATCH TOKENS HEADS DIM THREADS      gated delta rule; tensors as below
//   make ssm BATCH TOKENS HEADS DIM THREADS      Mamba-2 scan with a state of [2 DIM, DIM] per head
//   fill FILE      the inputs, float32, one behind the other; gdn: q k v [B,T,H,D], g beta [B,T,H],
//   state [B,H,D,D] run COUNT      -> seconds for COUNT runs out FILE       the result
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

namespace {

struct Graph {
  ggml_context* context = nullptr;
  std::vector<ggml_tensor*> inputs;
  ggml_tensor* result = nullptr;
  ggml_cgraph* graph = nullptr;
  ggml_threadpool* pool = nullptr;
  ggml_cplan plan{};
  std::vector<uint8_t> work;

  ~Graph() {
    if (pool != nullptr) ggml_threadpool_free(pool);
    if (context != nullptr) ggml_free(context);
  }
};

void fill_random(ggml_tensor* t, float low, float high) {
  auto* const p = static_cast<float*>(t->data);
  for (int64_t i = 0; i < ggml_nelements(t); ++i)
    p[i] = low + (high - low) * (static_cast<float>(rand()) / static_cast<float>(RAND_MAX));
}

void finish(Graph& g, int threads) {
  g.graph = ggml_new_graph(g.context);
  ggml_build_forward_expand(g.graph, g.result);
  ggml_threadpool_params params = ggml_threadpool_params_default(threads);
  g.pool = ggml_threadpool_new(&params);
  g.plan = ggml_graph_plan(g.graph, threads, g.pool);
  g.work.resize(g.plan.work_size + 64);
  g.plan.work_data = g.work.data();
}

void make_gdn(Graph& g, int64_t b, int64_t t, int64_t h, int64_t d, int threads) {
  const size_t rows = static_cast<size_t>(b * t * h * d) * 4,
               states = static_cast<size_t>(b * h * d * d) * 4;
  g.context = ggml_init({rows * 6 + states * 4 + (64u << 20), nullptr, false});
  const auto rows_of = [&] { return ggml_new_tensor_4d(g.context, GGML_TYPE_F32, d, h, t, b); };
  const auto gates_of = [&] { return ggml_new_tensor_4d(g.context, GGML_TYPE_F32, 1, h, t, b); };
  ggml_tensor *q = rows_of(), *k = rows_of(), *v = rows_of(), *decay = gates_of(),
              *beta = gates_of();
  ggml_tensor* state = ggml_new_tensor_4d(g.context, GGML_TYPE_F32, d, d, h, b);
  g.inputs = {q, k, v, decay, beta, state};
  for (ggml_tensor* x : g.inputs) fill_random(x, -0.1f, 0.1f);
  fill_random(decay, -0.2f, -0.01f);
  g.result = ggml_gated_delta_net(g.context, q, k, v, decay, beta, state, 1);
  finish(g, threads);
}

void make_ssm(Graph& g, int64_t b, int64_t t, int64_t h, int64_t d, int threads) {
  const int64_t n = 2 * d;
  const size_t bytes = static_cast<size_t>(b * t * h * (2 * n + 2 * d) + b * h * d * n * 3) * 4;
  g.context = ggml_init({bytes + (64u << 20), nullptr, false});
  ggml_tensor* state = ggml_new_tensor_4d(g.context, GGML_TYPE_F32, n, d, h, b);
  ggml_tensor* x = ggml_new_tensor_4d(g.context, GGML_TYPE_F32, d, h, t, b);
  ggml_tensor* dt = ggml_new_tensor_3d(g.context, GGML_TYPE_F32, h, t, b);
  ggml_tensor* a = ggml_new_tensor_2d(g.context, GGML_TYPE_F32, 1, h);
  ggml_tensor* bs = ggml_new_tensor_4d(g.context, GGML_TYPE_F32, n, h, t, b);
  ggml_tensor* cs = ggml_new_tensor_4d(g.context, GGML_TYPE_F32, n, h, t, b);
  ggml_tensor* ids = ggml_new_tensor_1d(g.context, GGML_TYPE_I32, b);
  for (int32_t i = 0; i < b; ++i) static_cast<int32_t*>(ids->data)[i] = i;
  g.inputs = {x, dt, a, bs, cs, state};
  for (ggml_tensor* tensor : g.inputs) fill_random(tensor, 0.f, 0.5f);
  fill_random(a, -0.2f, -0.05f);
  g.result = ggml_ssm_scan(g.context, state, x, dt, a, bs, cs, ids, 1);
  finish(g, threads);
}

void transfer(const char* path, const char* mode, const std::vector<ggml_tensor*>& tensors) {
  FILE* const file = fopen(path, mode);
  if (file == nullptr) {
    perror(path);
    exit(2);
  }
  for (ggml_tensor* t : tensors) {
    const auto n = static_cast<size_t>(ggml_nelements(t));
    const size_t done = *mode == 'r' ? fread(t->data, 4, n, file) : fwrite(t->data, 4, n, file);
    if (done != n) {
      fprintf(stderr, "%s: %zu of %zu numbers\n", path, done, n);
      exit(2);
    }
  }
  fclose(file);
}

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

int main() {
  ggml_cpu_init();
  Graph* g = nullptr;
  char line[4096], kind[16], path[4000];
  while (fgets(line, sizeof line, stdin) != nullptr) {
    long long b, t, h, d;
    int threads, count;
    if (sscanf(line, "make %15s %lld %lld %lld %lld %d", kind, &b, &t, &h, &d, &threads) == 6) {
      delete g;
      g = new Graph;
      (strcmp(kind, "gdn") == 0 ? make_gdn : make_ssm)(*g, b, t, h, d, threads);
      puts("ok");
    } else if (g != nullptr && sscanf(line, "fill %3999s", path) == 1) {
      transfer(path, "rb", g->inputs);
      puts("ok");
    } else if (g != nullptr && sscanf(line, "out %3999s", path) == 1) {
      transfer(path, "wb", {g->result});
      puts("ok");
    } else if (g != nullptr && sscanf(line, "run %d", &count) == 1) {
      const double start = seconds();
      for (int i = 0; i < count; ++i) ggml_graph_compute(g->graph, &g->plan);
      printf("%.9f\n", seconds() - start);
    } else {
      printf("not understood: %s", line);
    }
    fflush(stdout);
  }
  delete g;
}
