#include "tests/integration/subprocess.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <thread>

namespace graft {
namespace {

std::string content(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void redirect(const std::filesystem::path& file, int descriptor) {
  const int opened = open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (opened < 0 || dup2(opened, descriptor) < 0) _exit(126);
}

[[noreturn]] void become(const std::filesystem::path& program,
                         const std::vector<std::string>& arguments,
                         const Subprocess::Settings& settings) {
  if (!settings.folder.empty() && chdir(settings.folder.c_str()) != 0) _exit(126);
  for (const auto& [name, value] : settings.extra) setenv(name.c_str(), value.c_str(), 1);
  if (settings.most_file_bytes > 0) {
    const rlimit limit{settings.most_file_bytes, settings.most_file_bytes};
    setrlimit(RLIMIT_FSIZE, &limit);
    signal(SIGXFSZ, SIG_IGN);  // then the write fails instead
  }
  std::vector<char*> argv{const_cast<char*>(program.c_str())};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  execv(program.c_str(), argv.data());
  _exit(127);
}

}  // namespace

Subprocess::Subprocess(const std::filesystem::path& program,
                       const std::vector<std::string>& arguments, const Settings& settings) {
  static std::atomic<int> count = 0;
  const std::string stem =
      "graft-subprocess-" + std::to_string(getpid()) + "-" + std::to_string(count++);
  out_ = std::filesystem::temp_directory_path() / (stem + ".out");
  err_ = std::filesystem::temp_directory_path() / (stem + ".err");
  pid_ = fork();
  if (pid_ < 0) throw std::runtime_error("fork failed");
  if (pid_ > 0) return;
  if (close(STDIN_FILENO) != 0 || open("/dev/null", O_RDONLY) != STDIN_FILENO) _exit(126);
  redirect(out_, STDOUT_FILENO);
  redirect(err_, STDERR_FILENO);
  become(program, arguments, settings);
}

Subprocess::~Subprocess() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    finish();
  }
  std::error_code ignored;
  std::filesystem::remove(out_, ignored);
  std::filesystem::remove(err_, ignored);
}

bool Subprocess::waits_for(const std::string& text, double seconds) const {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < end) {
    if (content(err_).find(text) != std::string::npos) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return false;
}

void Subprocess::send(int signal) const { kill(pid_, signal); }

Finished Subprocess::finish() {
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), content(out_),
          content(err_)};
}

}  // namespace graft
