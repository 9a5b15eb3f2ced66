#include "core/train/convert.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <optional>
#include <set>

#include "core/base/error.h"
#include "core/base/message.h"
#include "core/base/suggest.h"
#include "core/loader/registry.h"
#include "core/teacher/lanes.h"
#include "core/train/calibration_sweep.h"
#include "core/train/init_run.h"

namespace graft {
namespace {

// Front matter (title, contents) is no prose: windows start behind it where the text is long
// enough.
constexpr std::int64_t kFrontMatter = 500;

// The first position carries the massive activation that later layers lean on, and its own norm
// would make it count for nothing: it is weighted up.
at::Tensor token_weights(const CalibrateOptions& options, const at::Tensor& residual,
                         std::int64_t layer) {
  if (options.token_weight == "none") return {};
  if (options.token_weight != "residual")
    fail(ErrorKind::usage,
         "calibrate.token_weight is '" + options.token_weight + "'; it takes none or residual");
  at::Tensor weight = residual_weights(residual);
  if (layer < options.position0_layers) weight.select(1, 0).mul_(1 + options.position0_weight);
  return weight / weight.mean();
}

std::uint64_t layer_seed(std::uint64_t seed, std::int64_t layer) {
  return seed * 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(layer) + 1;
}

std::string note(const ConvertedLayer& done) {
  if (done.report.steps == 0) return "";
  char text[64];
  std::snprintf(text, sizeof text, "loss %.4f -> %.4f", done.report.first_loss,
                done.report.last_loss);
  return text;
}

// A step through n documents that meets each once before any twice, the first few far apart: the
// golden section of n, or the next number that shares no factor with n.
std::int64_t spreading_step(std::int64_t n) {
  auto step = std::max<std::int64_t>(1, std::llround(0.6180339887498949 * static_cast<double>(n)));
  while (std::gcd(step, n) != 1) ++step;
  return step;
}

// The windows of a recipe that asks for more tokens than there are hold some of them again.
void warn_of_repeats(const Recipe& recipe, const std::vector<Document>& text,
                     std::int64_t windows) {
  std::int64_t have = 0;
  for (const Document& document : text) have += static_cast<std::int64_t>(document.tokens.size());
  if (windows * recipe.window > have)
    log_warning(recipe.label + ": " + std::to_string(windows * recipe.window) +
                " calibration tokens are asked for (init.tokens, calibrate.tokens), but the text "
                "has " +
                std::to_string(have) + ": windows repeat parts of it; give more --text");
}

// Sequences the recipe asks for: of the initializer, and in all.
std::pair<std::int64_t, std::int64_t> sequence_counts(const Recipe& recipe, bool init_wants) {
  const auto count = [&](std::int64_t tokens) {
    return (tokens + recipe.window - 1) / recipe.window;
  };
  const std::int64_t n_init = init_wants ? count(recipe.init_tokens) : 0;
  return {n_init, std::max(n_init, recipe.calibrate ? count(recipe.stage.tokens) : 0)};
}

}  // namespace

double Conversion::seconds(bool after_calibration, const std::vector<int>& of_layers) const {
  double total = 0;
  for (const int layer : of_layers) {
    const ConvertSeconds& s = layers.at(layer).seconds;
    total += s.teacher + s.init + (after_calibration ? s.calibrate : 0);
  }
  return total;
}

void check_recipe(PluginRegistry& registry, const Recipe& recipe, const ModelConfig& teacher) {
  const LayerInfo info(teacher, 0);
  const auto mixer = registry.create_mixer(recipe.mixer.name, info.c_info(), recipe.mixer.options);
  const auto initializer = registry.create_initializer(recipe.init.name, recipe.init.options);
  std::vector<std::string> mixer_roles, teacher_roles;
  for (const graft_param_spec* spec : mixer->param_specs())
    mixer_roles.emplace_back(spec->role == nullptr ? "" : spec->role);
  for (const RoleLayout& layout : attention_roles(teacher)) teacher_roles.push_back(layout.role);

  for (const graft_role_need& need : initializer->needs()) {
    if ((need.flags & GRAFT_NEED_REQUIRED) == 0) continue;
    const bool of_teacher = (need.flags & GRAFT_NEED_TEACHER) != 0;
    const auto& roles = of_teacher ? teacher_roles : mixer_roles;
    if (std::find(roles.begin(), roles.end(), need.role) != roles.end()) continue;
    std::string have;
    for (const std::string& role : std::set<std::string>(roles.begin(), roles.end()))
      have += (have.empty() ? "" : ", ") + role;
    fail(ErrorKind::plugin, "initializer '" + initializer->label() + "' needs role " + need.role +
                                "; " +
                                (of_teacher ? "the teacher (" + teacher.family + ")"
                                            : "mixer '" + mixer->label() + "'") +
                                " has: " + have);
  }
  check_calibration(*initializer);
  if (recipe.calibrate)
    registry.create_objective(recipe.stage.objective, recipe.stage.objective_options);
}

std::vector<Document> long_enough(const std::vector<Document>& documents, std::int64_t window) {
  if (documents.empty()) fail(ErrorKind::input, "there is no text to calibrate on");
  std::vector<Document> kept;
  const Document* longest = &documents.front();
  for (const Document& document : documents) {
    if (static_cast<std::int64_t>(document.tokens.size()) >= window) kept.push_back(document);
    if (document.tokens.size() > longest->tokens.size()) longest = &document;
  }
  if (kept.empty())
    require_tokens(*longest, window,
                   std::string("one calibration window") +
                       (documents.size() > 1 ? ", and it is the longest document" : "") +
                       "; give longer text or a shorter window");
  if (kept.size() < documents.size())
    log_info(std::to_string(documents.size() - kept.size()) + " of " +
             std::to_string(documents.size()) +
             " calibration documents are shorter than a window (" + std::to_string(window) +
             " tokens) and are left out");
  return kept;
}

at::Tensor calibration_windows(const std::vector<Document>& given, std::int64_t count,
                               std::int64_t window, std::uint64_t seed) {
  const std::vector<Document> documents = long_enough(given, window);
  at::Tensor ids = at::empty({count, window}, at::kLong);
  auto* out = ids.data_ptr<std::int64_t>();
  const auto n = static_cast<std::int64_t>(documents.size());
  const std::int64_t step = n > count ? spreading_step(n) : 1;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto& tokens = documents[static_cast<std::size_t>(i * step % n)].tokens;
    const auto length = static_cast<std::uint64_t>(tokens.size()),
               k = static_cast<std::uint64_t>(i / n);
    const auto taken = static_cast<std::uint64_t>(window);
    const std::uint64_t skip = length > 2 * (kFrontMatter + taken) ? kFrontMatter : 0;
    // Knuth's multiplicative hash: spreads successive k over the text without a random number
    // generator.
    const std::uint64_t hash = (k * 2654435761u + seed * 97531u) & 0xffffffffu;
    const std::uint64_t start = skip + hash % std::max<std::uint64_t>(length - skip - taken, 1);
    out = std::copy_n(tokens.begin() + static_cast<std::ptrdiff_t>(start), window, out);
  }
  return ids;
}

namespace {

// One layer on its way from the teacher's signals to a converted one.
struct LayerWork {
  int layer;
  SweepLayer data;  // empty when the recipe needs no text
  std::unique_ptr<Initializer> initializer;
  std::unique_ptr<Objective> objective;  // null without calibration
  ConvertedLayer* done;
};

class Converter {
 public:
  Converter(PluginRegistry& registry, const Backbone& teacher, const Recipe& recipe,
            std::uint64_t seed, const ConvertHooks& hooks)
      : registry_(registry), teacher_(teacher), recipe_(recipe), seed_(seed), hooks_(hooks) {}

  // Plugins are opened by one thread; each layer has instances of its own.
  LayerWork begin(int layer, SweepLayer data, ConvertedLayer& done) {
    const LayerInfo info = teacher_.layer_info(layer);
    done.mixer = std::make_shared<TokenMixer>(
        registry_.create_mixer(recipe_.mixer.name, info.c_info(), recipe_.mixer.options),
        layer_seed(seed_, layer));
    LayerWork work{layer, std::move(data), nullptr, nullptr, &done};
    work.initializer = registry_.create_initializer(recipe_.init.name, recipe_.init.options);
    if (recipe_.calibrate)
      work.objective =
          registry_.create_objective(recipe_.stage.objective, recipe_.stage.objective_options);
    return work;
  }

  // Each layer in a lane: they know nothing of each other. A second of the clock is shared among
  // the layers at work in it.
  void finish(std::vector<LayerWork>& group) {
    const auto count = static_cast<std::int64_t>(group.size());
    const auto work = [&](std::int64_t i, std::int64_t) {
      convert_layer(group[static_cast<std::size_t>(i)]);
    };
    // A layer that stands alone is the same to the bit whichever others are converted with it.
    in_lanes(count, work, recipe_.stream.student ? count : teacher_.config().n_layers);
    for (LayerWork& work : group) {
      const auto share = static_cast<double>(lanes(count));
      work.done->seconds.init /= share;
      work.done->report.seconds /= share;
      work.done->seconds.calibrate += work.done->report.seconds;
      if (hooks_.layer_done) hooks_.layer_done(work.layer, note(*work.done));
    }
    group.clear();
  }

 private:
  void convert_layer(LayerWork& work) const {
    ConvertedLayer& done = *work.done;
    const std::uint64_t seed = layer_seed(seed_, work.layer);
    done.seconds.init = run_initializer(*work.initializer, teacher_, work.layer, *done.mixer,
                                        work.data.signals, seed)
                            .seconds;
    if (!recipe_.calibrate) return;
    done.initialised = done.mixer->clone();
    try {
      done.report = calibrate(*done.mixer, *work.objective, recipe_.stage, work.data.x, work.data.y,
                              token_weights(recipe_.stage, work.data.residual, work.layer), seed,
                              hooks_.should_stop);
    } catch (const Error& e) {
      throw Error(e.kind(), "layer " + std::to_string(work.layer) + ": " + e.what());
    }
  }

  PluginRegistry& registry_;
  const Backbone& teacher_;
  const Recipe& recipe_;
  const std::uint64_t seed_;
  const ConvertHooks& hooks_;
};

}  // namespace

Conversion convert(PluginRegistry& registry, const Backbone& teacher, const Recipe& recipe,
                   const std::vector<int>& layers, const std::vector<Document>& text,
                   std::uint64_t seed, const ConvertHooks& hooks) {
  at::NoGradGuard no_grad;
  const auto initializer = registry.create_initializer(recipe.init.name, recipe.init.options);
  const auto [n_init, n_all] = sequence_counts(recipe, wants_calibration(*initializer));
  const std::set<int> chosen(layers.begin(), layers.end());
  Conversion result;
  result.init_tokens = n_init * recipe.window;
  result.calibrate_tokens = n_all * recipe.window;

  std::optional<CalibrationSweep> sweep;
  if (n_all > 0) warn_of_repeats(recipe, text, n_all);
  if (n_all > 0)
    sweep.emplace(teacher, calibration_windows(text, n_all, recipe.window, seed), *initializer,
                  n_init, recipe.stream);
  // What a layer gets from the student's stream depends on the converted layers before it.
  const bool one_by_one = sweep && recipe.stream.student;
  const int last_converted = chosen.empty() ? -1 : *chosen.rbegin();
  const bool to_the_end = one_by_one && recipe.stream.mlp_ridge > 0 && !chosen.empty();
  const int last = to_the_end ? static_cast<int>(teacher.config().n_layers) - 1 : last_converted;

  Converter converter(registry, teacher, recipe, seed, hooks);
  std::vector<LayerWork> group;
  SweepSeconds before;
  for (int layer = 0; layer <= last; ++layer) {
    if (hooks.should_stop && hooks.should_stop())
      fail(ErrorKind::interrupted, "interrupted before layer " + std::to_string(layer));
    const bool converts = chosen.contains(layer);
    ConvertedLayer* done = converts ? &result.layers[layer] : nullptr;
    if (sweep) sweep->run_attention(layer, converts);
    if (converts) {
      SweepLayer data;
      if (sweep) data = sweep->layer();
      if (n_init == 0) data.signals = {};
      group.push_back(converter.begin(layer, std::move(data), *done));
    }
    if (one_by_one) converter.finish(group);
    const bool goes_on = layer < last || to_the_end;
    if (sweep && goes_on) sweep->finish_layer();
    if (one_by_one && goes_on)
      sweep->advance_student(done ? done->mixer.get() : nullptr, result.backbone);
    if (converts && sweep) {
      // The layers passed through on the way are this layer's cost too.
      const SweepSeconds now = sweep->seconds();
      done->seconds.teacher = now.init - before.init;
      if (recipe.calibrate) done->seconds.calibrate += now.rest - before.rest;
      before = now;
    }
    const auto full = static_cast<std::int64_t>(group.size()) == lanes(last + 1);
    if (full || layer == last) converter.finish(group);
  }
  return result;
}

}  // namespace graft
