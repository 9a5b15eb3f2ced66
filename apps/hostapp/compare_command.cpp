#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "apps/hostapp/commands.h"
#include "apps/hostapp/console.h"
#include "apps/hostapp/eval_settings.h"
#include "apps/hostapp/interrupt.h"
#include "apps/hostapp/output_file.h"
#include "apps/hostapp/table.h"
#include "core/base/error.h"
#include "core/base/file.h"
#include "core/base/message.h"
#include "core/base/suggest.h"
#include "core/checkpoint/checkpoint.h"
#include "core/eval/compare.h"
#include "core/eval/model_folder.h"
#include "core/loader/registry.h"
#include "core/student/student_io.h"
#include "graft/version.h"

namespace graft {
namespace {

namespace fs = std::filesystem;
using Strings = std::vector<std::string>;

CompareOptions compare_options(const Config& config) {
  CompareOptions options;
  options.context = config.get<std::int64_t>("eval.context");
  options.windows = config.get<std::int64_t>("eval.windows");
  options.prompts = config.get<std::int64_t>("agreement.prompts");
  options.prompt_length = config.get<std::int64_t>("agreement.prompt_length");
  options.continuation = config.get<std::int64_t>("agreement.tokens");
  options.needle.lengths = config.get<std::vector<std::int64_t>>("needle.lengths");
  options.needle.depths = config.get<std::vector<double>>("needle.depths");
  options.needle.trials = config.get<std::int64_t>("needle.trials");
  options.speed_contexts = config.get<std::vector<std::int64_t>>("speed.contexts");
  options.speed_tokens = config.get<std::int64_t>("speed.tokens");
  return options;
}

// A line of the table: what it is, and each model's figure.
class Lines {
 public:
  explicit Lines(const std::vector<ModelFigures>& models) : models_(models) {
    Strings head = {"figure"};
    for (const ModelFigures& model : models) head.push_back(model.name);
    rows_.push_back(head);
  }
  void add(const std::string& what, const std::function<double(const ModelFigures&)>& figure) {
    Strings row = {what};
    for (const ModelFigures& model : models_) row.push_back(format_figure(figure(model)));
    rows_.push_back(row);
  }
  std::string text() const { return format_table(rows_); }

 private:
  const std::vector<ModelFigures>& models_;
  std::vector<Strings> rows_;
};

std::string span_text(std::int64_t first, std::int64_t last) {
  return first == last ? std::to_string(first) : std::to_string(first) + "-" + std::to_string(last);
}

double mean_of(const std::vector<double>& values, std::size_t first, std::size_t last) {
  double sum = 0;
  for (std::size_t i = first; i <= last; ++i) sum += values[i];
  return sum / static_cast<double>(last - first + 1);
}

std::string comparison_table(const std::vector<ModelFigures>& models) {
  Lines lines(models);
  lines.add("perplexity", [](const auto& m) { return m.perplexity; });
  lines.add("KL to the teacher, nats", [](const auto& m) { return m.kl; });
  lines.add("same next token, text", [](const auto& m) { return m.agreement; });
  const ModelFigures& shape = models.front();
  for (std::size_t first = 0; first < shape.greedy.size();) {
    // 1, 2-3, 4-7, ...: counted from 1, as the positions of a text are below
    const std::size_t last = std::min(2 * first + 1, shape.greedy.size()) - 1;
    lines.add("same greedy token " + span_text(static_cast<std::int64_t>(first) + 1,
                                               static_cast<std::int64_t>(last) + 1),
              [&](const auto& m) { return mean_of(m.greedy, first, last); });
    first = last + 1;
  }
  for (std::size_t i = 0; i < shape.bits_lost.size(); ++i)
    lines.add("bits lost, position " + span_text(shape.bits_lost[i].first, shape.bits_lost[i].last),
              [&](const auto& m) { return m.bits_lost[i].bits_lost; });
  for (std::size_t i = 0; i < shape.needle.size(); ++i) {
    const NeedleFigure& needle = shape.needle[i];
    const std::string where = std::to_string(needle.length) + " tokens, depth " +
                              std::to_string(std::lround(100 * needle.depth)) + " %";
    lines.add("needle found, " + where, [&](const auto& m) { return m.needle[i].found; });
    lines.add("needle bits, " + where, [&](const auto& m) { return m.needle[i].bits; });
  }
  for (std::size_t i = 0; i < shape.speed.size(); ++i) {
    const std::string behind = " behind " + std::to_string(shape.speed[i].context) + " tokens";
    lines.add("decode tokens/s" + behind,
              [&](const auto& m) { return m.speed[i].decode_per_second; });
    lines.add("state MiB" + behind, [&](const auto& m) {
      return static_cast<double>(m.speed[i].state_bytes) / (1024.0 * 1024.0);
    });
  }
  return lines.text();
}

std::map<std::string, std::string> protocol_of(const Config& config, const std::string& text,
                                               std::int64_t windows) {
  const auto number = [&](const char* key) {
    return std::to_string(config.get<std::int64_t>(key));
  };
  return {
      {"text", text},
      {"windows", std::to_string(windows) + " consecutive windows of " + number("eval.context") +
                      " tokens, each from an empty state; a window's first token is not scored"},
      {"greedy", number("agreement.prompts") + " prompts of " + number("agreement.prompt_length") +
                     " tokens, " + number("agreement.tokens") + " greedy tokens each"},
      {"needle", number("needle.trials") +
                     " texts for each length and depth; found: every token of the number is the "
                     "first choice; bits: -log2 p of its tokens"},
      {"speed", "one sequence, " + number("speed.tokens") + " tokens behind each context"},
      {"matmul", config.text("matmul")},
      {"threads", config.get<std::int64_t>("threads") == 0 ? "all" : number("threads")},
      {"graft", GRAFT_VERSION_STRING}};
}

// Short names of folders, longer where two would be the same.
std::string display_name(const Strings& folders, std::size_t i) {
  const auto last_part = [](const std::string& folder) {
    const fs::path path = fs::path(folder).lexically_normal();
    return (path.has_filename() ? path.filename() : path.parent_path().filename()).string();
  };
  const std::string name = last_part(folders[i]);
  for (std::size_t k = 0; k < folders.size(); ++k)
    if (k != i && last_part(folders[k]) == name) return folders[i];
  return name;
}

}  // namespace

void run_compare(const CommandLine& line, const Config& config, PluginRegistry& registry,
                 Console& console) {
  Strings folders = {line.subject};
  folders.insert(folders.end(), line.students.begin(), line.students.end());
  evaluation_texts(config);
  const fs::path out = output_file(config, ".json");
  for (const std::string& folder : folders) {  // refused before any work
    check_model_folder(folder);
    load_model_config(folder);
  }
  const ModelFolder opened = open_model_folder(line.subject, log_info);
  const Tokenizer& tokenizer = opened.tokenizer;
  console.begin("reading text", 0, "");
  const EvaluationText text = read_evaluation_text(config, tokenizer);
  const Compute compute = config.text("matmul") == "bf16" ? Compute::bfloat16 : Compute::float32;
  const CompareOptions options = compare_options(config);

  console.begin("comparing", static_cast<std::int64_t>(folders.size()), "models");
  const Model teacher = load_model(line.subject, registry, compute);
  const Comparison comparison(teacher, tokenizer, text.tokens, text.name, options, interrupted);
  std::vector<ModelFigures> models;
  for (std::size_t i = 0; i < folders.size(); ++i) {
    const std::string name = display_name(folders, i);
    models.push_back(i == 0 ? comparison.measure(teacher, name)
                            : comparison.measure(load_model(folders[i], registry, compute), name));
    console.advance(1, name + ", perplexity " + format_figure(models.back().perplexity));
  }
  console.finish();
  const auto protocol = protocol_of(config, text.name, comparison.windows());
  std::cout << comparison_table(models) << "\n";
  for (const auto& [key, words] : protocol) std::cout << key << ": " << words << "\n";
  if (out.empty()) return;
  write_file_atomically(out, to_json(models, options, protocol));
  std::cout << "written: " << out.string() << "\n";
}

}  // namespace graft
