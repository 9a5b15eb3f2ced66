#include "core/train/convert.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <set>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "core/loader/registry.h"
#include "core/teacher/lanes.h"
#include "core/train/init_run.h"

namespace graft {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Sequences run through a layer of the teacher at once: bounds the activations of its MLP.
constexpr std::int64_t kSequencesAtOnce = 8;

// Front matter (title, contents) is no prose: windows start behind it where the text is long
// enough.
constexpr std::int64_t kFrontMatter = 500;

// The residual stream of the calibration tokens on its way through the teacher, and what the
// current layer makes of it.
class TeacherSweep {
 public:
  TeacherSweep(const Backbone& teacher, const at::Tensor& windows, const Initializer& initializer,
               std::int64_t n_init)
      : teacher_(teacher), n_init_(n_init) {
    context_limit_ = 0;
    wants_context_ = wants_signal(initializer, GRAFT_SIGNAL_HEAD_CONTEXT, &context_limit_);
    const std::int64_t rows = context_limit_ == 0 ? n_init : std::min(context_limit_, n_init);
    context_limit_ = wants_context_ ? rows : 0;
    h_ = teacher.embed(windows);
  }

  // Runs the layer's attention on all sequences. `signals_wanted`: keep the block's input and head
  // contexts.
  void run_attention(std::int64_t layer, bool signals_wanted) {
    layer_ = layer;
    // What was there before is another layer's, perhaps still at work.
    y_ = at::empty_like(h_);
    x_ = signals_wanted ? at::empty_like(h_) : at::Tensor();
    context_ = signals_wanted && context_limit_ > 0
                   ? at::empty({context_limit_, h_.size(1), teacher_.config().n_heads,
                                teacher_.config().head_dim})
                   : at::Tensor();
    for_batches([&](std::int64_t first, std::int64_t count) {
      const at::Tensor x = teacher_.block_input(layer, h_.narrow(0, first, count));
      AttentionCall call;
      call.want_context = signals_wanted && first < context_limit_;
      const AttentionResult result = teacher_.attention(layer, x, call);
      y_.narrow(0, first, count).copy_(result.y);
      if (signals_wanted) x_.narrow(0, first, count).copy_(x);
      if (call.want_context) keep_context(first, result.context);
    });
  }

  // Adds the block's output and the MLP: h becomes the next layer's.
  void finish_layer() {
    for_batches([&](std::int64_t first, std::int64_t count) {
      at::Tensor h = h_.narrow(0, first, count);
      h.copy_(teacher_.finish_block(layer_, h, y_.narrow(0, first, count)));
    });
  }

  // What the layer at hand gives; stays as it is when the sweep goes on.
  struct Layer {
    at::Tensor x, y, residual;  // [N,T,D]
    LayerSignals signals;       // of the initializer's sequences
  };
  Layer layer() const {
    Layer out{x_, y_, h_ + y_, {}};
    const auto of_init = [&](const at::Tensor& all) { return all.narrow(0, 0, n_init_); };
    out.signals.block_input = of_init(x_);
    out.signals.block_output = of_init(y_);
    out.signals.residual = of_init(out.residual);
    if (context_.defined()) out.signals.head_context = context_;
    out.signals.attention_probs = [&teacher = teacher_, x = x_, layer = layer_](
                                      std::int64_t first, std::int64_t count) {
      AttentionCall call;
      call.want_probs = true;
      return teacher.attention(layer, x.narrow(0, first, count), call).probs;
    };
    return out;
  }

  double init_seconds() const { return init_seconds_; }
  double rest_seconds() const { return rest_seconds_; }

 private:
  // Keeps the time of the initializer's sequences apart from that of those only calibration sees.
  template <typename Work>
  void for_batches(Work&& work) {
    const auto part = [&](std::int64_t begin, std::int64_t end, double& seconds) {
      const auto start = Clock::now();
      in_lanes((end - begin + kSequencesAtOnce - 1) / kSequencesAtOnce,
               [&](std::int64_t batch, std::int64_t) {
                 const std::int64_t first = begin + batch * kSequencesAtOnce;
                 work(first, std::min(kSequencesAtOnce, end - first));
               });
      seconds += seconds_since(start);
    };
    part(0, n_init_, init_seconds_);
    part(n_init_, h_.size(0), rest_seconds_);
  }

  void keep_context(std::int64_t first, const at::Tensor& context) {
    const std::int64_t count = std::min(context.size(0), context_limit_ - first);
    context_.narrow(0, first, count).copy_(context.narrow(0, 0, count));
  }

  const Backbone& teacher_;
  std::int64_t n_init_ = 0, context_limit_ = 0, layer_ = 0;
  bool wants_context_ = false;
  at::Tensor h_, x_, y_, context_;
  double init_seconds_ = 0, rest_seconds_ = 0;
};

// 1/|residual|^2 so that an error counts by what it does to the stream, mean 1. The first position
// carries the massive activation that later layers lean on, and its own norm would make it count
// for nothing: it is weighted up.
at::Tensor token_weights(const CalibrateOptions& options, const at::Tensor& residual,
                         std::int64_t layer) {
  if (options.token_weight == "none") return {};
  if (options.token_weight != "residual")
    fail(ErrorKind::usage,
         "calibrate.token_weight is '" + options.token_weight + "'; it takes none or residual");
  at::Tensor weight = residual.square().sum(-1).clamp_min(1e-12).reciprocal();
  weight = weight / weight.mean();
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
    if (need.required == 0) continue;
    const auto& roles = need.on_teacher != 0 ? teacher_roles : mixer_roles;
    if (std::find(roles.begin(), roles.end(), need.role) != roles.end()) continue;
    std::string have;
    for (const std::string& role : std::set<std::string>(roles.begin(), roles.end()))
      have += (have.empty() ? "" : ", ") + role;
    fail(ErrorKind::plugin, "initializer '" + initializer->label() + "' needs role " + need.role +
                                "; " +
                                (need.on_teacher != 0 ? "the teacher (" + teacher.family + ")"
                                                      : "mixer '" + mixer->label() + "'") +
                                " has: " + have);
  }
  if (recipe.calibrate)
    registry.create_objective(recipe.stage.objective, recipe.stage.objective_options);
}

at::Tensor calibration_windows(const std::vector<Document>& documents, std::int64_t count,
                               std::int64_t window, std::uint64_t seed) {
  if (documents.empty()) fail(ErrorKind::input, "there is no text to calibrate on");
  for (const Document& document : documents)
    require_tokens(document, window, "one calibration window");
  at::Tensor ids = at::empty({count, window}, at::kLong);
  auto* out = ids.data_ptr<std::int64_t>();
  const auto n = static_cast<std::int64_t>(documents.size());
  for (std::int64_t i = 0; i < count; ++i) {
    const auto& tokens = documents[static_cast<std::size_t>(i % n)].tokens;
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
  TeacherSweep::Layer data;  // empty when the recipe needs no text
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
  LayerWork begin(int layer, TeacherSweep::Layer data, ConvertedLayer& done) {
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
    in_lanes(count, [&](std::int64_t i, std::int64_t) {
      convert_layer(group[static_cast<std::size_t>(i)]);
    });
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

  std::unique_ptr<TeacherSweep> sweep;
  if (n_all > 0)
    sweep = std::make_unique<TeacherSweep>(
        teacher, calibration_windows(text, n_all, recipe.window, seed), *initializer, n_init);

  Converter converter(registry, teacher, recipe, seed, hooks);
  std::vector<LayerWork> group;
  double init_before = 0, rest_before = 0;
  const int last = chosen.empty() ? -1 : *chosen.rbegin();
  for (int layer = 0; layer <= last; ++layer) {
    if (hooks.should_stop && hooks.should_stop())
      fail(ErrorKind::interrupted, "interrupted before layer " + std::to_string(layer));
    const bool converts = chosen.contains(layer);
    if (sweep) sweep->run_attention(layer, converts);
    if (converts) {
      TeacherSweep::Layer data;
      if (sweep) data = sweep->layer();
      if (n_init == 0) data.signals = {};
      group.push_back(converter.begin(layer, std::move(data), result.layers[layer]));
    }
    if (sweep && layer < last) sweep->finish_layer();
    if (converts && sweep) {
      // The layers passed through on the way are this layer's cost too.
      ConvertSeconds& seconds = result.layers[layer].seconds;
      seconds.teacher = sweep->init_seconds() - init_before;
      seconds.calibrate = recipe.calibrate ? sweep->rest_seconds() - rest_before : 0;
      init_before = sweep->init_seconds();
      rest_before = sweep->rest_seconds();
    }
    const auto full = static_cast<std::int64_t>(group.size()) == lanes(last + 1);
    if (!group.empty() && (full || layer == last)) converter.finish(group);
  }
  return result;
}

}  // namespace graft
