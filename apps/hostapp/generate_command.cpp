#include <algorithm>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "apps/hostapp/commands.h"
#include "apps/hostapp/interrupt.h"
#include "apps/hostapp/table.h"
#include "core/base/error.h"
#include "core/base/message.h"
#include "core/eval/generate.h"
#include "core/eval/model_folder.h"
#include "core/loader/registry.h"
#include "core/student/student_io.h"
#include "core/text/corpus.h"
#include "core/text/tokenizer.h"

namespace graft {
namespace {

std::string prompt_of(const Config& config) {
  std::string prompt = config.text("generate.prompt");
  if (prompt == "-") prompt.assign(std::istreambuf_iterator<char>(std::cin), {});
  if (prompt.empty())
    fail(ErrorKind::usage, "missing: --prompt TEXT (\"-\" reads it from standard input)");
  return prompt;
}

double rate(std::size_t tokens, double seconds) {
  return seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
}

void say_speed(std::size_t prompt_tokens, std::size_t new_tokens, const GenerateReport& report) {
  log_info(std::to_string(prompt_tokens) + " prompt tokens at " +
           format_figure(rate(prompt_tokens, report.prefill_seconds)) + " tokens/s, " +
           std::to_string(new_tokens) + " new ones at " +
           format_figure(rate(new_tokens, report.decode_seconds)) + " tokens/s, " +
           format_figure(static_cast<double>(report.state_bytes) / 1024.0) +
           " KiB of keys, values and states");
}

// Greedy text has no choice that these could narrow.
void warn_of_greedy(const Config& config) {
  if (config.get<double>("generate.temperature") != 0) return;
  for (const std::string key : {"generate.top_k", "generate.top_p"})
    if (config.at(key).origin.layer != Layer::builtin)
      log_warning(key + " does nothing at generate.temperature 0; give a temperature above 0");
}

class Generation {
 public:
  Generation(const std::string& folder, const Config& config, PluginRegistry& registry)
      : sampling_{config.get<double>("generate.temperature"),
                  config.get<std::int64_t>("generate.top_k"), config.get<double>("generate.top_p"),
                  static_cast<std::uint64_t>(config.get<std::int64_t>("seed"))},
        tokens_(config.get<std::int64_t>("generate.tokens")),
        opened_(open_model_folder(folder, log_info)),
        model_(load_model(folder, registry,
                          config.text("matmul") == "bf16" ? Compute::bfloat16 : Compute::float32)) {
  }
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;

  // Streams the text as it comes.
  void one(const std::string& prompt) {
    const std::vector<std::int32_t> ids = tokenizer_.encode(prompt, true);
    warn_of_length(ids.size());
    StreamDecoder decoder(tokenizer_, true);
    const GenerateReport report = generate(model_, ids, tokens_, sampling_, [&](std::int32_t id) {
      std::cout << decoder.push(id) << std::flush;
      return std::cout.good() && !interrupted();
    });
    std::cout << decoder.finish() << std::endl;
    say_speed(ids.size(), report.ids.size(), report);
  }

  // A JSON line for each prompt, in their order.
  void all(const std::vector<std::string>& prompts, std::size_t batch) {
    for (std::size_t first = 0; first < prompts.size() && !interrupted(); first += batch) {
      const std::size_t count = std::min(batch, prompts.size() - first);
      std::vector<std::vector<std::int32_t>> ids;
      std::size_t prompt_tokens = 0, new_tokens = 0;
      for (std::size_t i = first; i < first + count; ++i) {
        ids.push_back(tokenizer_.encode(prompts[i], true));
        prompt_tokens += ids.back().size();
        warn_of_length(ids.back().size());
      }
      const auto reports = generate_batch(model_, ids, tokens_, sampling_, false, interrupted);
      if (interrupted()) return;  // these lines would look finished
      for (std::size_t i = 0; i < count; ++i) {
        new_tokens += reports[i].ids.size();
        write(prompts[first + i], reports[i]);
      }
      say_speed(prompt_tokens, new_tokens, reports.front());
    }
  }

 private:
  // Once, however many prompts are too long.
  void warn_of_length(std::size_t prompt_tokens) {
    const std::string beyond =
        beyond_context(opened_.config, static_cast<std::int64_t>(prompt_tokens) + tokens_,
                       "prompt and generate.tokens");
    if (beyond.empty() || warned_) return;
    log_warning(beyond + ": what comes behind it is beyond what the model was trained for");
    warned_ = true;
  }

  void write(const std::string& prompt, const GenerateReport& report) const {
    const nlohmann::ordered_json line = {{"prompt", prompt},
                                         {"text", tokenizer_.decode(report.ids, true)},
                                         {"tokens", report.ids.size()},
                                         {"stopped", report.stopped}};
    // Half a character at the end of the tokens is no reason to stop.
    std::cout << line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace)
              << std::endl;
  }

  SampleOptions sampling_;
  std::int64_t tokens_;
  ModelFolder opened_;
  const Tokenizer& tokenizer_ = opened_.tokenizer;
  Model model_;
  bool warned_ = false;
};

}  // namespace

void run_generate(const std::string& folder, const Config& config, PluginRegistry& registry) {
  warn_of_greedy(config);
  const std::string& file = config.text("generate.prompts");
  if (file.empty()) {
    const std::string prompt = prompt_of(config);
    Generation(folder, config, registry).one(prompt);
  } else {
    if (!config.text("generate.prompt").empty())
      fail(ErrorKind::usage, "give one of --prompt and --prompts");
    const std::vector<std::string> prompts = read_lines(file, "prompt");
    Generation(folder, config, registry)
        .all(prompts, static_cast<std::size_t>(config.get<std::int64_t>("generate.batch")));
  }
  if (interrupted()) fail(ErrorKind::interrupted, "interrupted");
}

}  // namespace graft
