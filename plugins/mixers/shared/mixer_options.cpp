#include "mixer_options.h"

namespace graft::mixers {

using sdk::cat;
using sdk::Option;
using sdk::Status;

void refuse_option(const char* key, const std::string& message) {
  throw Status(GRAFT_INVALID_ARGUMENT, cat("config.", key), message);
}

Option follow_option(const char* key, const char* doc) {
  return Option::string(key, "auto", doc).one_of({"auto", "on", "off"}).shapes();
}

bool follows(const sdk::Config& config, const char* key, bool teacher_has) {
  const auto choice = config.get<std::string>(key);
  if (choice == "auto") return teacher_has;
  if (choice == "on") return true;
  if (choice == "off") return false;
  refuse_option(key, cat("expected auto, on or off, got '", choice, "'"));
}

Rope teachers_rope(const sdk::LayerInfo& layer, int64_t head_dim) {
  if (layer.rope_inv_freq.empty())
    refuse_option("rope", "the teacher's block has no RoPE whose frequencies could be used");
  const auto rotated = 2 * static_cast<int64_t>(layer.rope_inv_freq.size());
  if (rotated > head_dim) {
    refuse_option("rope", cat("the teacher rotates ", rotated,
                              " entries of a head, but heads have ", head_dim, " (see head_dim)"));
  }
  return {layer.rope_inv_freq, layer.rope_attention_factor == 0 ? 1 : layer.rope_attention_factor};
}

double qk_norm_eps(const sdk::LayerInfo& layer) {
  return layer.norm_eps > 0 ? layer.norm_eps : 1e-6;
}

int64_t short_conv_width(const sdk::Config& config) {
  const auto width = config.get<int64_t>("short_conv");
  if (width != 0 && (width < 2 || width > 8))
    refuse_option("short_conv", cat("expected 0 (none) or a width of 2 to 8, got ", width));
  return width;
}

Option recompute_option() {
  return Option::boolean("recompute", false,
                         "run the forward again in the backward instead of keeping its "
                         "activations: less memory, slower");
}

}  // namespace graft::mixers
