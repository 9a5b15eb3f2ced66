#include "kit/process.h"

#include <dirent.h>
#include <malloc.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cfenv>
#include <clocale>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include "graft/status.hpp"

namespace graft::conformance {
namespace {

// Without the flags that every inexact sum raises.
std::string floating_point_mode() {
  std::string mode = sdk::cat("rounding ", std::fegetround(), ", traps ", ::fegetexcept());
#ifdef __SSE__
  constexpr unsigned kRaised = 0x3F;
  mode += sdk::cat(", mxcsr ", _mm_getcsr() & ~kRaised);
#endif
#ifdef __aarch64__
  mode += sdk::cat(", fpcr ", __builtin_aarch64_get_fpcr());
#endif
  return mode;
}

std::vector<std::string> signal_actions() {
  std::vector<std::string> out;
  for (int number = 1; number < NSIG; ++number) {
    struct sigaction action {};
    if (::sigaction(number, nullptr, &action) != 0) {
      out.emplace_back();
      continue;
    }
    const bool with_info = (action.sa_flags & SA_SIGINFO) != 0;
    const void* const handler = with_info ? reinterpret_cast<const void*>(action.sa_sigaction)
                                          : reinterpret_cast<const void*>(action.sa_handler);
    out.push_back(sdk::cat(handler, " flags ", action.sa_flags));
  }
  return out;
}

std::map<std::string, std::string> environment_now() {
  std::map<std::string, std::string> out;
  for (char** entry = ::environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const std::size_t equals = text.find('=');
    out.emplace(text.substr(0, equals), equals == std::string::npos ? "" : text.substr(equals + 1));
  }
  return out;
}

void add(std::string& text, const std::string& what) { text += (text.empty() ? "" : "; ") + what; }

void compare(std::string& text, const char* what, const std::string& before,
             const std::string& after) {
  if (before != after) add(text, sdk::cat(what, ", from '", before, "' to '", after, "'"));
}

void compare_environments(std::string& text, const std::map<std::string, std::string>& before,
                          const std::map<std::string, std::string>& after) {
  for (const auto& [name, value] : after) {
    const auto old = before.find(name);
    if (old == before.end()) add(text, sdk::cat("the environment, which has ", name, " now"));
    if (old != before.end() && old->second != value)
      add(text, sdk::cat("the environment's ", name));
  }
  for (const auto& [name, value] : before) {
    if (!after.contains(name)) add(text, sdk::cat("the environment, which has no ", name, " now"));
  }
}

}  // namespace

int count_own(const char* folder) {
  DIR* const open = ::opendir((std::string("/proc/self/") + folder).c_str());
  if (open == nullptr) throw std::runtime_error("/proc is not there");
  int n = 0;
  while (const dirent* const entry = ::readdir(open)) {
    if (entry->d_name[0] != '.') ++n;
  }
  ::closedir(open);
  return std::string(folder) == "fd" ? n - 1 : n;
}

ProcessState process_state() {
  ProcessState out;
  out.signals = signal_actions();
  out.floating_point = floating_point_mode();
  std::error_code ignored;
  out.directory = std::filesystem::current_path(ignored).string();
  const char* const locale = std::setlocale(LC_ALL, nullptr);
  out.locale = locale == nullptr ? "" : locale;
  out.environment = environment_now();
  // There is no reading without writing.
  const mode_t mask = ::umask(0);
  ::umask(mask);
  out.umask = mask;
  out.threads = count_own("task");
  return out;
}

std::string changes(const ProcessState& before, const ProcessState& after) {
  std::string text;
  for (std::size_t i = 0; i < before.signals.size(); ++i) {
    if (before.signals[i] != after.signals[i]) add(text, sdk::cat("the handler of signal ", i + 1));
  }
  compare(text, "the floating-point environment", before.floating_point, after.floating_point);
  compare(text, "the working directory", before.directory, after.directory);
  compare(text, "the locale", before.locale, after.locale);
  compare_environments(text, before.environment, after.environment);
  compare(text, "the umask", sdk::cat(before.umask), sdk::cat(after.umask));
  return text;
}

std::int64_t resident_bytes() {
#ifdef __GLIBC__
  ::malloc_trim(0);
#endif
  std::ifstream file("/proc/self/statm");
  std::int64_t all = 0, resident = 0;
  if (!(file >> all >> resident)) throw std::runtime_error("/proc/self/statm is not there");
  return resident * ::sysconf(_SC_PAGESIZE);
}

double cpu_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace graft::conformance
