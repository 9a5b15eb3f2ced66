#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/base/file.h"
#include "core/base/testing.h"
#include "core/text/testing.h"
#include "tests/integration/subprocess.h"

// For tests of the command line: hostapp on a tiny teacher.

namespace graft {

using Words = std::vector<std::string>;

inline const std::filesystem::path hostapp = std::filesystem::path(GRAFT_BUILD_DIR) / "bin/hostapp";

// Prose of a small grammar, not the same for two seeds.
inline std::string made_up_prose(std::uint32_t seed, std::size_t bytes) {
  const Words words = {"the ",    "river ",  "old ", "walked ", "over ",  "stone ",
                       "bridge ", "and ",    "saw ", "a ",      "light ", "in ",
                       "where ",  "nobody ", "had ", "lived ",  "for ",   "years. "};
  std::mt19937 random(seed);
  std::string text;
  while (text.size() < bytes) text += words[random() % words.size()];
  return text.substr(0, bytes);
}

// The golden Llama (2 layers, 4 heads of 16, 2 of them for keys, 320 tokens) that reads and writes
// bytes.
inline void make_tiny_teacher(const std::filesystem::path& folder) {
  std::filesystem::create_directory(folder);
  for (const char* name : {"config.json", "generation_config.json", "model.safetensors"}) {
    std::filesystem::copy_file(std::filesystem::path(GRAFT_TEST_DATA) / "models/llama" / name,
                               folder / name);
  }
  write_file_atomically(folder / "tokenizer.json", text::byte_level_json().dump());
}

// A folder with a teacher, two texts and a held-out one, and hostapp run in it.
class CliTest : public testing::Test {
 protected:
  CliTest() {
    make_tiny_teacher(folder_ / "teacher");
    write_file_atomically(folder_ / "a.txt", made_up_prose(1, 6000));
    write_file_atomically(folder_ / "b.txt", made_up_prose(2, 6000));
    write_file_atomically(folder_ / "held_out.txt",
                          "Another text entirely. " + made_up_prose(77, 4000));
  }

  Finished run(const Words& arguments) const {
    const Subprocess::Settings settings{
        folder_.path(),
        {{"GRAFT_CACHE_DIR", (folder_ / "cache").string()}, {"GRAFT_PLUGIN_PATH", ""}},
        0};
    return Subprocess(hostapp, arguments, settings).finish();
  }
  // Words in one string, split at blanks, and then some.
  static Words words(const std::string& text, const Words& more = {}) {
    Words out;
    std::istringstream in(text);
    for (std::string word; in >> word;) out.push_back(word);
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }
  void expect_refused(const Words& arguments, ErrorKind kind,
                      const testing::Matcher<const std::string&>& message) const {
    const Finished done = run(arguments);
    EXPECT_EQ(done.exit_code, static_cast<int>(kind)) << done.err;
    EXPECT_THAT(done.err, testing::AllOf(testing::HasSubstr("hostapp: error: "), message));
    EXPECT_THAT(done.err, testing::Not(testing::HasSubstr("unexpected")));
    EXPECT_EQ(done.out, "");
  }
  bool exists(const std::string& name) const { return std::filesystem::exists(folder_ / name); }

  TempFolder folder_;
};

}  // namespace graft
