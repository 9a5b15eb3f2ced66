#include "core/loader/registry.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <regex>

#include "core/base/file.h"
#include "core/base/hash.h"
#include "core/base/testing.h"
#include "core/loader/open_library.h"
#include "core/loader/trial.h"
#include "tests/abi/support.h"

namespace graft {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using testing::cpu_exec;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using testing::fixture;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::plan_for;
using testing::sized;
using testing::small_layer;

// Loads one file by its full path, as --plugin-path FILE does.
void load(const fs::path& file) {
  HostServices host;
  PluginRegistry({file}, host).scan();
}

void create(const fs::path& file, const std::string& alias) {
  HostServices host;
  PluginRegistry({file}, host).create_mixer(alias, small_layer());
}

std::string refusal_of(const std::string& name) {
  try {
    load(fixture(name));
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::plugin);
    EXPECT_THAT(error.what(), HasSubstr("'" + fixture(name).string() + "'"));
    return error.what();
  }
  ADD_FAILURE() << name << " was loaded";
  return "";
}

// ---------------------------------------------------------------- files that are no plugins

TEST(BadFile, ThatDoesNotExist) {
  EXPECT_GRAFT_ERROR(open_library("/nowhere/at/all.so"), ErrorKind::plugin,
                     "plugin '/nowhere/at/all.so' does not exist");
}

TEST(BadFile, TextRenamed) {
  const TempFolder folder;
  write_file_atomically(folder / "notes.so", std::string_view("#!/bin/sh\necho I am no library\n"));
  EXPECT_GRAFT_ERROR(
      load(folder / "notes.so"), ErrorKind::plugin,
      "plugin '" + (folder / "notes.so").string() + "' is not a shared library (no ELF header)");
}

TEST(BadFile, EmptyOrShort) {
  const TempFolder folder;
  write_file_atomically(folder / "empty.so", std::string_view(""));
  EXPECT_GRAFT_ERROR(load(folder / "empty.so"), ErrorKind::plugin, HasSubstr("no ELF header"));
  write_file_atomically(folder / "short.so", std::string_view("\x7f"
                                                              "ELF\2\1\1"));
  EXPECT_GRAFT_ERROR(load(folder / "short.so"), ErrorKind::plugin,
                     EndsWith("short.so' is cut off: it is shorter than its ELF header says"));
}

// The dynamic linker maps what the headers say and ends the process with SIGBUS.
TEST(BadFile, CutAnywhere) {
  const TempFolder folder;
  const std::string whole = read_text(fixture("good"));
  for (std::size_t tenth = 0; tenth < 10; ++tenth) {
    const fs::path file = folder / ("cut" + std::to_string(tenth) + ".so");
    write_file_atomically(file, std::string_view(whole).substr(0, tenth * whole.size() / 10));
    HostServices host;
    PluginRegistry registry({folder.path()}, host);
    EXPECT_NO_THROW(registry.scan()) << tenth;
  }
  write_file_atomically(folder / "half.so", std::string_view(whole).substr(0, whole.size() / 2));
  EXPECT_GRAFT_ERROR(load(folder / "half.so"), ErrorKind::plugin, HasSubstr("half.so' is cut off"));
}

TEST(BadFile, OfAnotherMachineOrKind) {
  const TempFolder folder;
  const std::string whole = read_text(fixture("good"));
  const auto message = [&](std::size_t offset, char value) -> std::string {
    std::string bent = whole;
    bent[offset] = value;
    write_file_atomically(folder / "bent.so", std::string_view(bent));
    try {
      load(folder / "bent.so");
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(message(4, 1), EndsWith("bent.so' is for another kind of processor"));  // 32 bits
  EXPECT_THAT(message(5, 2),
              EndsWith("bent.so' is for another kind of processor"));  // other byte order
  EXPECT_THAT(message(18, 8), EndsWith("bent.so' is for another kind of processor"));       // MIPS
  EXPECT_THAT(message(16, 1), EndsWith("bent.so' is an ELF file, but no shared library"));  // .o
  EXPECT_THAT(message(54, 7), EndsWith("bent.so' has a damaged ELF header"));
  EXPECT_THAT(message(56, '\xff'), EndsWith("is cut off: it is shorter than its ELF header says"));
}

TEST(BadFile, Folder) {
  const TempFolder folder;
  fs::create_directory(folder / "plugin.so");
  EXPECT_GRAFT_ERROR(open_library(folder / "plugin.so"), ErrorKind::plugin,
                     EndsWith("plugin.so' is a folder, not a plugin file"));
}

TEST(BadFile, LibraryWithoutEntry) {
  EXPECT_THAT(
      refusal_of("no_entry"),
      EndsWith(
          "is a shared library, but not a graft plugin: it has no symbol graft_plugin_negotiate"));
}

TEST(BadFile, UndefinedSymbol) {
  EXPECT_THAT(refusal_of("undefined_symbol"),
              AllOf(HasSubstr("cannot be loaded: "),
                    HasSubstr("undefined symbol: graft_fixture_nobody_defines_this")));
}

TEST(BadFile, ThisVeryProgram) {
  // Boost.DLL opens the running program when asked for it by name.
  EXPECT_GRAFT_ERROR(load(fs::read_symlink("/proc/self/exe")), ErrorKind::plugin,
                     HasSubstr("it has no symbol graft_plugin_negotiate"));
}

TEST(GoodFile, PathWithSpacesAndUnicode) {
  const TempFolder folder;
  const fs::path file = folder / "größe und 大きさ.so";
  fs::copy_file(fixture("good"), file);
  HostServices host;
  PluginRegistry registry({file}, host);
  EXPECT_EQ(registry.create_mixer("fixture", small_layer())->param_specs().size(), 1u);
}

TEST(GoodFile, RelativePath) {
  const fs::path before = fs::current_path();
  fs::current_path(fixture("good").parent_path());
  HostServices host;
  PluginRegistry registry({"good.so"}, host);
  EXPECT_EQ(registry.find(ComponentKind::mixer, "fixture").id, "org.example.fixture.mixer");
  fs::current_path(before);
}

// ---------------------------------------------------------------- plugins that negotiate badly

TEST(BadPlugin, NextAbi) {
  EXPECT_THAT(refusal_of("abi_next"),
              HasSubstr("abi_next.so', negotiation: this plugin speaks graft ABI 2.0 only"));
}

TEST(BadPlugin, AbiOutsideTheOffer) {
  EXPECT_THAT(
      refusal_of("abi_outside"),
      HasSubstr(
          "speaks graft ABI 1.1, but this graft speaks 1.0: get the plugin for this version"));
}

TEST(BadPlugin, NegotiationFails) {
  EXPECT_THAT(refusal_of("negotiate_fails"), EndsWith("negotiation: needs a newer C library"));
  EXPECT_THAT(refusal_of("negotiate_is_silent"),
              EndsWith("negotiation: failed with GRAFT_INTERNAL and no message"));
}

TEST(BadPlugin, NullPlugin) {
  EXPECT_THAT(refusal_of("null_plugin"),
              EndsWith("negotiation succeeded, but gave no plugin (NULL)"));
}

TEST(BadPlugin, NoId) { EXPECT_THAT(refusal_of("no_id"), EndsWith("it has no id")); }

TEST(BadPlugin, MissingLibraryFunctions) {
  EXPECT_THAT(refusal_of("no_get_extension"), EndsWith("its table has no function get_extension"));
  EXPECT_THAT(refusal_of("no_create"), EndsWith("its mixer factory has no function create"));
  EXPECT_THAT(refusal_of("no_descs"),
              EndsWith("its mixer factory has 1 components, but their list is NULL"));
}

TEST(BadPlugin, InitFails) {
  EXPECT_THAT(refusal_of("init_fails"), EndsWith(", init: init: no licence key on this machine"));
}

TEST(BadPlugin, WrongBuildTags) {
  EXPECT_THAT(refusal_of("wrong_build_tags"),
              ::testing::ContainsRegex("was built with libtorch=1\\.0\\.0, but this graft has "
                                       "libtorch=[0-9.]+: rebuild it against the same"));
}

TEST(BadPlugin, MissingMixerFunctions) {
  EXPECT_GRAFT_ERROR(create(fixture("no_forward"), "fixture"), ErrorKind::plugin,
                     "mixer 'fixture': its table has no function forward");
  EXPECT_GRAFT_ERROR(create(fixture("no_destroy"), "fixture"), ErrorKind::plugin,
                     "mixer 'fixture': its table has no function destroy");
}

TEST(BadPlugin, CapabilityWithoutFunction) {
  EXPECT_GRAFT_ERROR(create(fixture("cap_without_step"), "fixture"), ErrorKind::plugin,
                     "mixer 'fixture' promises GRAFT_CAP_STEP, but its table has no function step");
  EXPECT_GRAFT_ERROR(
      create(fixture("cap_without_backward"), "fixture"), ErrorKind::plugin,
      "mixer 'fixture' promises GRAFT_CAP_BACKWARD, but its table has no function backward");
}

TEST(BadPlugin, FunctionWithoutCapabilityIsNotUsed) {
  HostServices host;
  PluginRegistry registry({fixture("step_without_cap")}, host);
  const auto mixer = registry.create_mixer("fixture", small_layer());
  EXPECT_FALSE(mixer->has_step());
  const auto call = sized<graft_mixer_forward>();
  EXPECT_GRAFT_ERROR(mixer->step(cpu_exec(), call), ErrorKind::plugin,
                     "mixer 'fixture', step: this mixer has no step (GRAFT_CAP_STEP)");
}

// ---------------------------------------------------------------- a later host

// What a host of ABI 1.1 will offer.
const AbiRange kLaterHost{GRAFT_ABI(1, 0), GRAFT_ABI(1, 1)};

HostServices::Settings speaking(const AbiRange& abi) {
  HostServices::Settings settings;
  settings.abi = abi;
  return settings;
}

TEST(LaterHost, UsesPluginsOfTheFirstVersion) {
  for (const char* name : {"good", "test_kit", "test_identity", "test_leaky"}) {
    HostServices host(speaking(kLaterHost));
    PluginRegistry registry({fixture(name)}, host);
    registry.scan();
    ASSERT_EQ(registry.libraries().size(), 1u) << name;
    EXPECT_EQ(registry.libraries()[0]->abi(), GRAFT_ABI(1, 0)) << name;
  }
}

TEST(LaterHost, AndThoseOfItsOwn) {
  HostServices host(speaking(kLaterHost));
  PluginRegistry registry({fixture("abi_outside")}, host);
  registry.scan();
  ASSERT_EQ(registry.libraries().size(), 1u);
  EXPECT_EQ(registry.libraries()[0]->abi(), GRAFT_ABI(1, 1));
}

TEST(LaterHost, OfTheNextMajorIsRefusedByThePlugin) {
  HostServices host(speaking({GRAFT_ABI(2, 0), GRAFT_ABI(2, 3)}));
  EXPECT_GRAFT_ERROR(PluginRegistry({fixture("test_leaky")}, host).scan(), ErrorKind::plugin,
                     HasSubstr("is for graft ABI 1.0 ("));
  const TempFolder folder;  // without the sidecar the plugin says it itself
  for (const auto& [name, message] :
       {std::pair{"test_leaky",
                  "negotiation: abi: this plugin speaks graft ABI 1.0; the host offers 2.0 to 2.3"},
        std::pair{"test_identity",
                  "this plugin speaks graft ABI 1.0, which the host does not offer"}}) {
    const fs::path file = folder / (std::string(name) + ".so");
    fs::copy_file(fixture(name), file);
    EXPECT_GRAFT_ERROR(PluginRegistry({file}, host).scan(), ErrorKind::plugin, HasSubstr(message));
  }
}

// ---------------------------------------------------------------- exceptions that leave a plugin

struct Escape {
  std::string thrown, text;
};
class EscapedException : public ::testing::TestWithParam<Escape> {};

TEST_P(EscapedException, BecomesAnErrorWhereverItComesFrom) {
  HostServices host;
  PluginRegistry registry({fixture("throwing")}, host);
  const auto make = [&](const std::string& where) {
    return registry.create_mixer("throwing", small_layer(),
                                 {{"thrown", GetParam().thrown}, {"where", where}});
  };
  const auto message = [&](const std::string& call) {
    return "mixer 'throwing', " + call +
           ": the plugin let an exception out, which it must not: " + GetParam().text;
  };
  EXPECT_GRAFT_ERROR(make("create"), ErrorKind::plugin, message("create"));
  EXPECT_GRAFT_ERROR(make("param_specs"), ErrorKind::plugin, message("param_specs"));
  EXPECT_GRAFT_ERROR(make("plan")->plan(plan_for(1, 1)), ErrorKind::plugin, message("plan"));
  const auto mixer = make("forward");
  const auto call = sized<graft_mixer_forward>();
  EXPECT_GRAFT_ERROR(mixer->forward(cpu_exec(), call), ErrorKind::plugin, message("forward"));
  // The instance and the process are none the worse for it.
  EXPECT_NO_THROW(mixer->plan(plan_for(1, 1)));
}

INSTANTIATE_TEST_SUITE_P(All, EscapedException,
                         ::testing::Values(Escape{"exception", "the author forgot this"},
                                           Escape{"bad_alloc", "std::bad_alloc"},
                                           Escape{"int", "of a type that is no std::exception"}),
                         [](const auto& info) { return info.param.thrown; });

// ---------------------------------------------------------------- structs of other sizes

class OtherSizes : public ::testing::TestWithParam<const char*> {};

TEST_P(OtherSizes, Work) {
  HostServices host;
  PluginRegistry registry({fixture(GetParam())}, host);
  const Component& component = registry.find(ComponentKind::mixer, "fixture");
  EXPECT_EQ(component.version, "1.0.0");
  EXPECT_THAT(component.schema.options(), IsEmpty());
  const auto mixer = registry.create_mixer("fixture", small_layer());
  ASSERT_EQ(mixer->param_specs().size(), 1u);
  const graft_param_spec& spec = *mixer->param_specs()[0];
  EXPECT_EQ(spec.struct_size, sizeof(graft_param_spec));
  EXPECT_STREQ(spec.name, "weight");
  EXPECT_EQ(spec.init, GRAFT_INIT_ONES);
  EXPECT_EQ(spec.init_b, 0);
  EXPECT_EQ(mixer->plan(plan_for(1, 1)).workspace_forward, 64u);
  EXPECT_NO_THROW(mixer->forward(cpu_exec(), sized<graft_mixer_forward>()));
  // Not there in the one, random bytes in the other.
  std::vector<DLTensor*> params(1);
  EXPECT_FALSE(mixer->set_natural(GRAFT_NATURAL_HALF_LIFE, {}, params, {}));
}

INSTANTIATE_TEST_SUITE_P(All, OtherSizes, ::testing::Values("good", "shrunk", "grown"),
                         [](const auto& info) { return std::string(info.param); });

// ---------------------------------------------------------------- lifetime

// init, deinit, create, destroy of a fixture so far, through an own look at the same file.
std::vector<int> counts_of(const fs::path& file) {
  void* const handle = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  const auto negotiate =
      reinterpret_cast<graft_plugin_negotiate_fn>(::dlsym(handle, GRAFT_ENTRY_SYMBOL));
  const auto in = sized<graft_negotiate_in>();
  auto out = sized<graft_negotiate_out>();
  auto error = sized<graft_error>();
  EXPECT_EQ(negotiate(&in, &out, &error), GRAFT_OK);
  const auto* const counts =
      static_cast<const int*>(out.plugin->get_extension("org.example.counts"));
  std::vector<int> copy(counts, counts + 4);
  ::dlclose(handle);
  return copy;
}

TEST(Lifetime, InitAndDeinitAreCountedAndTheLibraryStays) {
  const TempFolder folder;
  const fs::path file = folder / "counted.so";
  fs::copy_file(fixture("good"), file);
  std::unique_ptr<Mixer> outlives;
  HostServices host;
  for (int round = 1; round <= 3; ++round) {
    {
      PluginRegistry registry({file}, host);
      registry.create_mixer("fixture", small_layer());
      EXPECT_THAT(counts_of(file), ElementsAre(round, round - 1, round, round));
    }
    EXPECT_THAT(counts_of(file), ElementsAre(round, round, round, round));
  }
  // Static data lives on, or the counts would have begun again.
  {
    PluginRegistry first({file}, host), second({file}, host);
    first.scan();
    outlives = second.create_mixer("fixture", small_layer());
    EXPECT_THAT(counts_of(file), ElementsAre(5, 3, 4, 3));
  }
  // An instance keeps its library from being told to end.
  EXPECT_THAT(counts_of(file), ElementsAre(5, 4, 4, 3));
  outlives.reset();
  EXPECT_THAT(counts_of(file), ElementsAre(5, 5, 4, 4));
}

TEST(Lifetime, RefusedAfterInitMeansDeinit) {
  const TempFolder folder;
  const fs::path file = folder / "twice.so";
  fs::copy_file(fixture("good"), file);
  fs::copy_file(fixture("good"), folder / "again.so");
  HostServices host;
  PluginRegistry registry({folder.path()}, host);
  registry.scan();
  ASSERT_EQ(registry.refused().size(), 1u);
  EXPECT_THAT(counts_of(file), ElementsAre(1, 1, 0, 0));
}

// ---------------------------------------------------------------- trials in a child process

TEST(Trial, ACrashIsAResult) {
  const TempFolder folder;
  fs::copy_file(fixture("crashes"), folder / "crashes.so");
  fs::copy_file(fixture("exits"), folder / "exits.so");
  fs::copy_file(fixture("good"), folder / "good.so");
  write_file_atomically(folder / "text.so", std::string_view("text"));
  HostServices host;
  PluginRegistry registry({folder.path()}, host);
  registry.scan(/*tried_first=*/true);
  ASSERT_EQ(registry.refused().size(), 3u);
  EXPECT_THAT(registry.refused()[0].cause,
              ::testing::ContainsRegex(
                  "crashes.so' crashes when it is opened \\(signal [0-9]+, [A-Za-z/ ]+\\)$"));
  EXPECT_THAT(registry.refused()[1].cause,
              EndsWith("exits.so' ends the process when it is opened (exit code 7)"));
  EXPECT_THAT(registry.refused()[2].cause, HasSubstr("no ELF header"));
  EXPECT_EQ(registry.libraries().size(), 1u);
}

TEST(Trial, IsMadeOfEveryFileWithoutASidecarAndOfAllThatAreListed) {
  const TempFolder folder;
  fs::copy_file(fixture("crashes"), folder / "crashes.so");
  fs::copy_file(fixture("good"), folder / "good.so");
  const auto crash_is_refused = [&](const std::function<void(PluginRegistry&)>& ask) {
    HostServices host;
    PluginRegistry registry({folder.path()}, host);
    ask(registry);
    ASSERT_EQ(registry.refused().size(), 1u);
    EXPECT_THAT(registry.refused()[0].cause, HasSubstr("crashes.so' crashes when it is opened"));
  };
  const auto find = [](PluginRegistry& r) { r.find(ComponentKind::mixer, "fixture"); };
  const auto list = [](PluginRegistry& r) { r.components(ComponentKind::mixer); };
  crash_is_refused(find);
  crash_is_refused(list);
  crash_is_refused([](PluginRegistry& r) { r.scan(); });

  write_file_atomically(folder / "crashes.graftplugin.toml",
                        std::string_view("id = \"org.example.crash\"\naliases = [\"other\"]\n"));
  crash_is_refused(list);
  crash_is_refused([](PluginRegistry& r) {
    EXPECT_GRAFT_ERROR(r.find(ComponentKind::mixer, "unknown"), ErrorKind::usage,
                       HasSubstr("crashes.so' crashes when it is opened"));
  });
  // Known to hold something else, it is not opened.
  HostServices host;
  PluginRegistry registry({folder.path()}, host);
  find(registry);
  EXPECT_THAT(registry.refused(), IsEmpty());
  // Named, it has to open.
  PluginRegistry named({fixture("crashes")}, host);
  EXPECT_GRAFT_ERROR(named.find(ComponentKind::mixer, "fixture"), ErrorKind::plugin,
                     HasSubstr("crashes.so' crashes when it is opened (signal "));
}

TEST(Trial, EndsOneThatHangs) {
  EXPECT_EQ(trial_in_child(fixture("hangs"), std::chrono::milliseconds(1000)),
            "does not come back from being opened within 1 seconds");
  EXPECT_EQ(trial_in_child(fixture("good")), "");
}

// ---------------------------------------------------------------- sidecars

class SidecarFile : public ::testing::Test {
 protected:
  SidecarFile() { fs::copy_file(fixture("good"), plugin()); }
  fs::path plugin() const { return folder_ / "good.so"; }
  void write(const std::string& toml) const {
    write_file_atomically(folder_ / "good.graftplugin.toml", std::string_view(toml));
  }
  // What a search of the folder says against the plugin; "" when it is used.
  std::string refusal(HostServices::Settings settings = {}) const {
    HostServices host(std::move(settings));
    PluginRegistry registry({folder_.path()}, host);
    registry.scan();
    return registry.refused().empty() ? "" : registry.refused()[0].cause;
  }
  TempFolder folder_;
};

TEST_F(SidecarFile, MayBeMissing) { EXPECT_EQ(refusal(), ""); }

TEST_F(SidecarFile, MayBeEmptyOrHoldKeysOfTheFuture) {
  write("");
  EXPECT_EQ(refusal(), "");
  write("colour = \"green\"\n[nested]\nthing = 1\n");
  EXPECT_EQ(refusal(), "");
}

TEST_F(SidecarFile, ThatAgrees) {
  write(
      "id = \"org.example.fixture\"\naliases = [\"fixture\"]\nlicense = \"Apache-2.0\"\nabi_min = "
      "\"1.0\"\n"
      "abi_max = \"1.0\"\nbuild_tags = \"\"\nsha256 = \"" +
      sha256_hex_of_file(plugin()) + "\"\n");
  EXPECT_EQ(refusal(), "");
}

TEST_F(SidecarFile, ThatDisagrees) {
  const std::string sidecar = (folder_ / "good.graftplugin.toml").string();
  const auto disagreement = [&](const std::string& rest) {
    return "plugin '" + plugin().string() + "' disagrees with '" + sidecar + "': " + rest;
  };
  write("id = \"org.example.other\"");
  EXPECT_EQ(refusal(),
            disagreement("id is 'org.example.fixture', the sidecar says 'org.example.other'"));
  write("license = \"MIT\"");
  EXPECT_EQ(refusal(), disagreement("license is 'Apache-2.0', the sidecar says 'MIT'"));
  write("aliases = [\"fixture\", \"more\"]");
  EXPECT_EQ(refusal(),
            disagreement("the list of aliases is 'fixture', the sidecar says 'fixture, more'"));
}

TEST_F(SidecarFile, OfAnotherAbiIsRefusedUnopened) {
  const int before = counts_of(plugin())[0];
  write("abi_min = \"1.2\"\nabi_max = \"1.4\"");
  EXPECT_THAT(refusal(),
              AllOf(HasSubstr("is for graft ABI 1.2 to 1.4 ("),
                    HasSubstr("but this graft speaks 1.0: get the plugin for this version")));
  write("abi_max = \"0.1\"");
  EXPECT_THAT(refusal(), HasSubstr("is for graft ABI 0.1 and earlier"));
  write("abi_min = \"2.0\"");
  EXPECT_THAT(refusal(), HasSubstr("is for graft ABI 2.0 and later"));
  EXPECT_EQ(counts_of(plugin())[0], before);
}

TEST_F(SidecarFile, OfAnEarlierOrOverlappingAbiIsUsed) {
  write("abi_min = \"1.0\"\nabi_max = \"1.0\"");
  EXPECT_EQ(refusal(speaking(kLaterHost)), "");
  write("abi_min = \"1.1\"\nabi_max = \"1.7\"");
  EXPECT_EQ(refusal(speaking(kLaterHost)), "");
  write("abi_min = \"1.2\"");
  EXPECT_THAT(refusal(speaking(kLaterHost)), AllOf(HasSubstr("is for graft ABI 1.2 and later"),
                                                   HasSubstr("graft speaks 1.0 to 1.1:")));
}

TEST_F(SidecarFile, WithOtherBuildTagsIsRefusedUnopened) {
  const int before = counts_of(plugin())[0];
  write("build_tags = \"compiler=clang-99;libtorch=2.1.0\"");
  EXPECT_THAT(refusal(), HasSubstr("was built with libtorch=2.1.0, but this graft has libtorch="));
  EXPECT_EQ(counts_of(plugin())[0], before);
}

TEST_F(SidecarFile, OfAnotherFile) {
  write("sha256 = \"" + std::string(64, '0') + "\"");
  EXPECT_THAT(refusal(), HasSubstr("describes (its SHA-256 differs): install the two together"));
}

TEST_F(SidecarFile, ThatIsNoGoodToml) {
  write("id = \"a\"\nid = \"b\"\n");
  EXPECT_THAT(refusal(), AllOf(HasSubstr("good.so' is not used: "),
                               HasSubstr("good.graftplugin.toml', line 2")));
  write("\nid = 3\n");
  EXPECT_THAT(refusal(), HasSubstr("line 2, column 6: 'id' is not a string"));
  write("aliases = \"fixture\"");
  EXPECT_THAT(refusal(), HasSubstr("'aliases' is not a list"));
  write("aliases = [1]");
  EXPECT_THAT(refusal(), HasSubstr("'aliases' holds more than strings"));
  for (const char* abi : {"1", "1.", ".1", "1.0.2", "a.b", "1.70000", "1.0 "}) {
    write("abi_min = \"" + std::string(abi) + "\"");
    EXPECT_THAT(refusal(), HasSubstr("an ABI is written like \"1.0\"")) << abi;
  }
}

TEST_F(SidecarFile, WithoutItsLibrary) {
  write("");
  fs::remove(plugin());
  EXPECT_THAT(refusal(), HasSubstr("there is no 'good.so' beside it"));
}

TEST(AddedPlugin, HasASidecarThatAgreesAndOneSymbol) {
  for (const char* name : {"test_kit", "test_identity", "test_leaky"}) {
    HostServices host;
    ASSERT_TRUE(fs::exists(sidecar_path(fixture(name)))) << name;
    const Sidecar sidecar = read_sidecar(sidecar_path(fixture(name)));
    EXPECT_EQ(sidecar.sha256, sha256_hex_of_file(fixture(name)));
    EXPECT_EQ(sidecar.abi_min, GRAFT_ABI_CURRENT);
    EXPECT_TRUE(sidecar.license && sidecar.id && sidecar.aliases);
    EXPECT_NO_THROW(load(fixture(name))) << name;

    FILE* const nm =
        ::popen(("nm -D --defined-only '" + fixture(name).string() + "'").c_str(), "r");
    ASSERT_NE(nm, nullptr);
    std::string lines;
    for (int c = std::fgetc(nm); c != EOF; c = std::fgetc(nm)) lines += static_cast<char>(c);
    EXPECT_EQ(::pclose(nm), 0);
    EXPECT_TRUE(std::regex_match(lines, std::regex("[0-9a-f]+ T graft_plugin_negotiate\n")))
        << lines;
  }
}

// ---------------------------------------------------------------- search

TEST(Search, FindsByAliasAndById) {
  HostServices host;
  PluginRegistry registry({fixture("good")}, host);
  const Component& by_alias = registry.find(ComponentKind::mixer, "fixture");
  EXPECT_EQ(&by_alias, &registry.find(ComponentKind::mixer, "org.example.fixture.mixer"));
  EXPECT_EQ(by_alias.label(), "mixer 'fixture'");
  EXPECT_EQ(by_alias.library->id(), "org.example.fixture");
}

TEST(Search, NotFoundNamesTheNearestThePlacesAndTheRefused) {
  const TempFolder folder, empty;
  fs::copy_file(fixture("good"), folder / "good.so");
  fs::copy_file(fixture("test_identity"), folder / "identity.so");
  write_file_atomically(folder / "broken.so", std::string_view("text"));
  HostServices host;
  PluginRegistry registry({folder.path(), empty.path(), "/nowhere"}, host);
  EXPECT_GRAFT_ERROR(registry.find(ComponentKind::mixer, "identiy"), ErrorKind::usage,
                     "there is no mixer 'identiy' (did you mean 'identity'?)\n"
                     "  known: fixture, identity\n"
                     "  looked in:\n"
                     "    '" +
                         folder.path().string() +
                         "': 3 plugins\n"
                         "    '" +
                         empty.path().string() +
                         "': no plugin\n"
                         "    '/nowhere': does not exist\n"
                         "  refused:\n"
                         "    plugin '" +
                         (folder / "broken.so").string() +
                         "' is not a shared library (no ELF header)");
  EXPECT_GRAFT_ERROR(registry.find(ComponentKind::objective, "fixture"), ErrorKind::usage,
                     AllOf(HasSubstr("there is no objective 'fixture'\n  known: none\n")));
}

TEST(Search, BrokenFileInAFolderDoesNotStopTheOthers) {
  const TempFolder folder;
  fs::copy_file(fixture("good"), folder / "good.so");
  fs::copy_file(fixture("undefined_symbol"), folder / "bad.so");
  HostServices host;
  PluginRegistry registry({folder.path()}, host);
  EXPECT_NO_THROW(registry.create_mixer("fixture", small_layer()));
  ASSERT_EQ(registry.refused().size(), 1u);
  EXPECT_EQ(registry.refused()[0].file, folder / "bad.so");
  EXPECT_THAT(registry.refused()[0].cause, HasSubstr("undefined symbol"));
}

TEST(Search, ASidecarsAliasesKeepOtherPluginsClosed) {
  const TempFolder folder;
  fs::copy_file(fixture("good"), folder / "good.so");
  fs::copy_file(fixture("test_identity"), folder / "test_identity.so");
  fs::copy_file(sidecar_path(fixture("test_identity")), folder / "test_identity.graftplugin.toml");
  HostServices host;
  PluginRegistry registry({folder.path()}, host);
  registry.find(ComponentKind::mixer, "fixture");
  EXPECT_EQ(registry.libraries().size(), 1u);
  // An id is in no sidecar.
  registry.find(ComponentKind::mixer, "org.example.identity");
  EXPECT_EQ(registry.libraries().size(), 2u);
  EXPECT_EQ(registry.components(ComponentKind::mixer).size(), 2u);
}

TEST(Search, OneAliasInTwoPlugins) {
  HostServices host;
  PluginRegistry registry({fixture("twin_a"), fixture("twin_b")}, host);
  EXPECT_GRAFT_ERROR(registry.find(ComponentKind::mixer, "twin"), ErrorKind::usage,
                     "mixer 'twin' is ambiguous: '" + fixture("twin_a").string() + "' and '" +
                         fixture("twin_b").string() +
                         "' both have one; ask for 'org.example.a.mixer' or 'org.example.b.mixer'");
  EXPECT_EQ(registry.create_mixer("org.example.b.mixer", small_layer())->component().id,
            "org.example.b.mixer");
}

TEST(Search, TheEarlierOfTwoCopiesIsUsed) {
  const TempFolder first, second;
  fs::copy_file(fixture("good"), first / "good.so");
  fs::copy_file(fixture("good"), second / "good.so");
  HostServices host;
  PluginRegistry registry({second.path(), first.path()}, host);
  EXPECT_EQ(registry.find(ComponentKind::mixer, "fixture").library->file(), second / "good.so");
  ASSERT_EQ(registry.refused().size(), 1u);
  EXPECT_EQ(registry.refused()[0].cause,
            "plugin '" + (first / "good.so").string() + "' is not used: '" +
                (second / "good.so").string() +
                "' with the same id 'org.example.fixture' comes first in the search path");
}

TEST(Search, OneFileByTwoPathsIsOneFile) {
  const TempFolder folder;
  fs::copy_file(fixture("good"), folder / "good.so");
  fs::create_symlink(folder / "good.so", folder / "link.so");
  HostServices host;
  PluginRegistry registry({folder.path(), folder / "good.so", folder.path() / ""}, host);
  registry.scan();
  EXPECT_EQ(registry.libraries().size(), 1u);
  EXPECT_THAT(registry.refused(), IsEmpty());
}

TEST(Search, NothingToSearch) {
  HostServices host;
  PluginRegistry registry({}, host);
  EXPECT_THAT(registry.components(ComponentKind::mixer), IsEmpty());
  EXPECT_GRAFT_ERROR(registry.find(ComponentKind::mixer, ""), ErrorKind::usage,
                     HasSubstr("there is no mixer ''"));
}

TEST(SearchPath, GivenThenEnvironmentThenBesideTheProgram) {
  const TempFolder given;
  ::setenv("GRAFT_PLUGIN_PATH", "/one::/two words", 1);
  EXPECT_THAT(default_search_path({given.path()}, "/opt/graft/bin"),
              ElementsAre(given.path(), "/one", "/two words", "/opt/graft/lib/graft/plugins"));
  ::unsetenv("GRAFT_PLUGIN_PATH");
  EXPECT_THAT(default_search_path({}, "/opt/graft/bin"),
              ElementsAre("/opt/graft/lib/graft/plugins"));
  EXPECT_GRAFT_ERROR(default_search_path({"/nowhere/plugins"}, "/opt/graft/bin"), ErrorKind::usage,
                     "the plugin path '/nowhere/plugins' does not exist");
}

}  // namespace
}  // namespace graft
