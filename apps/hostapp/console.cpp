#include "apps/hostapp/console.h"

#include <spdlog/sinks/base_sink.h>

#include <algorithm>
#include <utility>

#include "core/base/log.h"

namespace graft {
namespace {

// Stands before the sink that writes, and makes room for it.
class ClearingSink : public spdlog::sinks::base_sink<spdlog::details::null_mutex> {
 public:
  explicit ClearingSink(Console& console) : console_(console) {}

 protected:
  void sink_it_(const spdlog::details::log_msg&) override { console_.clear(); }
  void flush_() override {}

 private:
  Console& console_;
};

}  // namespace

Console::Console(int verbosity) : quiet_(verbosity < 0) {
  using namespace spdlog::level;
  constexpr level_enum levels[] = {warn, info, debug, trace};
  log_to_stderr(levels[std::clamp(verbosity, -1, 2) + 1]);
  auto& sinks = spdlog::default_logger()->sinks();
  sinks.insert(sinks.begin(), std::make_shared<ClearingSink>(*this));
}

Console::~Console() {
  auto& sinks = spdlog::default_logger()->sinks();
  sinks.erase(sinks.begin());
}

void Console::begin(const std::string& phase, std::int64_t units, const std::string& unit,
                    std::int64_t done) {
  const std::lock_guard lock(mutex_);
  finish();
  ProgressOptions options = progress_on_stderr();
  options.silent = quiet_;
  progress_ = std::make_unique<Progress>(phase, units, unit, done, options);
}

void Console::advance(std::int64_t units, const std::string& note) {
  const std::lock_guard lock(mutex_);
  if (progress_) progress_->advance(units, note);
}

void Console::finish() {
  const std::lock_guard lock(mutex_);
  if (progress_) progress_->finish();
  progress_.reset();
}

void Console::clear() {
  const std::lock_guard lock(mutex_);
  if (progress_) progress_->clear();
}

}  // namespace graft
