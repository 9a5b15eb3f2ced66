#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include "apps/hostapp/commands.h"
#include "apps/hostapp/console.h"
#include "apps/hostapp/interrupt.h"
#include "apps/hostapp/output_file.h"
#include "apps/hostapp/recipe_settings.h"
#include "apps/hostapp/settings.h"
#include "apps/hostapp/table.h"
#include "core/base/error.h"
#include "core/base/file.h"
#include "core/base/message.h"
#include "core/base/suggest.h"
#include "core/eval/layer_selection.h"
#include "core/job/main_job.h"
#include "core/loader/registry.h"
#include "core/student/student_io.h"
#include "core/text/corpus.h"

namespace graft {
namespace {

using Strings = std::vector<std::string>;

// The seed's neighbour: not the windows that layers were converted on.
constexpr std::uint64_t kOtherWindows = 1;

void require(const Config& config, bool needs_mixers, bool needs_text) {
  std::string missing;
  const auto want = [&](bool there, const std::string& flag) {
    if (!there) missing += (missing.empty() ? "" : ", ") + flag;
  };
  want(!config.text("teacher").empty(), "--teacher DIR");
  want(!needs_text || !config.get<Strings>("text").empty(), "--text FILE...");
  want(!needs_mixers || !config.text("mixer.name").empty(), "--mixer NAME");
  want(!needs_mixers || !config.text("init.name").empty(), "--init NAME");
  want(!config.text("out").empty(), "--out FILE.json");
  if (!missing.empty())
    fail(ErrorKind::usage, "missing: " + missing + "\n  select-layers with policy " +
                               quoted(config.text("select.policy")) + " needs " +
                               (missing.find(',') == std::string::npos ? "it" : "them") +
                               "; hostapp --help says what they are");
}

// Calibration text alone: what figures are made on is left out, as converting leaves it out.
class SelectionText {
 public:
  SelectionText(const Config& config, const std::filesystem::path& teacher)
      : corpus_(Corpus::open(files(config), Tokenizer::from_file(teacher / "tokenizer.json"),
                             {config.text("text_field"), {}, {}})),
        documents_(config.get<Strings>("eval_text").empty()
                       ? without_held_out_tails(corpus_.documents())
                       : corpus_.documents()) {}

  const std::vector<Document>& documents() const { return documents_; }
  const std::string& content_hash() const { return corpus_.content_hash(); }

 private:
  static std::vector<std::filesystem::path> files(const Config& config) {
    const Strings& names = config.get<Strings>("text");
    return {names.begin(), names.end()};
  }
  Corpus corpus_;
  std::vector<Document> documents_;
};

Model::Mixers convert_every_layer(const Config& config, PluginRegistry& registry,
                                  const Backbone& teacher, const SelectionText& text,
                                  std::uint64_t seed, Console& console) {
  Recipe recipe = make_recipe(config, config, config.text("init.name"), "",
                              config.get<bool>("select.calibrated"), registry);
  recipe.stream = {};  // each layer is measured among the teacher's
  check_recipe(registry, recipe, teacher.config());
  std::vector<int> layers;
  for (int layer = 0; layer < teacher.config().n_layers; ++layer) layers.push_back(layer);
  console.begin("converting (" + recipe.label + ")", teacher.config().n_layers, "layers");
  ConvertHooks hooks;
  hooks.layer_done = [&](int layer, const std::string& note) {
    console.advance(1, "layer " + std::to_string(layer) + (note.empty() ? "" : ", " + note));
  };
  hooks.should_stop = interrupted;
  const Conversion conversion =
      convert(registry, teacher, recipe, layers, text.documents(), seed, hooks);
  Model::Mixers mixers;
  for (const auto& [layer, done] : conversion.layers) mixers[layer] = done.mixer;
  return mixers;
}

std::string layer_list(const std::vector<int>& layers) {
  std::string text;
  for (const int layer : layers) {
    if (!text.empty()) text += ',';
    text += std::to_string(layer);
  }
  return text;
}

std::string score_table(const LayerSelection& selection) {
  std::vector<Strings> rows = {{"layer", "score", "rank", "kept"}};
  for (const LayerScore& score : selection.scores)
    rows.push_back({std::to_string(score.layer), format_figure(score.score),
                    std::to_string(score.rank), score.kept ? "yes" : ""});
  return format_table(rows);
}

void print_selection(const LayerSelection& selection, const std::filesystem::path& out) {
  if (!selection.scores.empty()) {
    std::cout << score_table(selection) << "\nscore: " << selection.score << "\n"
              << "text: " << selection.sequences << " windows of " << selection.tokens_each
              << " tokens of calibration text; teacher's perplexity on it "
              << format_figure(selection.teacher_perplexity) << "\n";
  }
  std::cout << "kept: " << layer_list(selection.layers) << "\n"
            << "written: " << out.string() << " (for --keep-attention)\n";
}

}  // namespace

void run_select_layers(Config config, PluginRegistry& registry, Console& console) {
  add_recipe(config, registry);
  const SelectOptions options{config.text("select.policy"),
                              config.get<std::int64_t>("select.keep")};
  const bool uniform = options.policy.starts_with("uniform");
  require(config, options.policy == "ga-s2" || options.policy == "swap-kl", !uniform);
  const std::filesystem::path teacher_folder = config.text("teacher");
  const ModelConfig teacher_config = load_model_config(teacher_folder);
  if (is_student(teacher_folder))
    fail(ErrorKind::input, quoted(teacher_folder.string()) +
                               " is a student already; layers are selected from a teacher");
  const bool needs_mixers = policy_needs_mixers(options, teacher_config.n_layers);
  const std::filesystem::path out = output_file(config, ".json");
  const auto seed = static_cast<std::uint64_t>(config.get<std::int64_t>("seed"));

  std::map<std::string, std::string> provenance = {{"teacher", teacher_folder.filename().string()},
                                                   {"seed", std::to_string(seed)}};
  LayerSelection selection;
  SelectHooks hooks;
  hooks.begin = [&](std::int64_t units) { console.begin("measuring layers", units, "variants"); };
  hooks.evaluated = [&](const std::string& note) { console.advance(1, note); };
  hooks.should_stop = interrupted;
  if (uniform) {
    selection = uniform_selection(options, teacher_config.n_layers);
  } else {
    console.begin("reading text", 0, "");
    const SelectionText text(config, teacher_folder);
    const at::Tensor ids =
        calibration_windows(text.documents(), config.get<std::int64_t>("select.windows"),
                            config.get<std::int64_t>("select.context"), seed + kOtherWindows);
    provenance["text"] = text.content_hash();
    console.begin("reading " + teacher_folder.string(), 0, "");
    const Compute compute = config.text("matmul") == "bf16" ? Compute::bfloat16 : Compute::float32;
    const Backbone teacher = Backbone::load(teacher_folder, {compute, {}, {}});
    Model::Mixers mixers;
    if (needs_mixers) {
      mixers = convert_every_layer(config, registry, teacher, text, seed, console);
      provenance["mixer"] = config.text("mixer.name");
      provenance["init"] = config.text("init.name");
    }
    selection = select_layers(teacher, mixers, ids, options, hooks);
  }
  console.finish();
  write_file_atomically(out, to_json(selection, teacher_config.n_layers, provenance));
  print_selection(selection, out);
}

}  // namespace graft
