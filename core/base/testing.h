#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "core/base/error.h"

// For tests only.

namespace graft {

// A folder of its own for a test, removed with its contents at the end.
class TempFolder {
 public:
  TempFolder() {
    static std::atomic<int> count = 0;
    path_ = std::filesystem::temp_directory_path() /
            ("graft-test-" + std::to_string(::getpid()) + "-" + std::to_string(count++));
    std::filesystem::create_directories(path_);
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::filesystem::path& name) const { return path_ / name; }
  // The names in it, sorted.
  std::vector<std::string> entries() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

 private:
  std::filesystem::path path_;
};

// A function rather than code in the macro below, which is compiled anew at every use.
inline void expect_error(const std::function<void()>& action, ErrorKind kind,
                         const testing::Matcher<const std::string&>& message, const char* file,
                         int line) {
  const testing::ScopedTrace trace(file, line, "EXPECT_GRAFT_ERROR");
  try {
    action();
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(static_cast<int>(error.kind()), static_cast<int>(kind));
    EXPECT_THAT(std::string(error.what()), message);
  }
}

}  // namespace graft

// The statement throws graft::Error of this kind whose message matches (a gmock matcher).
#define EXPECT_GRAFT_ERROR(statement, kind, message) \
  ::graft::expect_error([&] { (void)(statement); }, kind, message, __FILE__, __LINE__)
