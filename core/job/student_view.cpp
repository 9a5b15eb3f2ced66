#include "core/job/student_view.h"

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "core/eval/generate.h"

namespace graft {
namespace {

constexpr std::int64_t kSamples = 3;

// Held-out tokens that gates are averaged over.
constexpr std::int64_t kGateSequences = 2, kGateTokens = 256;

std::vector<double> head_means(const at::Tensor& tap) {  // [B,T,H]
  const at::Tensor means = tap.to(at::kDouble).mean(at::IntArrayRef{0, 1});
  return {means.const_data_ptr<double>(), means.const_data_ptr<double>() + means.numel()};
}

// Runs the mixer on x; puts what its gates do, as far as it has such taps, into `layers`.
at::Tensor run_and_note_gates(TokenMixer& mixer, const at::Tensor& x, const std::string& layer,
                              nlohmann::ordered_json& layers) {
  const auto known = mixer.tap_names();
  std::vector<std::string> taps;
  for (const char* tap : {GRAFT_TAP_LOG_DECAY, GRAFT_TAP_WRITE_GATE})
    if (std::find(known.begin(), known.end(), tap) != known.end()) taps.emplace_back(tap);
  const MixerOutput out = mixer.forward(x, {}, {}, taps);
  for (std::size_t i = 0; i < taps.size(); ++i) {
    const std::vector<double> means = head_means(out.taps[i]);
    if (taps[i] == GRAFT_TAP_WRITE_GATE) {
      layers[layer]["write_gate"] = means;
      continue;
    }
    for (const double g : means) {
      nlohmann::ordered_json life;
      if (g < 0) life = std::log(0.5) / g;
      layers[layer]["half_life"].push_back(life);
    }
  }
  return out.y;
}

}  // namespace

StudentView::StudentView(Tokenizer tokenizer, std::span<const std::int32_t> held_out,
                         std::string what)
    : tokenizer_(std::move(tokenizer)), held_out_(held_out), what_(std::move(what)) {}

const TeacherContinuations* StudentView::continuations(const Model& teacher) {
  if (static_cast<std::int64_t>(held_out_.size()) < prompts * prompt_length) return nullptr;
  if (!teacher_)
    teacher_ = continue_greedily(
        teacher, spread_prompts(held_out_, 0, prompts, prompt_length, what_), continuation);
  return &*teacher_;
}

std::optional<Agreement> StudentView::agreement_with(const Model& teacher, const Model& student) {
  const TeacherContinuations* const said = continuations(teacher);
  if (said == nullptr) return std::nullopt;
  return agreement(student, *said);
}

nlohmann::ordered_json StudentView::gates(const Model& student) const {
  const c10::InferenceMode inference;
  nlohmann::ordered_json layers = nlohmann::ordered_json::object();
  const auto available = static_cast<std::int64_t>(held_out_.size());
  const std::int64_t tokens = std::min(kGateTokens, available / kGateSequences);
  if (tokens == 0) return layers;
  at::Tensor ids = at::empty({kGateSequences, tokens}, at::kLong);
  std::copy_n(held_out_.begin(), ids.numel(), ids.data_ptr<std::int64_t>());
  const Backbone& backbone = student.backbone();
  backbone.hidden(ids, {}, [&](std::int64_t layer, const at::Tensor& x) -> at::Tensor {
    const auto mixer = student.mixers().find(layer);
    if (mixer == student.mixers().end()) return backbone.attention(layer, x).y;
    return run_and_note_gates(*mixer->second, x, std::to_string(layer), layers);
  });
  return layers;
}

nlohmann::ordered_json StudentView::samples(const Model& teacher, const Model& student) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  const TeacherContinuations* const said = continuations(teacher);
  if (said == nullptr) return list;
  const at::Tensor first = said->prompts.narrow(0, 0, std::min(kSamples, prompts));
  const at::Tensor answers = greedy(student, first, continuation);
  for (std::int64_t i = 0; i < first.size(0); ++i)
    list.push_back({{"prompt", text_of(first[i])},
                    {"teacher", text_of(said->continuations[i])},
                    {"student", text_of(answers[i])}});
  return list;
}

std::string StudentView::protocol() const {
  return std::to_string(prompts) + " prompts of " + std::to_string(prompt_length) + " tokens, " +
         std::to_string(continuation) + " greedy tokens each";
}

std::string StudentView::text_of(const at::Tensor& ids) const {
  const at::Tensor row = ids.contiguous();
  const auto* const begin = row.const_data_ptr<std::int64_t>();
  const std::vector<std::int32_t> tokens(begin, begin + row.numel());
  // Half a character at either end is shown as what decoders show; JSON wants UTF-8.
  return tokenizer_.decode(tokens);
}

}  // namespace graft
