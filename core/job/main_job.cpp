#include "core/job/main_job.h"

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>

#include "core/base/error.h"
#include "core/base/file.h"
#include "core/base/json.h"
#include "core/base/suggest.h"
#include "core/config/layer_set.h"
#include "core/eval/model_folder.h"
#include "core/loader/registry.h"
#include "core/student/student_io.h"
#include "core/text/shared_span.h"
#include "graft/version.h"

namespace graft {
namespace {

namespace fs = std::filesystem;

// The share of each document that is held out when no evaluation text is given.
constexpr double kHeldOutShare = 0.1;

struct Texts {
  std::vector<Document> calibration;
  std::vector<std::int32_t> held_out;
  std::string held_out_name;
};

struct KeepSet {
  std::string spec;
  std::vector<int> converted;
};

std::vector<KeepSet> keep_sets(const MainJob& job, std::int64_t n_layers) {
  std::vector<KeepSet> sets;
  for (const std::string& spec : job.keep) {
    const auto kept = attention_layers(spec, static_cast<int>(n_layers));
    KeepSet set{spec, {}};
    for (int layer = 0; layer < n_layers; ++layer)
      if (!std::binary_search(kept.begin(), kept.end(), layer)) set.converted.push_back(layer);
    for (const KeepSet& other : sets)
      if (other.converted == set.converted)
        fail(ErrorKind::usage, "keep_attention: " + quoted(other.spec) + " and " + quoted(spec) +
                                   " keep the same layers; give one of them");
    sets.push_back(std::move(set));
  }
  return sets;
}

std::vector<int> all_converted(const std::vector<KeepSet>& sets) {
  std::set<int> all;
  for (const KeepSet& set : sets) all.insert(set.converted.begin(), set.converted.end());
  return {all.begin(), all.end()};
}

std::vector<std::int32_t> concatenated(const std::vector<Document>& documents) {
  std::vector<std::int32_t> tokens;
  for (const Document& document : documents)
    tokens.insert(tokens.end(), document.tokens.begin(), document.tokens.end());
  return tokens;
}

// Without an evaluation text: the tail of each document, so that both parts see every document.
Texts hold_out_tails(const Corpus& corpus) {
  Texts texts;
  const std::vector<Document> documents = corpus.documents();
  texts.calibration = without_held_out_tails(documents);
  for (std::size_t i = 0; i < documents.size(); ++i) {
    const auto held = documents[i].tokens.subspan(texts.calibration[i].tokens.size());
    texts.held_out.insert(texts.held_out.end(), held.begin(), held.end());
  }
  texts.held_out_name = "the last 10 % of each calibration document";
  return texts;
}

std::string joined_names(const std::vector<Document>& documents) {
  std::string names;
  for (std::size_t i = 0; i < documents.size(); ++i) {
    if (i == 3 && documents.size() > 4)
      return names + " and " + std::to_string(documents.size() - 3) + " more";
    names += (i == 0 ? "" : ", ") + fs::path(documents[i].name).filename().string();
  }
  return names;
}

// A folder's own name, of "." and "dir/" too.
std::string folder_name(const fs::path& folder) {
  const fs::path path = fs::absolute(folder).lexically_normal();
  return (path.has_filename() ? path : path.parent_path()).filename().string();
}

// What a main job wrote, by its results.json.
bool holds_results(const fs::path& folder) {
  std::error_code error;
  if (!fs::is_regular_file(folder / "results.json", error)) return false;
  try {
    const nlohmann::json json = read_json(folder / "results.json");
    return json.is_object() && json.contains("teacher") && json.contains("rows") &&
           json.contains("protocol");
  } catch (const Error&) {
    return false;
  }
}

void refuse_to_replace(const MainJob& job, const fs::path& input, const std::string& what) {
  if (!is_within(input, job.out)) return;
  // The configuration beside the results is written again.
  std::error_code error;
  if (fs::equivalent(input, job.out / "config.toml", error)) return;
  fail(ErrorKind::usage, "cannot write the folder " + quoted_path(job.out) + ": it is, or holds, " +
                             what + " " + quoted_path(input) +
                             ", which would be deleted; name another --out");
}

// OUT is replaced as a whole: nothing may be lost but what an earlier job wrote.
void check_out(const MainJob& job) {
  std::error_code error;
  if (!fs::is_directory(job.out, error)) return;
  refuse_to_replace(job, job.teacher, "the teacher");
  for (const fs::path& path : job.text) refuse_to_replace(job, path, "the text");
  for (const fs::path& path : job.eval_text) refuse_to_replace(job, path, "the evaluation text");
  for (const fs::path& path : job.settings_files) refuse_to_replace(job, path, "the file");
  if (job.force && !fs::is_empty(job.out, error) && !holds_results(job.out))
    fail(ErrorKind::usage, "cannot replace the folder " + quoted_path(job.out) +
                               ": it holds something that is no result of hostapp (no "
                               "results.json); name another --out, or delete it yourself");
}

// The parts of the held-out text that figures are made on: the windows, and the prompts with what
// stands behind them as far as a shared run would reach.
std::vector<std::span<const std::int32_t>> evaluated_parts(const MainJob& job,
                                                           std::span<const std::int32_t> tokens,
                                                           const std::string& name) {
  const auto total = static_cast<std::int64_t>(tokens.size());
  const auto part = [&](std::int64_t start, std::int64_t length) {
    return tokens.subspan(static_cast<std::size_t>(start),
                          static_cast<std::size_t>(std::min(length, total - start)));
  };
  const std::int64_t windows = job.eval.windows * job.eval.context;
  std::vector<std::span<const std::int32_t>> parts{part(0, windows > 0 ? windows : total)};
  if (job.prompts > 0)
    for (const std::int64_t start :
         prompt_starts(total, windows, job.prompts, job.prompt_length, name))
      parts.push_back(part(start, std::max(job.prompt_length, kSharedSpan)));
  return parts;
}

class Runner {
 public:
  Runner(const MainJob& job, PluginRegistry& registry, const JobHooks& hooks)
      : job_(job), registry_(registry), hooks_(hooks) {}

  MainJobResult run() {
    check_out(job_);
    prepare();
    AtomicDirectory out(job_.out, job_.force);
    load_texts();
    backbone_ =
        std::make_shared<const Backbone>(Backbone::load(job_.teacher, {job_.compute, {}, {}}));
    measure_teacher();
    for (const Recipe& baseline : job_.baselines) run_recipe(baseline, /*asked=*/false);
    run_recipe(job_.recipe, /*asked=*/true);
    write(out, *student_);
    return std::move(result_);
  }

 private:
  void prepare() {
    config_ = load_model_config(job_.teacher);
    check_model_folder(job_.teacher);
    if (is_student(job_.teacher))
      fail(ErrorKind::input,
           quoted(job_.teacher.string()) +
               " is a student already; the teacher must be a model with attention");
    for (const std::string& message : config_.notes) say(message);
    const std::string beyond = beyond_context(config_, job_.eval.context, "eval.context");
    if (!beyond.empty()) fail(ErrorKind::usage, beyond);
    keeps_ = keep_sets(job_, config_.n_layers);
    for (const Recipe& baseline : job_.baselines) check_recipe(registry_, baseline, config_);
    check_recipe(registry_, job_.recipe, config_);
  }

  void load_texts() {
    begin("reading text", 0, "");
    const Tokenizer tokenizer = Tokenizer::from_file(job_.teacher / "tokenizer.json");
    for (const std::string& message : tokenizer.notes()) say(message);
    check_vocabulary(tokenizer, config_, job_.teacher);
    CorpusOptions options;
    options.jsonl_field = job_.text_field;
    calibration_ = std::make_unique<Corpus>(Corpus::open(job_.text, tokenizer, options));
    if (job_.eval_text.empty()) {
      texts_ = hold_out_tails(*calibration_);
      say("no evaluation text was given: " + texts_.held_out_name +
          " is held out of calibration and used for every figure");
    } else {
      const Corpus held_out = Corpus::open(job_.eval_text, tokenizer, options);
      refuse_equal_files(held_out);
      texts_ = {calibration_->documents(), concatenated(held_out.documents()),
                joined_names(held_out.documents())};
    }
    for (const Corpus::Source& source : calibration_->sources())
      result_.calibration.push_back(source.path.filename().string());
    result_.held_out = texts_.held_out_name;
    const std::int64_t needed =
        job_.eval.windows > 0 ? job_.eval.windows * job_.eval.context : job_.eval.context;
    require_tokens({texts_.held_out_name, texts_.held_out}, needed,
                   std::to_string(std::max<std::int64_t>(job_.eval.windows, 1)) +
                       " evaluation windows of " + std::to_string(job_.eval.context) + " tokens; " +
                       (job_.eval_text.empty() ? "give a text for it with --eval-text, more --text,"
                                               : "give a longer --eval-text") +
                       " or fewer windows with --eval.windows");
    refuse_leaks();  // in what no window may come from too
    std::int64_t window = job_.recipe.window;
    for (const Recipe& baseline : job_.baselines) window = std::min(window, baseline.window);
    texts_.calibration = long_enough(texts_.calibration, window);
  }

  // Windows are drawn: that they miss the evaluated part of the same text would be luck.
  void refuse_equal_files(const Corpus& held_out) {
    for (const Corpus::Source& evaluated : held_out.sources())
      for (const Corpus::Source& trained : calibration_->sources())
        if (evaluated.sha256 == trained.sha256)
          fail(ErrorKind::input, "evaluation text " + quoted(evaluated.path.string()) +
                                     " is calibration text too (" + quoted(trained.path.string()) +
                                     " has the same content): give another eval_text, or none, and "
                                     "a tail is held out");
  }

  // The documents as a whole, not only the windows that this seed draws.
  void refuse_leaks() {
    const Document* shared = sharing_document(
        texts_.calibration, evaluated_parts(job_, texts_.held_out, texts_.held_out_name));
    if (shared == nullptr) return;
    fail(ErrorKind::input, "calibration and evaluation text share a run of " +
                               std::to_string(kSharedSpan) +
                               " tokens: every figure would be measured on what was trained on. It "
                               "stands in " +
                               quoted(shared->name) + "; take it out, or give another eval_text (" +
                               "now: " + texts_.held_out_name + ")");
  }

  void measure_teacher() {
    const Model teacher(backbone_);
    begin("teacher", 0, "");
    result_.teacher =
        perplexity(teacher, texts_.held_out, job_.eval, texts_.held_out_name, hooks_.should_stop);
    result_.protocol = protocol(job_.eval, result_.teacher);
    if (job_.prompts == 0) return;
    // Prompts lie behind the evaluation windows where the text is long enough.
    const at::Tensor prompts =
        spread_prompts(texts_.held_out, job_.eval.windows * job_.eval.context, job_.prompts,
                       job_.prompt_length, texts_.held_out_name);
    continuations_ = continue_greedily(teacher, prompts, job_.continuation);
    result_.agreement_protocol = std::to_string(job_.prompts) + " prompts of " +
                                 std::to_string(job_.prompt_length) +
                                 " tokens from the held-out text, " +
                                 std::to_string(job_.continuation) + " greedy tokens each";
  }

  // Layers that stand alone are converted once for all sets of kept ones.
  void run_recipe(const Recipe& recipe, bool asked) {
    if (!recipe.stream.student) {
      measure(recipe, convert_layers(recipe, all_converted(keeps_)), keeps_, asked);
      return;
    }
    for (const KeepSet& keep : keeps_)
      measure(recipe, convert_layers(recipe, keep.converted), {&keep, 1},
              asked && &keep == &keeps_.front());
  }

  Conversion convert_layers(const Recipe& recipe, const std::vector<int>& layers) {
    begin("converting (" + recipe.label + ")", static_cast<std::int64_t>(layers.size()), "layers");
    ConvertHooks hooks;
    hooks.layer_done = [this](int layer, const std::string& note) {
      if (hooks_.advance)
        hooks_.advance(1, "layer " + std::to_string(layer) + (note.empty() ? "" : ", " + note));
    };
    hooks.should_stop = hooks_.should_stop;
    return convert(registry_, *backbone_, recipe, layers, texts_.calibration, job_.seed, hooks);
  }

  // Evaluates each set of kept layers, before and after calibration. The student to be written is
  // that of the first set.
  void measure(const Recipe& recipe, const Conversion& conversion, std::span<const KeepSet> keeps,
               bool asked) {
    // On the student's own stream the layers before calibration are not the start of anything: each
    // was made behind calibrated ones.
    std::vector<bool> stages{recipe.calibrate};
    if (recipe.calibrate && !recipe.stream.student) stages.insert(stages.begin(), false);
    begin("evaluating (" + recipe.label + ")",
          static_cast<std::int64_t>(keeps.size() * stages.size()), "students");
    for (const bool calibrated : stages)
      for (const KeepSet& keep : keeps) measure(recipe, conversion, keep, calibrated);
    if (!asked) return;
    student_.emplace(student_of(conversion, keeps.front(), true));
    double tokens = 0, seconds = 0;
    for (const auto& [layer, done] : conversion.layers) {
      tokens += static_cast<double>(done.report.tokens);
      seconds += done.report.seconds;
    }
    if (seconds > 0) result_.calibrate_tokens_per_second = tokens / seconds;
  }

  void measure(const Recipe& recipe, const Conversion& conversion, const KeepSet& keep,
               bool calibrated) {
    const Model model = student_of(conversion, keep, calibrated || !recipe.calibrate);
    ResultRow row{recipe.label,
                  calibrated ? "calibrate" : "init",
                  keep.spec,
                  0,
                  {},
                  calibrated ? conversion.calibrate_tokens : conversion.init_tokens,
                  conversion.seconds(calibrated, keep.converted)};
    row.perplexity =
        perplexity(model, texts_.held_out, job_.eval, texts_.held_out_name, hooks_.should_stop)
            .value();
    if (continuations_.prompts.defined()) row.agreement = agreement(model, continuations_);
    result_.rows.push_back(row);
    if (hooks_.row) hooks_.row(row);
    if (hooks_.advance) hooks_.advance(1, "");
  }

  Model student_of(const Conversion& conversion, const KeepSet& keep, bool final) const {
    Model::Mixers mixers;
    for (const int layer : keep.converted) {
      const ConvertedLayer& done = conversion.layers.at(layer);
      mixers[layer] = final || !done.initialised ? done.mixer : done.initialised;
    }
    if (conversion.backbone.empty()) return Model(backbone_, std::move(mixers));
    return Model(std::make_shared<const Backbone>(backbone_->with(conversion.backbone)),
                 std::move(mixers));
  }

  void write(AtomicDirectory& out, const Model& student) {
    begin("writing", 0, "");
    const std::map<std::string, std::string> provenance{
        {"graft", GRAFT_VERSION_STRING},
        {"teacher", folder_name(job_.teacher)},
        {"init", job_.recipe.init.name},
        {"calibrate", job_.recipe.calibrate ? job_.recipe.stage.objective : ""},
        {"keep_attention", keeps_.front().spec},
        {"seed", std::to_string(job_.seed)},
        {"text", calibration_->content_hash()},
    };
    write_student(out.path() / "student", false, student, job_.teacher, provenance);
    write_file_atomically(out.path() / "results.json", results_json(job_, result_));
    for (const auto& [name, content] : job_.extra_files)
      write_file_atomically(out.path() / name, content);
    out.commit();
    result_.student = out.final_path() / "student";
  }

  void begin(const std::string& phase, std::int64_t units, const std::string& unit) {
    if (hooks_.should_stop && hooks_.should_stop())
      fail(ErrorKind::interrupted, "interrupted before " + phase);
    if (hooks_.begin) hooks_.begin(phase, units, unit);
  }
  void say(const std::string& message) {
    if (hooks_.say) hooks_.say(message);
  }

  const MainJob& job_;
  PluginRegistry& registry_;
  const JobHooks& hooks_;
  ModelConfig config_;
  std::vector<KeepSet> keeps_;
  std::unique_ptr<Corpus> calibration_;  // keeps the mapped tokens alive
  Texts texts_;
  std::shared_ptr<const Backbone> backbone_;
  TeacherContinuations continuations_;
  std::optional<Model> student_;
  MainJobResult result_;
};

}  // namespace

std::vector<Document> without_held_out_tails(const std::vector<Document>& documents) {
  std::vector<Document> out = documents;
  for (Document& document : out) {
    const auto tail =
        static_cast<std::size_t>(kHeldOutShare * static_cast<double>(document.tokens.size()));
    document.tokens = document.tokens.first(document.tokens.size() - tail);
  }
  return out;
}

std::string results_json(const MainJob& job, const MainJobResult& result) {
  using nlohmann::ordered_json;
  ordered_json rows = ordered_json::array();
  // Not measured is not the same as never.
  const auto measured = [&](double share) {
    return job.prompts > 0 ? ordered_json(share) : ordered_json();
  };
  for (const ResultRow& row : result.rows)
    rows.push_back({{"init", row.init},
                    {"stage", row.stage},
                    {"keep", row.keep},
                    {"ppl", row.perplexity},
                    {"agreement", measured(row.agreement.greedy)},
                    {"agreement_forced", measured(row.agreement.forced)},
                    {"tokens", row.tokens},
                    {"seconds", row.seconds}});
  const ordered_json text = {{"calibration", result.calibration}, {"evaluation", result.held_out}};
  const ordered_json json = {{"teacher", {{"ppl", result.teacher.value()}}},
                             {"rows", rows},
                             {"protocol",
                              {{"perplexity", result.protocol},
                               {"agreement", result.agreement_protocol},
                               {"tokens_scored", result.teacher.scored},
                               {"windows", result.teacher.windows},
                               {"context", job.eval.context},
                               {"stride", effective_stride(job.eval)},
                               {"bos", job.eval.bos},
                               {"seed", job.seed},
                               {"threads", at::get_num_threads()},
                               {"matmul", job.compute == Compute::float32 ? "fp32" : "bf16"},
                               {"graft", GRAFT_VERSION_STRING}}},
                             {"model", folder_name(job.teacher)},
                             {"text", text}};
  return json.dump(2) + "\n";
}

MainJobResult run_main_job(const MainJob& job, PluginRegistry& registry, const JobHooks& hooks) {
  return Runner(job, registry, hooks).run();
}

}  // namespace graft
