#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdio>

#include "core/teacher/backbone.h"
#include "core/teacher/testing.h"

// The real model that scripts/get_teacher.py makes, against what transformers says of it
// (tests/golden/scripts/make_smollm2.py). Skipped where the model is not there.

namespace graft {
namespace {

constexpr int64_t kWindows = 16, kTokens = 512;

class SmolLm2 : public testing::TestWithParam<Compute> {
 protected:
  void SetUp() override {
    const std::filesystem::path data = std::filesystem::path(GRAFT_SOURCE_DIR) / "data";
    folder = data / "teacher" / "SmolLM2-135M-Instruct";
    if (!std::filesystem::exists(folder / "model.safetensors")) {
      GTEST_SKIP() << folder << " is not there; scripts/get_teacher.py makes it";
    }
    golden = read_json(std::filesystem::path(GRAFT_TEST_DATA) / "smollm2_persuasion.json");
  }

  at::Tensor windows() const {
    const auto ids = golden.at("ids").get<std::vector<int64_t>>();
    return at::tensor(ids, at::kLong).view({kWindows, kTokens});
  }

  std::filesystem::path folder;
  nlohmann::json golden;
};

TEST_P(SmolLm2, PerplexityEqualsTransformers) {
  const c10::InferenceMode inference;
  BackboneOptions options;
  options.compute = GetParam();
#if defined(__x86_64__)
  if (options.compute == Compute::bfloat16 && !__builtin_cpu_supports("avx512bf16"))
    GTEST_SKIP()
        << "no bfloat16 products in this CPU: LibTorch emulates them, some minutes for 8192 tokens";
#endif
  const Backbone model = Backbone::load(folder, options);
  const bool exact = options.compute == Compute::float32;
  const at::Tensor ids = windows();
  const auto expected = golden.at("window_nll").get<std::vector<double>>();
  model.hidden(ids.narrow(0, 0, 1));  // first touch of the weights is not what is timed
  double total = 0;
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < kWindows; ++i) {
    const at::Tensor logits = model.logits(model.hidden(ids.narrow(0, i, 1))[0]);
    const double nll =
        at::cross_entropy_loss(logits.narrow(0, 0, kTokens - 1), ids[i].narrow(0, 1, kTokens - 1),
                               {}, at::Reduction::Sum)
            .item<double>();
    const double wanted = expected[static_cast<std::size_t>(i)];
    EXPECT_NEAR(nll, wanted, (exact ? 2e-5 : 5e-3) * wanted) << "window " << i;
    total += nll;
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const double perplexity = std::exp(total / (kWindows * (kTokens - 1)));
  const double wanted = golden.at("perplexity").get<double>();
  EXPECT_NEAR(perplexity, wanted, (exact ? 1e-3 : 2e-2) * wanted);
  std::printf("perplexity %.4f (transformers %.4f), %.0f tokens/s on %d threads\n", perplexity,
              wanted, static_cast<double>(kWindows * kTokens) / seconds, at::get_num_threads());
}

INSTANTIATE_TEST_SUITE_P(All, SmolLm2, testing::Values(Compute::float32, Compute::bfloat16),
                         [](const auto& info) {
                           return info.param == Compute::float32 ? "float32" : "bfloat16";
                         });

}  // namespace
}  // namespace graft
