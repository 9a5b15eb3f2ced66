#pragma once

#include <sys/types.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace graft {

struct Finished {
  int exit_code = -1;  // 128 + signal when it was killed
  std::string out, err;
};

// A program in a process of its own, its output in files. For tests.
class Subprocess {
 public:
  struct Settings {
    std::filesystem::path folder;              // working directory
    std::map<std::string, std::string> extra;  // environment variables beside the inherited ones
    unsigned long most_file_bytes = 0;         // a file cannot grow beyond this; 0 = no limit
  };

  Subprocess(const std::filesystem::path& program, const std::vector<std::string>& arguments,
             const Settings& settings);
  ~Subprocess();
  Subprocess(const Subprocess&) = delete;
  Subprocess& operator=(const Subprocess&) = delete;

  // True when standard error holds `text` within `seconds`.
  bool waits_for(const std::string& text, double seconds) const;
  void send(int signal) const;
  // Waits for the end.
  Finished finish();

 private:
  std::filesystem::path out_, err_;
  pid_t pid_ = -1;
};

}  // namespace graft
