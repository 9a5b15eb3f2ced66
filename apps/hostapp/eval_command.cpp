#include <iostream>
#include <string>
#include <vector>

#include "apps/hostapp/commands.h"
#include "apps/hostapp/console.h"
#include "apps/hostapp/eval_settings.h"
#include "apps/hostapp/interrupt.h"
#include "apps/hostapp/settings.h"
#include "apps/hostapp/table.h"
#include "core/base/error.h"
#include "core/base/message.h"
#include "core/eval/agreement.h"
#include "core/eval/model_folder.h"
#include "core/eval/perplexity.h"
#include "core/loader/registry.h"
#include "core/student/student_io.h"
#include "core/text/corpus.h"

namespace graft {
namespace {

using Strings = std::vector<std::string>;

}  // namespace

Strings evaluation_texts(const Config& config) {
  const Strings& held_out = config.get<Strings>("eval_text");
  const Strings& text = config.get<Strings>("text");
  if (held_out.empty() && text.empty()) {
    fail(ErrorKind::usage,
         "missing: --text FILE...\n  a text; six novels: .deps/venv/bin/python scripts/get_text.py "
         "DIR");
  }
  return held_out.empty() ? text : held_out;
}

EvaluationText read_evaluation_text(const Config& config, const Tokenizer& tokenizer) {
  const Strings names = evaluation_texts(config);
  const Corpus corpus =
      Corpus::open({names.begin(), names.end()}, tokenizer, {config.text("text_field"), {}, {}});
  EvaluationText text;
  text.name = names.size() == 1 ? names.front() : std::to_string(names.size()) + " texts";
  for (const Document& document : corpus.documents())
    text.tokens.insert(text.tokens.end(), document.tokens.begin(), document.tokens.end());
  return text;
}

void run_eval(const std::string& folder, const Config& config, PluginRegistry& registry,
              Console& console) {
  evaluation_texts(config);  // refused before anything is read
  const std::string& teacher_folder = config.text("teacher");
  const bool compares =
      !teacher_folder.empty() && config.get<std::int64_t>("agreement.prompts") > 0;
  const ModelFolder opened = open_model_folder(folder, log_info);
  check_context(opened, config.get<std::int64_t>("eval.context"), "eval.context");
  if (compares) check_same_tokenizer(opened, open_model_folder(teacher_folder));
  console.begin("reading text", 0, "");
  const auto [what, tokens] = read_evaluation_text(config, opened.tokenizer);

  const Compute compute = config.text("matmul") == "bf16" ? Compute::bfloat16 : Compute::float32;
  console.begin("reading " + folder, 0, "");
  const Model model = load_model(folder, registry, compute);
  console.begin("evaluating", 0, "");
  const PerplexityOptions options = perplexity_options(config);
  const Perplexity result = perplexity(model, tokens, options, what, interrupted);
  console.finish();
  std::cout << "perplexity " << format_figure(result.value()) << "\n"
            << what << "; " << protocol(options, result) << "; " << format_figure(result.seconds)
            << " s\n";

  if (!compares) return;
  console.begin("comparing with " + teacher_folder, 0, "");
  const Model teacher = load_model(teacher_folder, registry, compute);
  const at::Tensor prompts = spread_prompts(
      tokens, options.windows * options.context, config.get<std::int64_t>("agreement.prompts"),
      config.get<std::int64_t>("agreement.prompt_length"), what);
  const TeacherContinuations continuations =
      continue_greedily(teacher, prompts, config.get<std::int64_t>("agreement.tokens"));
  const Agreement same = agreement(model, continuations);
  console.finish();
  std::cout << "agreement " << format_figure(same.greedy) << ", next token "
            << format_figure(same.forced) << "\n"
            << prompts.size(0) << " prompts of " << prompts.size(1) << " tokens, "
            << continuations.continuations.size(1) << " greedy tokens each\n";
}

PerplexityOptions perplexity_options(const Config& config) {
  return {config.get<std::int64_t>("eval.context"), config.get<std::int64_t>("eval.windows"),
          config.get<std::int64_t>("eval.stride"), config.get<bool>("eval.bos")};
}

}  // namespace graft
