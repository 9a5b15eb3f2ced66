#include <iostream>
#include <iterator>
#include <string>

#include "apps/hostapp/commands.h"
#include "apps/hostapp/interrupt.h"
#include "apps/hostapp/table.h"
#include "core/base/error.h"
#include "core/base/message.h"
#include "core/eval/generate.h"
#include "core/loader/registry.h"
#include "core/student/student_io.h"
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

}  // namespace

void run_generate(const std::string& folder, const Config& config, PluginRegistry& registry) {
  const std::string prompt = prompt_of(config);
  const SampleOptions sampling{config.get<double>("generate.temperature"),
                               config.get<std::int64_t>("generate.top_k"),
                               config.get<double>("generate.top_p"),
                               static_cast<std::uint64_t>(config.get<std::int64_t>("seed"))};
  const Tokenizer tokenizer =
      Tokenizer::from_file(std::filesystem::path(folder) / "tokenizer.json");
  const std::vector<std::int32_t> ids = tokenizer.encode(prompt, true);
  const Compute compute = config.text("matmul") == "bf16" ? Compute::bfloat16 : Compute::float32;
  const Model model = load_model(folder, registry, compute);

  StreamDecoder decoder(tokenizer, true);
  const GenerateReport report = generate(model, ids, config.get<std::int64_t>("generate.tokens"),
                                         sampling, [&](std::int32_t id) {
                                           std::cout << decoder.push(id) << std::flush;
                                           return std::cout.good() && !interrupted();
                                         });
  std::cout << decoder.finish() << std::endl;
  log_info(std::to_string(ids.size()) + " prompt tokens at " +
           format_figure(rate(ids.size(), report.prefill_seconds)) + " tokens/s, " +
           std::to_string(report.ids.size()) + " new ones at " +
           format_figure(rate(report.ids.size(), report.decode_seconds)) + " tokens/s, " +
           format_figure(static_cast<double>(report.state_bytes) / 1024.0) +
           " KiB of keys, values and states");
  if (interrupted()) fail(ErrorKind::interrupted, "interrupted");
}

}  // namespace graft
