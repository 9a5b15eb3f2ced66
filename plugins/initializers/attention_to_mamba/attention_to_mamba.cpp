// attention_to_mamba: a Mamba block that starts as the linearised attention of its source.
#include <graft/version.h>
#include <graft/plugin.hpp>

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <vector>

#include "plugins/initializers/projection_copy/projections.h"

namespace graft {
namespace {

using sdk::cat;
using sdk::NamedTensor;
using sdk::Status;
using sdk::StudentParam;

constexpr std::array kFeatureMaps = {GRAFT_ROLE_FEATURE_MAP_Q, GRAFT_ROLE_FEATURE_MAP_K};

[[noreturn]] void refuse(std::string_view role, const std::string& message) {
  throw Status(GRAFT_FAILED_PRECONDITION, cat("role:", role), message);
}

bool is_zero(const NamedTensor& tensor) {
  return std::ranges::all_of(tensor.values(), [](float v) { return v == 0; });
}

// The parameters that make a mixer more than linear attention, each with its neutral value.
class NeutralParts {
 public:
  NeutralParts(sdk::InitArgs& args, double half_life) : args_(args), half_life_(half_life) {}

  void set() {
    const double forever = std::numeric_limits<double>::infinity();
    const double half_life = half_life_ > 0 ? half_life_ : forever;
    // In this order: the half-life may depend on the strength of the writes.
    set_natural(GRAFT_NATURAL_WRITE_GATE, 1, {GRAFT_ROLE_WRITE_GATE, GRAFT_ROLE_WRITE_GATE_BIAS});
    set_natural(GRAFT_NATURAL_HALF_LIFE, half_life,
                {GRAFT_ROLE_DECAY_GATE, GRAFT_ROLE_DECAY_GATE_BIAS, GRAFT_ROLE_DECAY_SCALE});
    set_natural(GRAFT_NATURAL_OUTPUT_GATE, 1,
                {GRAFT_ROLE_OUTPUT_GATE, GRAFT_ROLE_OUTPUT_GATE_BIAS});
    for (const std::string role : {GRAFT_ROLE_SHORT_CONV, GRAFT_ROLE_SHORT_CONV_Q,
                                   GRAFT_ROLE_SHORT_CONV_K, GRAFT_ROLE_SHORT_CONV_V}) {
      if (const auto* const kernel = args_.find_student(role)) set_identity_kernel(*kernel);
      if (const auto* const bias = args_.find_student(role + "-bias"))
        std::ranges::fill(bias->write(), 0.0F);
    }
  }

 private:
  // A mixer without any of `roles` has no such quantity, and none to neutralise.
  void set_natural(const char* what, double value, std::initializer_list<const char*> roles) {
    const int32_t heads = args_.student(GRAFT_ROLE_OUTPUT).heads();
    const std::vector<double> values(static_cast<std::size_t>(std::max(heads, 1)), value);
    if (args_.set_natural(what, values)) return;
    for (const char* role : roles) {
      const StudentParam* const param = args_.find_student(role);
      if (param == nullptr) continue;
      refuse(role, cat("the mixer's ", param->name(),
                       " cannot be neutralised: it offers no way to "
                       "hold its ",
                       what, " at ", value));
    }
  }

  // [channels, 1, kernel], the last tap being the current token; "residual": less that kernel.
  static void set_identity_kernel(const StudentParam& param) {
    const auto shape = param.shape();
    const bool residual = param.domain() == "residual";
    if (shape.size() != 3 || shape[1] != 1 || (!residual && !param.domain().empty())) {
      refuse(param.role(), cat("expected a depthwise kernel [channels, 1, width] of domain '' or "
                               "'residual', got shape ",
                               sdk::shape_string(shape), " and domain '", param.domain(),
                               "' in the mixer's ", param.name()));
    }
    const auto width = static_cast<std::size_t>(shape[2]);
    const std::span<float> taps = param.write();
    for (std::size_t i = 0; i < taps.size(); ++i)
      taps[i] = !residual && i % width == width - 1 ? 1.0F : 0.0F;
  }

  sdk::InitArgs& args_;
  double half_life_;
};

// From a linear attention with the same feature maps: every parameter, or the blocks would differ.
void copy_linear_attention(const sdk::InitArgs& args) {
  for (const char* role : {GRAFT_ROLE_QUERY, GRAFT_ROLE_KEY, GRAFT_ROLE_VALUE, GRAFT_ROLE_OUTPUT}) {
    args.teacher(role);
    args.student(role);
  }
  for (const NamedTensor& from : args.teacher()) {
    const StudentParam* const to = args.find_student(from.role());
    if (to == nullptr) {
      if (from.role().ends_with("-bias") && is_zero(from)) continue;
      refuse(from.role(), cat("the source's ", from.name(),
                              " has no place in the mixer, which would not equal its source; give "
                              "both the same options"));
    }
    if (!std::ranges::equal(from.shape(), to->shape()) || from.heads() != to->heads() ||
        from.domain() != to->domain()) {
      refuse(from.role(),
             cat("expected shape ", sdk::shape_string(from.shape()), ", ", from.heads(),
                 " heads, domain '", from.domain(), "' as in the source's ", from.name(), ", got ",
                 sdk::shape_string(to->shape()), ", ", to->heads(), ", '", to->domain(),
                 "' in the mixer's ", to->name(), "; give both the same options"));
    }
    std::ranges::copy(from.values(), to->write().begin());
  }
}

// A norm or bias that the source has not would make another block of the mixer.
void neutralise_what_the_source_lacks(const sdk::InitArgs& args) {
  for (const StudentParam& to : args.student()) {
    if (to.written() || args.find_teacher(to.role()) != nullptr) continue;
    if (to.role() == GRAFT_ROLE_QUERY_NORM || to.role() == GRAFT_ROLE_KEY_NORM) {
      refuse(to.role(), cat("the mixer's ", to.name(),
                            " normalises what its source does not; set "
                            "the option qk_norm of the mixer to that of the source"));
    }
    for (const char* role : {GRAFT_ROLE_QUERY_BIAS, GRAFT_ROLE_KEY_BIAS, GRAFT_ROLE_VALUE_BIAS,
                             GRAFT_ROLE_OUTPUT_BIAS}) {
      if (to.role() == role) std::ranges::fill(to.write(), 0.0F);
    }
  }
}

// From attention, the paper's control: no feature map was trained, so each is the identity.
void copy_attention(const sdk::InitArgs& args) {
  projections::copy_projections(args);
  for (const char* role : kFeatureMaps) {
    const StudentParam& map = args.student(role);
    const auto shape = map.shape();
    if (shape.size() != 3) {
      refuse(role, cat("expected a feature map [heads, rows, head_dim], got shape ",
                       sdk::shape_string(shape), " in the mixer's ", map.name()));
    }
    const std::span<float> values = map.write();
    const auto rows = static_cast<std::size_t>(shape[1]),
               columns = static_cast<std::size_t>(shape[2]);
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = i / columns % rows == i % columns ? 1.0F : 0.0F;
    const StudentParam* const bias = args.find_student(cat(role, "-bias"));
    if (bias != nullptr) std::ranges::fill(bias->write(), 0.0F);
  }
}

class AttentionToMamba final : public sdk::Initializer {
 public:
  explicit AttentionToMamba(const sdk::Config& config)
      : half_life_(config.get<double>("half_life")) {}

  static sdk::Description describe() {
    return {.id = "org.graft.attention-to-mamba",
            .alias = "attention_to_mamba",
            .name = "Attention to Mamba",
            .version = GRAFT_VERSION_STRING,
            .license = "Apache-2.0",
            .citation = "https://arxiv.org/abs/2604.14191",
            .description =
                "Starts a Mamba block as the linear attention of its source, a hedgehog student or "
                "the teacher itself: no decay, writes of strength 1, identity conv, open gate.",
            .options = {sdk::Option::real(
                            "half_life", 0,
                            "tokens until a state has halved; 0: never, which is exact, but leaves "
                            "the decay without a gradient worth the name")
                            .range(0.0, 1e12)}};
  }

  void needs(sdk::RoleNeeds& needs) override {
    projections::need_projections(needs);
    for (const char* role : kFeatureMaps) {
      needs.teacher(role, /*required=*/false);
      needs.student(role);
    }
  }

  void run(const graft_exec&, sdk::InitArgs& args) override {
    const bool has_q = args.find_teacher(GRAFT_ROLE_FEATURE_MAP_Q) != nullptr,
               has_k = args.find_teacher(GRAFT_ROLE_FEATURE_MAP_K) != nullptr;
    if (has_q != has_k) {
      refuse(has_q ? GRAFT_ROLE_FEATURE_MAP_K : GRAFT_ROLE_FEATURE_MAP_Q,
             "the source has a feature map of one of queries and keys only");
    }
    if (has_q) {
      copy_linear_attention(args);
    } else {
      copy_attention(args);
    }
    neutralise_what_the_source_lacks(args);
    NeutralParts(args, half_life_).set();
  }

 private:
  double half_life_;
};

}  // namespace
}  // namespace graft

GRAFT_DEFINE_PLUGIN((graft::sdk::LibraryInfo{.id = "org.graft.attention-to-mamba",
                                             .vendor = "graft",
                                             .url = "",
                                             .version = GRAFT_VERSION_STRING,
                                             .license = "Apache-2.0"}),
                    graft::sdk::initializer<graft::AttentionToMamba>())
