#include "kit/runner.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>

#include "kit/context.h"

namespace graft::conformance {
namespace {

constexpr std::size_t kPrintedShown = 2000;

void write_all(int fd, const std::string& text) {
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = ::write(fd, text.data() + done, text.size() - done);
    if (n < 0 && errno != EINTR) return;
    if (n > 0) done += static_cast<std::size_t>(n);
  }
}

[[noreturn]] void be_the_child(const std::function<std::string()>& work, int answer, int printed) {
  const rlimit no_core{0, 0};
  ::setrlimit(RLIMIT_CORE, &no_core);
  ::dup2(printed, STDOUT_FILENO);
  ::dup2(printed, STDERR_FILENO);
  write_all(answer, work());
  // No exit handlers: they belong to the parent, and a plugin's are not what is tested.
  ::_exit(0);
}

std::string how_it_ended(int status) {
  if (WIFSIGNALED(status)) {
    const int number = WTERMSIG(status);
    return sdk::cat("is ended by signal ", number, " (", ::strsignal(number), ")");
  }
  return sdk::cat("ends the process with exit code ", WEXITSTATUS(status));
}

std::string to_text(const Result& result) {
  const nlohmann::json json = {{"verdict", static_cast<int>(result.verdict)},
                               {"detail", result.detail},
                               {"notes", result.notes}};
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

Result from_text(const std::string& text) {
  const auto json = nlohmann::json::parse(text);
  Result out;
  out.verdict = static_cast<Verdict>(json.at("verdict").get<int>());
  out.detail = json.at("detail").get<std::string>();
  out.notes = json.at("notes").get<std::vector<std::string>>();
  return out;
}

// "gdn:padding.left" before "padding.left".
template <class Map>
const typename Map::mapped_type* find_setting(const Map& map, const Subject& subject,
                                              const char* test) {
  for (const std::string& name :
       {subject.alias + ":" + test, subject.id + ":" + test, std::string(test)}) {
    if (const auto found = map.find(name); found != map.end()) return &found->second;
  }
  return nullptr;
}

void run_test(const Test& test, const Subject& subject, const Settings& settings, Result& result) {
  const Library library(settings.plugin);
  const Component* component = nullptr;
  Options options;
  if (subject.kind != Kind::library) {
    component = &library.find(subject.kind, subject.id);
    options = options_for(*component->desc, settings);
  }
  Context context{library, component, settings, options, settings.seed, 1, {}};
  if (const auto* const loosened = find_setting(settings.tolerances, subject, test.id)) {
    context.tolerance = loosened->factor;
    context.note("tolerance x ", loosened->factor, ": ", loosened->reason);
  }
  const auto keep_notes = [&] { result.notes = context.notes; };
  try {
    test.run(context);
  } catch (...) {
    keep_notes();
    throw;
  }
  keep_notes();
}

}  // namespace

Child::Child(const std::function<std::string()>& work) : start_(std::chrono::steady_clock::now()) {
  int ends[2];
  printed_ = ::memfd_create("printed", MFD_CLOEXEC);
  if (printed_ < 0 || ::pipe2(ends, O_CLOEXEC) != 0) {
    throw std::runtime_error(std::string("cannot make a pipe: ") + std::strerror(errno));
  }
  pid_ = ::fork();
  if (pid_ < 0)
    throw std::runtime_error(std::string("cannot start a process: ") + std::strerror(errno));
  if (pid_ == 0) {
    note_.take_over();
    be_the_child(work, ends[1], printed_);
  }
  ::close(ends[1]);
  answer_ = ends[0];
}

Child::~Child() {
  if (pid_ > 0) {
    kill();
    ::waitpid(pid_, nullptr, 0);
  }
  if (answer_ >= 0) ::close(answer_);
  if (printed_ >= 0) ::close(printed_);
}

bool Child::advance() {
  char buffer[4096];
  const ssize_t n = ::read(answer_, buffer, sizeof buffer);
  if (n > 0) answer_text_.append(buffer, static_cast<std::size_t>(n));
  return n == 0 || (n < 0 && errno != EINTR);
}

void Child::kill() { ::kill(pid_, SIGKILL); }

double Child::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

Child::End Child::finish() {
  while (!advance()) {
  }
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  End end;
  end.answered = WIFEXITED(status) && WEXITSTATUS(status) == 0 && !answer_text_.empty();
  end.answer = std::move(answer_text_);
  if (!end.answered) end.trouble = how_it_ended(status);
  end.doing = note_.text();
  const off_t length = ::lseek(printed_, 0, SEEK_END);
  if (length > 0) {
    end.printed.resize(static_cast<std::size_t>(length));
    const ssize_t n = ::pread(printed_, end.printed.data(), end.printed.size(), 0);
    end.printed.resize(n < 0 ? 0 : static_cast<std::size_t>(n));
  }
  return end;
}

Result run_here(const Test& test, const Subject& subject, const Settings& settings) {
  Result result;
  const auto start = std::chrono::steady_clock::now();
  if (const auto* const reason = find_setting(settings.skips, subject, test.id)) {
    result.verdict = Verdict::skip;
    result.detail = "by graft-validate.toml: " + *reason;
    return result;
  }
  try {
    run_test(test, subject, settings, result);
    result.verdict = Verdict::pass;
  } catch (const Skipped& why) {
    result.verdict = Verdict::skip;
    result.detail = why.what();
  } catch (const std::exception& problem) {
    result.verdict = Verdict::fail;
    result.detail = problem.what();
  } catch (...) {
    result.verdict = Verdict::fail;
    result.detail = "throws across the ABI, and no std::exception";
  }
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

TestRun::TestRun(const Test& test, const Subject& subject, const Settings& settings)
    : child_([&] { return to_text(run_here(test, subject, settings)); }),
      timeout_(settings.timeout) {}

bool TestRun::wait(std::chrono::milliseconds for_ms) {
  const auto left =
      timeout_ - std::chrono::milliseconds(static_cast<std::int64_t>(child_.seconds() * 1000));
  if (left.count() <= 0) {
    finish(true);
    return true;
  }
  pollfd on{child_.answer_fd(), POLLIN, 0};
  const auto ms = static_cast<int>(std::min(for_ms, left).count());
  if (::poll(&on, 1, ms) <= 0) return false;
  if (!child_.advance()) return false;
  finish(false);
  return true;
}

void TestRun::finish(bool timed_out) {
  if (timed_out) child_.kill();
  result_.seconds = child_.seconds();
  const double seconds = result_.seconds;
  const Child::End end = child_.finish();
  if (end.answered && !timed_out) {
    result_ = from_text(end.answer);
  } else {
    result_.verdict = Verdict::fail;
    result_.detail = timed_out ? sdk::cat("does not come back within ",
                                          static_cast<double>(timeout_.count()) / 1000, " s")
                               : "the process of this test " + end.trouble;
    if (!end.doing.empty()) result_.detail += ", during: " + end.doing;
  }
  result_.seconds = seconds;
  if (!end.printed.empty())
    result_.notes.push_back("printed: " + end.printed.substr(0, kPrintedShown));
}

Result run_in_child(const Test& test, const Subject& subject, const Settings& settings) {
  TestRun run(test, subject, settings);
  while (!run.wait(std::chrono::seconds(1))) {
  }
  return run.result();
}

std::vector<Subject> subjects_of(const Settings& settings) {
  Child child([&]() -> std::string {
    nlohmann::json out;
    try {
      const Library library(settings.plugin);
      const char* const id = library.plugin().id;
      out["subjects"] = {{{"kind", 0}, {"id", id == nullptr ? "" : id}, {"alias", ""}}};
      for (const Component& component : library.components()) {
        const char* const alias = component.desc->alias;
        out["subjects"].push_back({{"kind", static_cast<int>(component.kind)},
                                   {"id", name_of(*component.desc)},
                                   {"alias", alias == nullptr ? "" : alias}});
      }
    } catch (const std::exception& problem) {
      out["error"] = problem.what();
    }
    return out.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  });
  pollfd on{child.answer_fd(), POLLIN, 0};
  const bool in_time = ::poll(&on, 1, static_cast<int>(settings.timeout.count())) > 0;
  if (!in_time) child.kill();
  const Child::End end = child.finish();
  const std::string file = "'" + settings.plugin.string() + "': ";
  if (!end.answered) {
    throw std::runtime_error(
        file + (in_time ? "opening it " + end.trouble : "does not come back from being opened"));
  }
  const auto answer = nlohmann::json::parse(end.answer);
  if (answer.contains("error")) throw std::runtime_error(file + answer["error"].get<std::string>());
  std::vector<Subject> out;
  for (const auto& entry : answer.at("subjects")) {
    out.push_back({static_cast<Kind>(entry.at("kind").get<int>()),
                   entry.at("id").get<std::string>(), entry.at("alias").get<std::string>()});
  }
  return out;
}

}  // namespace graft::conformance
