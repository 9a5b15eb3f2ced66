// The real binary in processes of its own, on a tiny teacher: what it says and how it ends.
#include <cmath>
#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/base/file.h"
#include "core/base/testing.h"
#include "core/checkpoint/safetensors.h"
#include "core/text/testing.h"
#include "tests/integration/cli_testing.h"

namespace graft {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::MatchesRegex;
using testing::Not;
using testing::StartsWith;

const fs::path fixtures = fs::path(GRAFT_BUILD_DIR) / "tests/abi/plugins";

class HostappTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    shared_ = std::make_unique<TempFolder>();
    make_tiny_teacher(*shared_ / "teacher");
    write_file_atomically(*shared_ / "a.txt", made_up_prose(1, 6000));
    write_file_atomically(*shared_ / "b.txt", made_up_prose(2, 6000));
    write_file_atomically(*shared_ / "held_out.txt",
                          "Another text entirely. " + made_up_prose(77, 4000));
  }
  static void TearDownTestSuite() { shared_.reset(); }

  Subprocess::Settings settings() const {
    return {folder_.path(),
            {{"GRAFT_CACHE_DIR", (*shared_ / "cache").string()}, {"GRAFT_PLUGIN_PATH", ""}},
            0};
  }
  Finished run(const Words& arguments) const {
    return Subprocess(hostapp, arguments, settings()).finish();
  }

  static std::string shared(const std::string& name) { return (*shared_ / name).string(); }

  // The main job at its smallest.
  static Words job(const Words& more = {}, const std::string& eval_text = shared("held_out.txt")) {
    Words words;
    std::istringstream fixed(
        "--mixer gdn --init taylor --out out --window 32 --init.tokens 512 --calibrate.tokens 768 "
        "--calibrate.steps 5 --eval.context 64 --eval.windows 4 --agreement.prompts 3 "
        "--agreement.prompt_length 8 --agreement.tokens 5 --threads 1");
    for (std::string word; fixed >> word;) words.push_back(word);
    for (const Words& part : {Words{"--teacher", shared("teacher")},
                              {"--eval-text", eval_text},
                              {"--text", shared("a.txt"), shared("b.txt")},
                              more}) {
      words.insert(words.end(), part.begin(), part.end());
    }
    return words;
  }

  void expect_refused(const Words& arguments, ErrorKind kind,
                      const testing::Matcher<const std::string&>& message) {
    const Finished run_ = run(arguments);
    EXPECT_EQ(run_.exit_code, static_cast<int>(kind)) << run_.err;
    EXPECT_THAT(run_.err, AllOf(HasSubstr("hostapp: error: "), message));
    EXPECT_THAT(run_.err, Not(HasSubstr("unexpected")));
    EXPECT_EQ(run_.out, "");
    expect_nothing_left();
  }

  // No student and no half of one.
  void expect_nothing_left() const {
    for (const std::string& entry : folder_.entries())
      EXPECT_EQ(entry.find("out"), std::string::npos) << entry;
  }

  fs::path write(const std::string& name, const std::string& text) const {
    write_file_atomically(folder_ / name, text);
    return folder_ / name;
  }

  // A copy of the teacher that a test may spoil.
  fs::path spoilt_teacher() const {
    fs::copy(*shared_ / "teacher", folder_ / "spoilt", fs::copy_options::recursive);
    return folder_ / "spoilt";
  }

  TempFolder folder_;
  static std::unique_ptr<TempFolder> shared_;
};

std::unique_ptr<TempFolder> HostappTest::shared_;

// ---------------------------------------------------------------- help

TEST_F(HostappTest, SaysItsVersionAndAbi) {
  const Finished said = run({"--version"});
  EXPECT_EQ(said.exit_code, 0);
  EXPECT_THAT(said.out,
              AllOf(StartsWith("hostapp "), HasSubstr("plugin ABI "), HasSubstr("libtorch=")));
  EXPECT_EQ(said.err, "");
}

TEST_F(HostappTest, HelpListsKeysAndTheOptionsOfNamedPlugins) {
  const Finished plain = run({"--help"});
  EXPECT_EQ(plain.exit_code, 0);
  EXPECT_THAT(plain.out, AllOf(HasSubstr("--keep-attention"), HasSubstr("--calibrate.lr"),
                               HasSubstr("--print-config"), Not(HasSubstr("--mixer.options."))));
  const Finished named = run({"--help", "--mixer", "gdn", "--init", "taylor"});
  EXPECT_EQ(named.exit_code, 0);
  EXPECT_THAT(named.out, AllOf(HasSubstr("Options of mixer 'gdn':"),
                               HasSubstr("--mixer.options.silu_v  true or false"),
                               HasSubstr("Options of initializer 'taylor':"),
                               HasSubstr("--init.options.variant"),
                               HasSubstr("Options of objective 'layer_alignment':")));
  const Finished unknown = run({"--help", "--mixer", "gnd", "--init", "taylor"});
  EXPECT_EQ(unknown.exit_code, 0);
  EXPECT_THAT(unknown.out, HasSubstr("there is no mixer 'gnd' (did you mean 'gdn'?)"));
}

TEST_F(HostappTest, WithoutAnythingItSaysWhatIsMissingAndWhereItComesFrom) {
  expect_refused(
      {}, ErrorKind::usage,
      AllOf(
          HasSubstr("missing: --mixer NAME, --init NAME, --teacher DIR, --text FILE..., --out DIR"),
          HasSubstr("scripts/get_teacher.py"), HasSubstr("scripts/get_text.py"),
          HasSubstr("hostapp plugins list")));
  expect_refused({"--mixer", "gdn", "--init", "taylor", "--text", "x", "--out", "y"},
                 ErrorKind::usage,
                 AllOf(HasSubstr("missing: --teacher DIR\n"), HasSubstr("scripts/get_teacher.py")));
}

// ---------------------------------------------------------------- plugins

TEST_F(HostappTest, ListsPluginsAndTheRefused) {
  write("notes.so", "this is text");
  const Finished listed = run({"plugins", "list", "--plugin-path", folder_.path().string()});
  EXPECT_EQ(listed.exit_code, 0);
  EXPECT_THAT(listed.out, AllOf(HasSubstr("mixer "), HasSubstr("gdn "), HasSubstr("initializer "),
                                HasSubstr("taylor "), HasSubstr("projection_copy "),
                                HasSubstr("layer_alignment"), HasSubstr("refused: "),
                                HasSubstr("notes.so"), HasSubstr("looked in ")));
}

TEST_F(HostappTest, TellsOfOnePluginByAliasOrId) {
  const Finished by_alias = run({"plugins", "info", "gdn"});
  EXPECT_EQ(by_alias.exit_code, 0);
  EXPECT_THAT(by_alias.out, AllOf(StartsWith("mixer 'gdn'"), HasSubstr("license       Apache-2.0"),
                                  HasSubstr("silu_v"), HasSubstr("trains"), HasSubstr("float32")));
  EXPECT_EQ(run({"plugins", "info", "org.graft.gdn"}).out, by_alias.out);
  expect_refused(
      {"plugins", "info", "gdm"}, ErrorKind::usage,
      AllOf(HasSubstr("there is no plugin 'gdm' (did you mean 'gdn'?)"), HasSubstr("looked in ")));
}

TEST_F(HostappTest, AnUnknownPluginListsTheKnownAndWhereItLooked) {
  expect_refused(job({"--mixer", "hedgehg"}), ErrorKind::usage,
                 AllOf(HasSubstr("there is no mixer 'hedgehg'"), HasSubstr("known: gdn"),
                       HasSubstr("lib/graft/plugins")));
  expect_refused(job({"--init", "tayler"}), ErrorKind::usage,
                 AllOf(HasSubstr("there is no initializer 'tayler' (did you mean 'taylor'?)"),
                       HasSubstr("projection_copy")));
  expect_refused(job({"--objective", "mse"}), ErrorKind::usage,
                 HasSubstr("there is no objective 'mse'"));
}

TEST_F(HostappTest, AnInitializerWhoseRolesTheMixerLacksIsRefusedBeforeWeightsAreRead) {
  // No weights are there to be read.
  const fs::path teacher = spoilt_teacher();
  std::ofstream(teacher / "model.safetensors", std::ios::trunc) << "no weights";
  expect_refused(job({"--mixer", "fixture", "--plugin-path", (fixtures / "good.so").string(),
                      "--teacher", teacher.string(), "--objective", "layer_alignment"}),
                 ErrorKind::plugin,
                 AllOf(HasSubstr("taylor"), HasSubstr("fixture"), HasSubstr("graft.role.")));
}

struct BadPlugin {
  const char* label;
  const char* file;
  const char* message;
};

class HostappBadPlugin : public HostappTest, public testing::WithParamInterface<BadPlugin> {};

TEST_P(HostappBadPlugin, IsRefusedByFileAndCause) {
  const fs::path file = std::string(GetParam().file) == "text.so"
                            ? write("text.so", "not a plugin\n")
                            : fixtures / GetParam().file;
  expect_refused({"plugins", "list", "--plugin-path", file.string()}, ErrorKind::plugin,
                 AllOf(HasSubstr(file.string()), HasSubstr(GetParam().message)));
}

INSTANTIATE_TEST_SUITE_P(
    All, HostappBadPlugin,
    testing::Values(BadPlugin{"Text", "text.so", "ELF"},
                    BadPlugin{"NoEntry", "no_entry.so", "graft_plugin_negotiate"},
                    BadPlugin{"WrongAbi", "abi_next.so", "ABI"},
                    BadPlugin{"UndefinedSymbol", "undefined_symbol.so", "undefined symbol"}),
    [](const auto& instance) { return instance.param.label; });

TEST_F(HostappTest, APluginThatCrashesWhenOpenedIsRefusedAndTheOthersWork) {
  fs::copy_file(fixtures / "crashes.so", folder_ / "crashes.so");
  const std::string place = folder_.path().string();
  const Finished listed = run({"plugins", "list", "--plugin-path", place});
  EXPECT_EQ(listed.exit_code, 0) << listed.err;
  EXPECT_THAT(listed.out, AllOf(HasSubstr("gdn "), HasSubstr("refused: "),
                                HasSubstr("crashes.so' crashes when it is opened (signal ")));
  const Finished info = run({"plugins", "info", "gdn", "--plugin-path", place});
  EXPECT_EQ(info.exit_code, 0) << info.err;
  const Finished job_ = run(job({"--plugin-path", place, "--print-config"}));
  EXPECT_EQ(job_.exit_code, 0) << job_.err;
  expect_refused({"plugins", "list", "--plugin-path", (folder_ / "crashes.so").string()},
                 ErrorKind::plugin, HasSubstr("crashes.so' crashes when it is opened (signal "));
}

TEST_F(HostappTest, APluginPathThatIsNotThereIsNamed) {
  expect_refused({"plugins", "list", "--plugin-path", "/nonexistent/p"}, ErrorKind::usage,
                 HasSubstr("/nonexistent/p"));
}

// ---------------------------------------------------------------- configuration

TEST_F(HostappTest, FlagsAndFilesAreChecked) {
  expect_refused({"--mixr", "gdn"}, ErrorKind::usage,
                 HasSubstr("unknown flag '--mixr' (did you mean '--mixer'?)"));
  const std::string file = write("c.toml", "[calibrate]\nlearning_rte = 1e-3\n").string();
  expect_refused(
      {"--config", file}, ErrorKind::usage,
      HasSubstr(file +
                ":2:1: unknown key 'calibrate.learning_rte' (did you mean 'calibrate.lr'?)"));
  expect_refused(job({"--calibrate.steps", "1.5"}), ErrorKind::usage,
                 HasSubstr("--calibrate.steps: expected a whole number, got '1.5'"));
  expect_refused(job({"--mixer.options.silu_w", "true"}), ErrorKind::usage,
                 HasSubstr("--mixer.options.silu_w: mixer 'gdn' has no option 'silu_w'"));
  const std::string options = write("o.toml", "[init.options]\nvariant = 'papr'\n").string();
  expect_refused(job({"--config", options}), ErrorKind::usage,
                 AllOf(HasSubstr(options + ":2:1: initializer 'taylor', option 'variant'"),
                       HasSubstr("(did you mean 'paper'?)")));
  expect_refused(job({"--mixer.options.num_heads", "9000000000000000000"}), ErrorKind::usage,
                 AllOf(HasSubstr("--mixer.options.num_heads: "), HasSubstr("65536")));
  expect_refused(job({"--mixer.options.head_dim", "65537"}), ErrorKind::usage,
                 HasSubstr("--mixer.options.head_dim: "));
  expect_refused(job({"--eval.context", "257"}), ErrorKind::usage,
                 HasSubstr("eval.context: 257 tokens are more than the model's context of 256"));
  expect_refused(job({"--keep-attention", "uniform:0"}), ErrorKind::usage,
                 HasSubstr("keep_attention 'uniform:0'"));
  expect_refused(job({"--keep-attention", "none", "none"}), ErrorKind::usage,
                 HasSubstr("--keep-attention: keep_attention: 'none' is given twice"));
  expect_refused(job({"--keep-attention", "0", "0-0"}), ErrorKind::usage,
                 HasSubstr("keep_attention: '0' and '0-0' keep the same layers"));
  expect_refused(job({"--keep-attention", "0,7"}), ErrorKind::usage,
                 HasSubstr("the model has layers 0 to 1, not 7"));
  expect_refused(job({"--compare", "nave"}), ErrorKind::usage,
                 HasSubstr("there is no baseline 'nave' (did you mean 'naive'?)"));
  expect_refused(job({"--calibrate.betas", "0.9"}), ErrorKind::usage,
                 HasSubstr("--calibrate.betas: "));
  expect_refused(job({"--recipe", "none"}), ErrorKind::usage,
                 HasSubstr("calibration needs an objective"));
}

// The lines without their comments.
std::string values_of(const std::string& toml) {
  std::istringstream in(toml);
  std::string out;
  for (std::string line; std::getline(in, line);) out += line.substr(0, line.rfind("  # ")) + "\n";
  return out;
}

TEST_F(HostappTest, ThePrintedConfigurationSaysWhereEachValueCameFromAndReadsBack) {
  const std::string file = write("c.toml", "eval_text = 'e.txt'\n[calibrate]\nlr = 1\n").string();
  const Finished printed =
      run({"--mixer", "gdn", "--init", "taylor", "--config", file, "--mixer.options.silu_q",
           "false", "--seed", "7", "--print-config"});
  ASSERT_EQ(printed.exit_code, 0) << printed.err;
  EXPECT_THAT(printed.out,
              AllOf(HasSubstr("seed = 7  # --seed\n"), HasSubstr("lr = 1.0  # " + file + ":3:1\n"),
                    HasSubstr("silu_q = false  # --mixer.options.silu_q\n"),
                    HasSubstr("share/graft/recipes/gdn-taylor.toml:"),
                    HasSubstr("# default of mixer 'gdn'"), HasSubstr("[[baseline]]"),
                    HasSubstr("threads = 0  # default\n")));
  const std::string again = write("printed.toml", printed.out).string();
  const Finished reprinted = run({"--config", again, "--print-config"});
  ASSERT_EQ(reprinted.exit_code, 0) << reprinted.err;
  EXPECT_EQ(values_of(reprinted.out), values_of(printed.out));
}

// ---------------------------------------------------------------- bad teachers and texts

TEST_F(HostappTest, ABadTeacherIsNamed) {
  expect_refused(job({"--teacher", "/nonexistent/teacher"}), ErrorKind::input,
                 HasSubstr("/nonexistent/teacher"));
  fs::create_directory(folder_ / "empty");
  expect_refused(job({"--teacher", (folder_ / "empty").string()}), ErrorKind::input,
                 AllOf(HasSubstr("empty"), HasSubstr("config.json")));
}

TEST_F(HostappTest, AnUnknownArchitectureIsNamed) {
  const fs::path teacher = spoilt_teacher();
  auto config = nlohmann::json::parse(read_text(teacher / "config.json"));
  config["model_type"] = "rwkv";
  write_file_atomically(teacher / "config.json", config.dump());
  expect_refused(job({"--teacher", teacher.string()}), ErrorKind::input,
                 AllOf(HasSubstr("config.json"), HasSubstr("rwkv"), HasSubstr("llama")));
}

TEST_F(HostappTest, ATruncatedFileOfWeightsIsNamed) {
  const fs::path teacher = spoilt_teacher();
  fs::resize_file(teacher / "model.safetensors", fs::file_size(teacher / "model.safetensors") / 2);
  expect_refused(job({"--teacher", teacher.string()}), ErrorKind::input,
                 HasSubstr((teacher / "model.safetensors").string()));
}

TEST_F(HostappTest, WeightsThatAreNoNumbersAreNamed) {
  const fs::path teacher = spoilt_teacher();
  const std::string tensor = "model.layers.1.mlp.up_proj.weight";
  std::uint64_t place = 0;
  {
    const SafetensorsFile file = SafetensorsFile::open(teacher / "model.safetensors");
    const MappedFile whole(teacher / "model.safetensors");
    const std::string bytes(reinterpret_cast<const char*>(file.at(tensor).data), 64);
    place = whole.text().find(bytes);
  }
  std::fstream spoil(teacher / "model.safetensors",
                     std::ios::in | std::ios::out | std::ios::binary);
  const float nan = std::nanf("");
  spoil.seekp(static_cast<std::streamoff>(place + 20));
  spoil.write(reinterpret_cast<const char*>(&nan), sizeof nan);
  spoil.close();
  expect_refused(job({"--teacher", teacher.string()}), ErrorKind::input, HasSubstr(tensor));
}

TEST_F(HostappTest, ABadTextIsNamed) {
  expect_refused(job({"--text", "/nonexistent.txt"}), ErrorKind::input,
                 HasSubstr("/nonexistent.txt"));
  const std::string empty = write("empty.txt", "").string();
  expect_refused(job({"--text", empty}), ErrorKind::input,
                 AllOf(HasSubstr(empty), HasSubstr("empty")));
  const std::string binary =
      write("binary.txt", std::string("a\0b\xff\xfe", 5) + std::string(2000, '\0')).string();
  expect_refused(job({"--text", binary}), ErrorKind::input, HasSubstr(binary));
  const std::string brief = write("brief.txt", "too short").string();
  Words alone = job();
  const auto text = std::find(alone.begin(), alone.end(), "--text");
  alone.erase(text + 1, text + 3);
  alone.insert(text + 1, brief);
  expect_refused(alone, ErrorKind::input, AllOf(HasSubstr(brief), HasSubstr("window")));
  expect_refused(job({}, brief), ErrorKind::input,
                 AllOf(HasSubstr("brief.txt"), HasSubstr("window")));
}

TEST_F(HostappTest, EvaluatingOnTheCalibrationTextIsRefused) {
  expect_refused(job({}, shared("a.txt")), ErrorKind::input,
                 AllOf(HasSubstr(shared("a.txt")), HasSubstr("is calibration text too")));
  const std::string part = write("part.txt", "Something else. " + made_up_prose(1, 5000)).string();
  expect_refused(job({"--eval.windows", "40"}, part), ErrorKind::input,
                 AllOf(HasSubstr("share a run of 32 tokens"), HasSubstr("part.txt")));
}

// ---------------------------------------------------------------- the out folder

TEST_F(HostappTest, AnOutFolderInUseNeedsForce) {
  fs::create_directory(folder_ / "used");
  write("used/mine.txt", "mine");
  expect_refused(job({"--out", "used"}), ErrorKind::usage,
                 AllOf(HasSubstr("used"), HasSubstr("--force")));
  expect_refused(job({"--out", "used", "--force"}), ErrorKind::usage,
                 AllOf(HasSubstr("cannot replace the folder 'used'"),
                       HasSubstr("it holds something that is no result of hostapp")));
  EXPECT_EQ(read_text(folder_ / "used/mine.txt"), "mine");
}

TEST_F(HostappTest, ForceDeletesNothingThatTheJobReads) {
  const fs::path teacher = spoilt_teacher();
  write("spoilt/results.json", R"({"teacher": {}, "rows": [], "protocol": {}})");
  for (const char* out : {"spoilt", "spoilt/", "./spoilt"})
    expect_refused(job({"--teacher", teacher.string(), "--out", out, "--force"}), ErrorKind::usage,
                   AllOf(HasSubstr("it is, or holds, the teacher"), HasSubstr("which would be")));
  fs::create_directory(folder_ / "own");
  write("own/results.json", R"({"teacher": {}, "rows": [], "protocol": {}})");
  write("own/mine.toml", "seed = 2\n");
  expect_refused(job({"--config", "own/mine.toml", "--out", "own", "--force"}), ErrorKind::usage,
                 HasSubstr("it is, or holds, the file 'own/mine.toml'"));
  EXPECT_TRUE(fs::exists(teacher / "model.safetensors"));
  EXPECT_TRUE(fs::exists(folder_ / "own/mine.toml"));
}

TEST_F(HostappTest, AFlagIsNoFolder) {
  Words words = job();
  words.insert(words.end(), {"--out", "--force"});
  expect_refused(words, ErrorKind::usage, HasSubstr("--out: a value is missing"));
  EXPECT_FALSE(fs::exists(folder_ / "--force=true"));
}

TEST_F(HostappTest, AnOutFolderThatCannotBeIsNamedBeforeTheWork) {
  write("file", "");
  expect_refused(job({"--out", "file/below"}), ErrorKind::usage, HasSubstr("file"));
  expect_refused(job({"--out", "/proc/graft"}), ErrorKind::usage, HasSubstr("/proc/graft"));
}

TEST_F(HostappTest, AFullDiskLeavesNothing) {
  ASSERT_EQ(run(job({"--out", "warm"})).exit_code, 0);  // the texts' cache is there now
  Subprocess::Settings full = settings();
  full.most_file_bytes = 50'000;  // the weights are larger
  const Finished failed = Subprocess(hostapp, job(), full).finish();
  EXPECT_EQ(failed.exit_code, static_cast<int>(ErrorKind::internal)) << failed.err;
  EXPECT_THAT(failed.err, AllOf(HasSubstr("hostapp: error: cannot write "),
                                HasSubstr("model.safetensors"), HasSubstr("File too large")));
  expect_nothing_left();
}

// ---------------------------------------------------------------- the main job and what comes of
// it

TEST_F(HostappTest, ConvertsEvaluatesWritesAndReadsBack) {
  const Finished done = run(job({"--keep-attention", "none", "uniform:2", "--compare", "all"}));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_THAT(
      done.out,
      AllOf(HasSubstr("start"), HasSubstr("teacher"), HasSubstr("naive"), HasSubstr("zero_gate"),
            HasSubstr("taylor + calibrate"), HasSubstr("uniform:2"), HasSubstr("peak memory: "),
            HasSubstr("tokens/s through one layer's training step"), HasSubstr("student: ")));
  EXPECT_THAT(done.err, AllOf(HasSubstr("converting (taylor)"), HasSubstr("2/2 layers")));
  EXPECT_THAT(done.err, Not(HasSubstr("\r")));  // no terminal, so whole lines

  const auto results = nlohmann::json::parse(read_text(folder_ / "out/results.json"));
  EXPECT_EQ(results.at("rows").size(), 8u);
  for (const auto& row : results["rows"]) {
    EXPECT_TRUE(std::isfinite(row.at("ppl").get<double>())) << row;
    EXPECT_GE(row.at("agreement").get<double>(), 0) << row;
  }

  // The configuration beside the results does the same again.
  const Finished again = run({"--config", "out/config.toml", "--out", "again"});
  ASSERT_EQ(again.exit_code, 0) << again.err;
  const auto repeated = nlohmann::json::parse(read_text(folder_ / "again/results.json"));
  for (std::size_t i = 0; i < results["rows"].size(); ++i)
    EXPECT_EQ(results["rows"][i]["ppl"], repeated["rows"][i]["ppl"]);
  EXPECT_EQ(read_text(folder_ / "out/student/model.safetensors"),
            read_text(folder_ / "again/student/model.safetensors"));

  // The student gives the figure of its row.
  const Finished evaluated =
      run({"eval", "out/student", "--text", shared("held_out.txt"), "--eval.context", "64",
           "--eval.windows", "4", "--teacher", shared("teacher"), "--agreement.prompts", "3",
           "--agreement.prompt_length", "8", "--agreement.tokens", "5", "--threads", "1"});
  ASSERT_EQ(evaluated.exit_code, 0) << evaluated.err;
  std::string row;  // taylor + calibrate, none
  std::istringstream table(done.out);
  for (std::string line; std::getline(table, line);) {
    if (line.starts_with("taylor + calibrate") && line.find("none") != std::string::npos)
      row = line;
  }
  std::istringstream words(evaluated.out);
  std::string word, perplexity_text;
  words >> word >> perplexity_text;
  EXPECT_EQ(word, "perplexity");
  EXPECT_THAT(row, HasSubstr(perplexity_text));
  EXPECT_THAT(evaluated.out, HasSubstr("agreement "));

  const Finished inspected = run({"inspect", "out/student", "-v"});
  EXPECT_EQ(inspected.exit_code, 0) << inspected.err;
  EXPECT_THAT(inspected.out, AllOf(HasSubstr("family        llama"), HasSubstr("mixer         gdn"),
                                   HasSubstr("converted     [0,1]"), HasSubstr("F32"),
                                   HasSubstr("model.layers.0.mixer.q_proj.weight")));
}

TEST_F(HostappTest, QuietSaysOnlyTheResult) {
  const Finished done = run(job({"-q", "--calibrate.enabled=false", "--agreement.prompts", "0"}));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_EQ(done.err, "");
  EXPECT_THAT(done.out, AllOf(HasSubstr("taylor"), Not(HasSubstr("calibrate")),
                              Not(HasSubstr("agreement with"))));
}

TEST_F(HostappTest, SaysWhatIsLeftOutAndWhatIsReadTwice) {
  write("lines.jsonl", "{\"text\": \"brief\"}\n");
  const Finished done = run(job({"--text", "lines.jsonl", "--calibrate.tokens", "16000",
                                 "--calibrate.steps", "1", "--agreement.prompts", "0"}));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_THAT(done.err, AllOf(HasSubstr("1 of 3 calibration documents are shorter than a window "
                                        "(32 tokens) and are left out"),
                              HasSubstr("taylor: 16000 calibration tokens are asked for"),
                              HasSubstr("the text has 12000: windows repeat")));
}

TEST_F(HostappTest, TheDefaultCalibrationCanBeLeftOutWithoutARecipe) {
  const Finished done = run(
      job({"--recipe", "none", "--calibrate.enabled", "false", "--mixer.options.rope", "true"}));
  EXPECT_EQ(done.exit_code, 0) << done.err;
}

TEST_F(HostappTest, ARecipeFileMayNameThePlugins) {
  Words words = job(
      {"--recipe", GRAFT_SOURCE_DIR "/recipes/gdn-taylor-paper.toml", "--calibrate.steps", "3"});
  words.erase(words.begin(), words.begin() + 4);  // --mixer gdn --init taylor
  const Finished done = run(words);
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_THAT(read_text(folder_ / "out/config.toml"),
              AllOf(HasSubstr("variant = \"paper\"  # "), HasSubstr("query = 1e-04  # "),
                    HasSubstr("keep_best = true  # ")));
}

TEST_F(HostappTest, CtrlCEndsCleanly) {
  Subprocess process(hostapp, job({"--calibrate.steps", "1000000"}), settings());
  ASSERT_TRUE(process.waits_for("converting (taylor)", 120));
  process.send(SIGINT);
  const Finished stopped = process.finish();
  EXPECT_EQ(stopped.exit_code, 130);
  EXPECT_THAT(stopped.err, HasSubstr("interrupted"));
  EXPECT_EQ(stopped.out, "");
  expect_nothing_left();
}

// ---------------------------------------------------------------- inspect, eval, generate on a
// teacher

TEST_F(HostappTest, InspectsATeacher) {
  const Finished inspected = run({"inspect", shared("teacher")});
  EXPECT_EQ(inspected.exit_code, 0) << inspected.err;
  EXPECT_THAT(inspected.out, AllOf(HasSubstr("layers        2\n"),
                                   HasSubstr("heads         4 of 16, 2 for keys and values"),
                                   HasSubstr("vocabulary    320"), Not(HasSubstr("mixer"))));
  expect_refused({"inspect", "/nonexistent"}, ErrorKind::input, HasSubstr("/nonexistent"));
}

TEST_F(HostappTest, EvaluatesATeacher) {
  const Finished evaluated =
      run({"eval", shared("teacher"), "--text", shared("held_out.txt"), "--eval.context", "64"});
  EXPECT_EQ(evaluated.exit_code, 0) << evaluated.err;
  EXPECT_THAT(evaluated.out,
              AllOf(StartsWith("perplexity "), HasSubstr("16 consecutive windows of 64 tokens")));
  expect_refused({"eval", shared("teacher")}, ErrorKind::usage,
                 HasSubstr("missing: --text FILE..."));
  expect_refused({"eval", "/nonexistent", "--text", shared("a.txt")}, ErrorKind::input,
                 HasSubstr("/nonexistent"));
}

TEST_F(HostappTest, AFolderThatIsNoModelSaysWhichMayBeMeant) {
  fs::create_directory(folder_ / "o1");
  fs::copy(*shared_ / "teacher", folder_ / "o1/student", fs::copy_options::recursive);
  const std::string text = shared("held_out.txt");
  for (const Words& words :
       {Words{"inspect", "o1"}, Words{"eval", "o1", "--text", text},
        Words{"eval", shared("teacher"), "--text", text, "--eval.context", "64", "--teacher", "o1"},
        Words{"generate", "o1", "--prompt", "x"},
        Words{"compare", "o1", shared("teacher"), "--text", text},
        Words{"compare", shared("teacher"), "o1", "--text", text}}) {
    expect_refused(words, ErrorKind::input,
                   AllOf(HasSubstr("'o1' is not a Hugging Face model folder: no model files"),
                         HasSubstr("did you mean 'o1/student'?")));
  }
  expect_refused({"eval", "o2", "--text", text}, ErrorKind::input, HasSubstr("no folder 'o2'"));
  expect_refused({"generate", "o2", "--prompt", "x"}, ErrorKind::input,
                 HasSubstr("no folder 'o2'"));
}

TEST_F(HostappTest, EvalAndGenerateCheckTokenizerAndContext) {
  const std::string text = shared("held_out.txt");
  expect_refused(
      {"eval", shared("teacher"), "--text", text, "--eval.context", "257"}, ErrorKind::usage,
      AllOf(HasSubstr("eval.context: 257 tokens are more than the model's context of 256"),
            HasSubstr("max_position_embeddings")));

  const fs::path spoilt = spoilt_teacher();
  const auto tokenizer = nlohmann::json::parse(read_text(spoilt / "tokenizer.json"));
  write_file_atomically(spoilt / "tokenizer.json", tokenizer.dump(1));  // other bytes
  expect_refused({"eval", shared("teacher"), "--text", text, "--eval.context", "64", "--teacher",
                  spoilt.string()},
                 ErrorKind::input,
                 AllOf(HasSubstr("spoilt/tokenizer.json' differs from"),
                       HasSubstr("give the teacher that the student was made from")));
  auto config = nlohmann::json::parse(read_text(spoilt / "config.json"));
  config["vocab_size"] = 100;
  write_file_atomically(spoilt / "config.json", config.dump());
  const std::string vocabulary = "the model only 100 (vocab_size in config.json)";
  expect_refused({"eval", spoilt.string(), "--text", text, "--eval.context", "64"},
                 ErrorKind::input, HasSubstr(vocabulary));
  expect_refused({"generate", spoilt.string(), "--prompt", "x"}, ErrorKind::input,
                 HasSubstr(vocabulary));
}

TEST_F(HostappTest, GenerateWarnsOfWhatDoesNothingAndOfLongTexts) {
  const Finished greedy = run({"generate", shared("teacher"), "--prompt", "she",
                               "--generate.tokens", "2", "--generate.top_k", "5"});
  EXPECT_EQ(greedy.exit_code, 0) << greedy.err;
  EXPECT_THAT(greedy.err, AllOf(HasSubstr("generate.top_k does nothing at generate.temperature 0"),
                                Not(HasSubstr("top_p")), Not(HasSubstr("context of"))));
  write("long.txt", std::string(255, 'a') + "\n" + std::string(256, 'b') + "\n");
  const Finished longer =
      run({"generate", shared("teacher"), "--prompts", "long.txt", "--generate.tokens", "2",
           "--generate.temperature", "1", "--generate.top_p", "0.9"});
  EXPECT_EQ(longer.exit_code, 0) << longer.err;
  const std::string warning =
      "prompt and generate.tokens: 257 tokens are more than the model's "
      "context of 256";
  EXPECT_THAT(longer.err, AllOf(HasSubstr(warning), Not(HasSubstr("258 tokens")),
                                Not(HasSubstr("does nothing"))));
}

TEST_F(HostappTest, CtrlCEndsABatchOfPrompts) {
  write("prompts.txt", "the old bridge\nshe\n");
  auto config = nlohmann::json::parse(read_text(spoilt_teacher() / "config.json"));
  config["eos_token_id"] = nullptr;  // goes on until it is stopped
  write_file_atomically(folder_ / "spoilt/config.json", config.dump());
  fs::remove(folder_ / "spoilt/generation_config.json");
  Subprocess process(hostapp,
                     {"generate", "spoilt", "--prompts", "prompts.txt", "--generate.tokens",
                      "100000", "--threads", "1"},
                     settings());
  ASSERT_TRUE(process.waits_for("context of 256", 120));  // the warning just before
  process.send(SIGINT);
  const Finished stopped = process.finish();
  EXPECT_EQ(stopped.exit_code, 130);
  EXPECT_THAT(stopped.err, HasSubstr("interrupted"));
  EXPECT_EQ(stopped.out, "");
}

TEST_F(HostappTest, GeneratesFromTeacherAndStudentTheSameEachTime) {
  ASSERT_EQ(run(job({"--keep-attention", "0", "--agreement.prompts", "0"})).exit_code, 0);
  for (const std::string& model : {shared("teacher"), std::string("out/student")}) {
    const Words greedy = {"generate",          model, "--prompt", "the old bridge",
                          "--generate.tokens", "12"};
    const Finished first = run(greedy);
    ASSERT_EQ(first.exit_code, 0) << first.err;
    EXPECT_GT(first.out.size(), 1u);
    EXPECT_THAT(first.err, HasSubstr("14 prompt tokens"));
    EXPECT_EQ(run(greedy).out, first.out);

    Words sampled = greedy;
    sampled.insert(sampled.end(), {"--generate.temperature", "1.5", "--seed", "5"});
    const Finished drawn = run(sampled);
    EXPECT_EQ(run(sampled).out, drawn.out);
    EXPECT_NE(drawn.out, first.out);
  }
  const Finished without = run({"generate", "out/student"});
  EXPECT_EQ(without.exit_code, static_cast<int>(ErrorKind::usage));
  EXPECT_THAT(without.err, HasSubstr("missing: --prompt TEXT"));
}

TEST_F(HostappTest, GeneratesFromAFileOfPrompts) {
  write("prompts.txt", "the old bridge\n\nshe\r\n");
  write("prompts.jsonl", R"({"prompt": "the old bridge"})"
                         "\n"
                         R"({"prompt": "she"})");
  Words words = {"generate", shared("teacher"), "--generate.tokens", "6", "--prompts"};
  Words lines = words, json = words;
  lines.push_back("prompts.txt");
  json.push_back("prompts.jsonl");
  const Finished first = run(lines);
  ASSERT_EQ(first.exit_code, 0) << first.err;
  EXPECT_EQ(std::count(first.out.begin(), first.out.end(), '\n'), 2);
  EXPECT_THAT(first.out, AllOf(StartsWith(R"({"prompt":"the old bridge","text":)"),
                               HasSubstr(R"({"prompt":"she","text":)")));
  EXPECT_EQ(run(json).out, first.out);
  const Finished alone =
      run({"generate", shared("teacher"), "--generate.tokens", "6", "--prompt", "she"});
  EXPECT_THAT(
      first.out,
      HasSubstr(R"("text":)" + nlohmann::json(alone.out.substr(0, alone.out.size() - 1)).dump()));
  expect_refused({"generate", shared("teacher"), "--prompts", "prompts.txt", "--prompt", "x"},
                 ErrorKind::usage, HasSubstr("one of --prompt and --prompts"));
  write("other.jsonl", R"({"promt": "she"})");
  expect_refused({"generate", shared("teacher"), "--prompts", "other.jsonl"}, ErrorKind::input,
                 AllOf(HasSubstr("other.jsonl"), HasSubstr("no key 'prompt'"),
                       HasSubstr("did you mean 'promt'")));
}

}  // namespace
}  // namespace graft
