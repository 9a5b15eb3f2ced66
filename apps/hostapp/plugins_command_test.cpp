#include "apps/hostapp/plugins_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "core/abi/host_services.h"
#include "core/base/file.h"
#include "core/base/testing.h"
#include "core/loader/registry.h"

namespace graft {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::StartsWith;

TEST(PluginsList, SaysOfEachComponentWhatItIsAndWhereOnOneLine) {
  const TempFolder folder;
  fs::copy_file(fs::path(GRAFT_BUILD_DIR) / "tests/abi/plugins/good.so", folder / "good.so");
  write_file_atomically(folder / "notes.so", "this is text");
  HostServices host;
  PluginRegistry registry({folder.path()}, host);
  const std::string listed = list_plugins(registry);
  EXPECT_THAT(listed, AllOf(StartsWith("ID "), HasSubstr("  ALIAS  "), HasSubstr("  LIBTORCH  "),
                            ContainsRegex("refused: .*notes.so")));
  // One line for the head, one for the component, one for the folder, one for the refused file.
  EXPECT_EQ(std::count(listed.begin(), listed.end(), '\n'), 4);
  EXPECT_THAT(listed,
              ContainsRegex("[a-z.-]+ +fixture +mixer +[0-9.]+ +0\\.1 +[A-Za-z0-9.-]+ +- +" +
                            (folder / "good.so").string() + "\n"));
}

TEST(RunValidator, WithoutItTheWayOutIsNamed) {
  EXPECT_GRAFT_ERROR(run_validator("/nonexistent/graft-validate", {"a.so"}), ErrorKind::usage,
                     AllOf(HasSubstr("cannot run '/nonexistent/graft-validate': No such file"),
                           HasSubstr("--component sdk")));
}

TEST(RunValidator, ItsExitCodeAndArgumentsAreThoseOfTheProgram) {
  const TempFolder folder;
  write_file_atomically(folder / "graft-validate",
                        "#!/bin/sh\n[ \"$#\" = 2 ] && [ \"$2\" = '^a b' ] && exit 7\nexit 1\n");
  fs::permissions(folder / "graft-validate", fs::perms::owner_all);
  const pid_t child = ::fork();
  if (child == 0) run_validator(folder / "graft-validate", {"--include", "^a b"});
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

}  // namespace
}  // namespace graft
