#include "apps/hostapp/new_plugin.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "core/base/file.h"
#include "core/base/testing.h"

namespace graft {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::MatchesRegex;
using testing::Not;

// The build tree has the templates where an installation has them.
const SdkPlaces build_tree = {GRAFT_BUILD_DIR, "/lib/torch"};

class NewPluginTest : public testing::Test {
 protected:
  std::map<std::string, std::string> files_of(const std::string& name) const {
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::directory_iterator(folder_ / name))
      files[entry.path().filename().string()] = read_text(entry.path());
    return files;
  }
  TempFolder folder_;
};

TEST(NewPluginNames, FollowTheName) {
  EXPECT_EQ(class_name("my_c_gate2"), "MyCGate2");
  EXPECT_EQ(id_name("my_c_gate2"), "my-c-gate2");
  EXPECT_EQ(display_name("my_c_gate2"), "My c gate2");
  EXPECT_EQ(class_name("gla"), "Gla");
  EXPECT_EQ(class_name("a__b_"), "AB");
}

struct Kind {
  const char* kind;
  const char* source;
  const char* old_name;
  const char* flag;
};

class NewPluginOfKind : public NewPluginTest, public testing::WithParamInterface<Kind> {};

TEST_P(NewPluginOfKind, HasNothingOfTheTemplatesNames) {
  const Kind& kind = GetParam();
  const std::string told =
      new_plugin({kind.kind, "deep_gate", folder_ / "new", "com.acme"}, build_tree);
  const auto files = files_of("new");
  std::vector<std::string> names;
  for (const auto& [name, text] : files) {
    names.push_back(name);
    for (const std::string& old :
         {std::string(kind.old_name), class_name(kind.old_name), id_name(kind.old_name),
          display_name(kind.old_name), std::string("org.example")}) {
      EXPECT_THAT(text, Not(HasSubstr(old))) << name;
    }
  }
  EXPECT_THAT(names, ElementsAre("CMakeLists.txt", "README.md", kind.source));
  const std::string& source = files.at(kind.source);
  EXPECT_THAT(source, AllOf(HasSubstr("\"com.acme.deep-gate\""), HasSubstr("\"deep_gate\""),
                            HasSubstr("\"Deep gate\"")));
  EXPECT_THAT(files.at("CMakeLists.txt"),
              AllOf(HasSubstr("ID com.acme.deep-gate"), HasSubstr("ALIASES deep_gate"),
                    HasSubstr(std::string("SOURCES ") + kind.source)));
  EXPECT_THAT(told, AllOf(HasSubstr("CMakeLists.txt README.md " + std::string(kind.source)),
                          HasSubstr("cmake -S " + (folder_ / "new").string()),
                          HasSubstr("-DCMAKE_PREFIX_PATH=" GRAFT_BUILD_DIR),
                          HasSubstr("hostapp plugins validate "),
                          HasSubstr("new/build/plugins/deep_gate.so\n"), HasSubstr(kind.flag)));
}

INSTANTIATE_TEST_SUITE_P(
    All, NewPluginOfKind,
    testing::Values(Kind{"mixer", "deep_gate.cpp", "my_mixer", "--mixer deep_gate --init "},
                    Kind{"mixer-c", "deep_gate.c", "my_c_mixer", "--mixer deep_gate --init "},
                    Kind{"initializer", "deep_gate.cpp", "my_initializer", "--init deep_gate "},
                    Kind{"objective", "deep_gate.cpp", "my_objective", "--objective deep_gate "}),
    [](const auto& instance) {
      std::string name = instance.param.kind;
      std::replace(name.begin(), name.end(), '-', '_');
      return name;
    });

TEST_F(NewPluginTest, OnlyWhatLinksLibTorchIsToldWhereItIs) {
  EXPECT_THAT(new_plugin({"mixer", "a", folder_ / "a"}, build_tree),
              HasSubstr("-DLibTorch_ROOT=/lib/torch"));
  EXPECT_THAT(new_plugin({"mixer-c", "b", folder_ / "b"}, build_tree),
              Not(HasSubstr("LibTorch_ROOT")));
}

TEST_F(NewPluginTest, AnEmptyFolderIsFilledAndPathsAreQuotedForTheShell) {
  fs::create_directory(folder_ / "it's new");
  const std::string told = new_plugin({"objective", "mse", folder_ / "it's new"}, build_tree);
  EXPECT_THAT(told, HasSubstr("it'\\''s new/build/plugins/mse.so'\n"));
  EXPECT_EQ(files_of("it's new").size(), 3u);
}

TEST_F(NewPluginTest, MistakesAreNamedAndNothingIsWritten) {
  const auto refused = [&](const std::string& kind, const std::string& name,
                           const std::string& prefix, const std::string& message) {
    EXPECT_GRAFT_ERROR(new_plugin({kind, name, folder_ / "new", prefix}, build_tree),
                       ErrorKind::usage, message);
  };
  refused("mixr", "a", "org.example", "there is no kind 'mixr' (did you mean 'mixer'?)");
  refused("mixer_c", "a", "org.example", "there is no kind 'mixer_c' (did you mean 'mixer-c'?)");
  refused("kernel", "a", "org.example",
          "there is no kind 'kernel'; known: mixer, mixer-c, initializer, objective");
  for (const char* name : {"", "2gate", "My_gate", "gate-two", "../gate", "gate.so"}) {
    refused("mixer", name, "org.example",
            "NAME '" + std::string(name) +
                "': expected a small letter, then small letters, digits and underscores, as in "
                "my_mixer");
  }
  refused("mixer", "test", "org.example", "NAME 'test': CMake keeps this name for itself");
  for (const char* prefix : {"", "org", "org.", "Org.Example", "org..example"}) {
    refused("mixer", "gate", prefix,
            "--id-prefix '" + std::string(prefix) +
                "': expected a domain of yours from its end, in small letters, as in org.example");
  }
  EXPECT_THAT(folder_.entries(), IsEmpty());
}

TEST_F(NewPluginTest, AFolderInUseIsLeftAlone) {
  write_file_atomically(folder_ / "file", "mine");
  EXPECT_GRAFT_ERROR(new_plugin({"mixer", "gate", folder_.path()}, build_tree), ErrorKind::usage,
                     MatchesRegex("'.*' is not empty; name a folder that is, or is not there yet"));
  EXPECT_GRAFT_ERROR(new_plugin({"mixer", "gate", folder_ / "file"}, build_tree), ErrorKind::usage,
                     MatchesRegex("'.*file' is no folder; name another place"));
  EXPECT_THAT(folder_.entries(), ElementsAre("file"));
}

TEST_F(NewPluginTest, WithoutTheSdkItSaysWhereTheTemplatesComeFrom) {
  EXPECT_GRAFT_ERROR(new_plugin({"mixer", "gate", folder_ / "new"}, {folder_.path(), ""}),
                     ErrorKind::usage,
                     AllOf(HasSubstr("there is no '"), HasSubstr("share/graft/templates/mixer_cpp"),
                           HasSubstr("--component sdk")));
}

}  // namespace
}  // namespace graft
