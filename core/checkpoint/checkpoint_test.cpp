#include "core/checkpoint/checkpoint.h"

#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <filesystem>
#include <sstream>
#include <string>

#include "core/base/testing.h"
#include "core/checkpoint/testing.h"

namespace graft {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr const char* kIndex = "model.safetensors.index.json";

// A model folder to spoil: two shards with 'a' and 'b' in the first and 'c' in the second.
class ShardedFolder : public testing::Test {
 protected:
  ShardedFolder() {
    put("config.json", "{}");
    write_shard("model-00001-of-00002.safetensors", {"a", "b"});
    write_shard("model-00002-of-00002.safetensors", {"c"});
    put(kIndex, index("model-00002-of-00002.safetensors"));
  }
  void put(const std::string& name, std::string_view text) {
    write_file_atomically(folder_ / name, text);
  }
  void write_shard(const std::string& file, const std::vector<std::string>& names) {
    const std::vector<float> values = {1, 2, 3};
    std::vector<TensorView> tensors;
    for (const auto& name : names) tensors.push_back(view_of(name, DType::F32, {3}, values));
    write_safetensors(folder_ / file, tensors);
  }
  // The index with the entry of 'c' given.
  static std::string index(const std::string& file_of_c) {
    return R"({"metadata":{"total_size":36},"weight_map":{"a":"model-00001-of-00002.safetensors",)"
           R"("b":"model-00001-of-00002.safetensors","c":")" +
           file_of_c + "\"}}";
  }
  void refuses(const testing::Matcher<const std::string&>& message) {
    EXPECT_GRAFT_ERROR(Checkpoint::open(folder_.path()), ErrorKind::input, message);
  }
  std::string where(const std::string& name) { return "'" + (folder_ / name).string() + "'"; }

  TempFolder folder_;
};

TEST_F(ShardedFolder, Opens) {
  const Checkpoint checkpoint = Checkpoint::open(folder_.path());
  EXPECT_EQ(checkpoint.folder(), folder_.path());
  EXPECT_THAT(checkpoint.names(), ElementsAre("a", "b", "c"));
  EXPECT_EQ(checkpoint.files().size(), 2U);
  EXPECT_EQ(checkpoint.file_of("c"), folder_ / "model-00002-of-00002.safetensors");
  EXPECT_EQ(checkpoint.at("c").name, "c");
  EXPECT_EQ(checkpoint.find("d"), nullptr);
  EXPECT_GRAFT_ERROR(checkpoint.at("bb"), ErrorKind::input,
                     AllOf(HasSubstr("'" + folder_.path().string() + "': no tensor 'bb'"),
                           HasSubstr("(did you mean 'b'?)")));
  EXPECT_GRAFT_ERROR(checkpoint.file_of("weight"), ErrorKind::input,
                     HasSubstr("no tensor 'weight'; known: a, b, c"));
}

TEST_F(ShardedFolder, MissingShardIsNamed) {
  fs::remove(folder_ / "model-00002-of-00002.safetensors");
  refuses(AllOf(HasSubstr("missing 'model-00002-of-00002.safetensors' (1 tensor) of 2 shards that "
                          "model.safetensors.index.json names"),
                HasSubstr("download again")));
  fs::remove(folder_ / "model-00001-of-00002.safetensors");
  refuses(
      HasSubstr("missing 'model-00001-of-00002.safetensors' (2 tensors), "
                "'model-00002-of-00002.safetensors' (1 tensor) of 2 shards"));
}

TEST_F(ShardedFolder, DanglingLinkIsNamed) {
  fs::remove(folder_ / "model-00002-of-00002.safetensors");
  fs::create_symlink("../../blobs/0f", folder_ / "model-00002-of-00002.safetensors");
  refuses(AllOf(HasSubstr("model-00002-of-00002.safetensors': No such file or directory"),
                HasSubstr("(it is a link to '../../blobs/0f')")));
}

TEST_F(ShardedFolder, TensorAbsentFromItsShard) {
  write_shard("model-00002-of-00002.safetensors", {"d"});
  refuses(AllOf(HasSubstr(where("model-00002-of-00002.safetensors") + ": no tensor 'c', which"),
                HasSubstr(where(kIndex) + " says is there")));
}

TEST_F(ShardedFolder, TensorThatNoIndexNames) {
  write_shard("model-00002-of-00002.safetensors", {"c", "d"});
  refuses(HasSubstr(where("model-00002-of-00002.safetensors") + ": tensor 'd' is not in " +
                    where(kIndex)));
}

TEST_F(ShardedFolder, TensorInTwoShards) {
  write_shard("model-00002-of-00002.safetensors", {"c", "a"});
  refuses(
      HasSubstr("model-00002-of-00002.safetensors': tensor 'a' is in "
                "'model-00001-of-00002.safetensors' by "));
}

TEST_F(ShardedFolder, TruncatedShard) {
  fs::resize_file(folder_ / "model-00002-of-00002.safetensors",
                  fs::file_size(folder_ / "model-00002-of-00002.safetensors") - 1);
  refuses(AllOf(HasSubstr(where("model-00002-of-00002.safetensors") +
                          ": tensor 'c': data_offsets "
                          "[0, 12] reach beyond the file, which has 11 bytes of data"),
                HasSubstr("truncated: download or copy it again")));
}

TEST_F(ShardedFolder, IndexLeadsOutOfTheFolder) {
  // The paths lead to a file that is there: it is the path that is refused.
  fs::create_directory(folder_ / "sub");
  fs::copy_file(folder_ / "model-00002-of-00002.safetensors", folder_ / "sub" / "s.safetensors");
  const std::string absolute = (folder_ / "sub" / "s.safetensors").string();
  const std::string parent = "../" + folder_.path().filename().string() + "/sub/s.safetensors";
  for (const std::string& path : {absolute, parent, std::string("sub/s.safetensors"),
                                  std::string(".."), std::string("."), std::string()}) {
    put(kIndex, index(path));
    refuses(HasSubstr(where(kIndex) + ": tensor 'c' is in '" + path +
                      "', expected the name of a file in the same folder"));
  }
  put(kIndex, index("model-00002-of-00002.safetensors\\u0000.txt"));
  refuses(HasSubstr("expected the name of a file in the same folder"));
}

TEST_F(ShardedFolder, IndexThatIsNone) {
  put(kIndex, "not json");
  refuses(HasSubstr(where(kIndex) + ", line 1, column 2: not valid JSON: "));
  put(kIndex, "");
  refuses(HasSubstr(where(kIndex) + ", line 1, column 1: not valid JSON: "));
  for (const char* text : {"[]", "{}", "{\"weight_map\": []}", "{\"weight_map\": null}", "3"}) {
    put(kIndex, text);
    refuses(HasSubstr(where(kIndex) + ": expected an object with a weight_map of tensor to file"));
  }
  put(kIndex, R"({"weight_map": {}})");
  refuses(HasSubstr("the weight_map is empty"));
  put(kIndex, R"({"weight_map": {"a": 1}})");
  refuses(HasSubstr("tensor 'a' is in number, expected a file's name"));
  put(kIndex, R"({"weight_map": {"a": "x", "a": "y"}})");
  refuses(HasSubstr("the key 'a' stands twice"));
  put(kIndex, R"({"weight_map": {"a": "pytorch_model.bin"}})");
  put("pytorch_model.bin", std::string_view("PK\x03\x04 and so on", 13));
  refuses(HasSubstr("pytorch_model.bin': not a safetensors file: it is a PyTorch archive"));
}

TEST_F(ShardedFolder, ShardThatIsAFolder) {
  fs::remove(folder_ / "model-00002-of-00002.safetensors");
  fs::create_directory(folder_ / "model-00002-of-00002.safetensors");
  refuses(HasSubstr("model-00002-of-00002.safetensors': it is a folder, not a file"));
}

// What goes to the log while `action` runs.
template <class Action>
std::string logged(Action action) {
  std::ostringstream text;
  const auto before = spdlog::default_logger();
  spdlog::set_default_logger(std::make_shared<spdlog::logger>(
      "test", std::make_shared<spdlog::sinks::ostream_sink_mt>(text)));
  action();
  spdlog::set_default_logger(before);
  return text.str();
}

TEST_F(ShardedFolder, LeftoverShardsAreNamed) {
  EXPECT_EQ(logged([&] { Checkpoint::open(folder_.path()); }), "");
  write_shard("model-00003-of-00003.safetensors", {"z"});
  EXPECT_THAT(logged([&] {
                EXPECT_THAT(Checkpoint::open(folder_.path()).names(), ElementsAre("a", "b", "c"));
              }),
              HasSubstr("'model-00003-of-00003.safetensors' is not read: "
                        "model.safetensors.index.json does not name it"));
}

TEST_F(ShardedFolder, OneFileGoesBeforeAnIndex) {
  write_shard("model.safetensors", {"whole"});
  const std::string log =
      logged([&] { EXPECT_THAT(Checkpoint::open(folder_.path()).names(), ElementsAre("whole")); });
  EXPECT_THAT(log, HasSubstr("'model-00001-of-00002.safetensors' is not read: model.safetensors "));
  EXPECT_THAT(log, HasSubstr("'model-00002-of-00002.safetensors' is not read"));
}

// ---- Folders that are no model

struct NoModel {
  std::string label;
  std::vector<std::string> files;  // ending in / for folders
  std::string message;
};

void PrintTo(const NoModel& c, std::ostream* out) { *out << c.label; }

class NotAModel : public testing::TestWithParam<NoModel> {};

TEST_P(NotAModel, SaysWhatWasLookedForAndWhatToDo) {
  const TempFolder folder;
  for (const std::string& file : GetParam().files) {
    fs::create_directories((folder / file).parent_path());
    if (!file.ends_with('/')) write_file_atomically(folder / file, std::string_view("{}"));
  }
  const auto message =
      AllOf(HasSubstr("'" + folder.path().string() + "' is not a Hugging Face model folder: "),
            HasSubstr("looked for config.json, and model.safetensors or "
                      "model.safetensors.index.json"),
            HasSubstr(GetParam().message));
  EXPECT_GRAFT_ERROR(check_model_folder(folder.path()), ErrorKind::input, message);
  EXPECT_GRAFT_ERROR(Checkpoint::open(folder.path()), ErrorKind::input, message);
}

INSTANTIATE_TEST_SUITE_P(
    Folders, NotAModel,
    testing::Values(
        NoModel{"empty", {}, "folder: it is empty; looked for"},
        NoModel{"no_config", {"model.safetensors"}, "no config.json; looked for"},
        NoModel{"no_weights",
                {"config.json", "tokenizer.json"},
                "no weights; looked for config.json, and model.safetensors or "
                "model.safetensors.index.json; found config.json, tokenizer.json"},
        NoModel{"pickle",
                {"config.json", "pytorch_model.bin"},
                "'pytorch_model.bin' is a Python pickle, which is not read: load it with "
                "transformers and save_pretrained(folder, safe_serialization=True)"},
        NoModel{"pickle_shards",
                {"config.json", "pytorch_model-00001-of-00002.bin"},
                "'pytorch_model-00001-of-00002.bin' is a Python pickle"},
        NoModel{"gguf",
                {"smollm2-q4.gguf"},
                "no model files; looked for config.json, and model.safetensors or "
                "model.safetensors.index.json; found smollm2-q4.gguf; 'smollm2-q4.gguf' is a GGUF "
                "file, which is not read: load it with transformers' "
                "from_pretrained(folder, gguf_file=...)"},
        NoModel{"shards_without_index",
                {"config.json", "model-00001-of-00002.safetensors"},
                "'model-00001-of-00002.safetensors' is a shard, but model.safetensors.index.json, "
                "which names the shards, is missing"},
        NoModel{"other_name",
                {"config.json", "weights.safetensors"},
                "if 'weights.safetensors' holds the whole model, rename it to model.safetensors"},
        NoModel{"adapter",
                {"config.json", "adapter_model.safetensors"},
                "it holds a LoRA adapter: merge it"},
        NoModel{"one_level_up", {"README.md", "smollm/config.json"}, "/smollm'?"},
        NoModel{"hub_cache",
                {"refs/main", "blobs/0f", "snapshots/93efa2f0/config.json"},
                "; did you mean '"},
        NoModel{"many_files",
                {"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"},
                "found a, b, c, d, e, f, g, h and 2 more"}),
    [](const auto& info) { return info.param.label; });

TEST(NoModelFolder, HubCacheNamesTheSnapshot) {
  const TempFolder folder;
  fs::create_directories(folder / "snapshots" / "93efa2f0");
  write_file_atomically(folder / "snapshots" / "93efa2f0" / "config.json", std::string_view("{}"));
  EXPECT_GRAFT_ERROR(Checkpoint::open(folder.path()), ErrorKind::input,
                     HasSubstr("did you mean '" + (folder / "snapshots/93efa2f0").string() + "'?"));
}

TEST(NoModelFolder, Missing) {
  const TempFolder folder;
  fs::create_directory(folder / "smollm2");
  EXPECT_GRAFT_ERROR(Checkpoint::open(folder / "smolm2"), ErrorKind::input,
                     AllOf(HasSubstr("no folder '" + (folder / "smolm2").string() + "'"),
                           HasSubstr("did you mean '" + (folder / "smollm2").string() + "'?")));
  EXPECT_GRAFT_ERROR(Checkpoint::open(folder / "x" / "y"), ErrorKind::input,
                     AllOf(HasSubstr("no folder '"), Not(HasSubstr("Hub"))));
  EXPECT_GRAFT_ERROR(Checkpoint::open("HuggingFaceTB/SmolLM2-135M"), ErrorKind::input,
                     HasSubstr("no folder 'HuggingFaceTB/SmolLM2-135M'; if it is a model's name on "
                               "the Hugging Face Hub, download it and give its folder"));
  EXPECT_GRAFT_ERROR(Checkpoint::open(""), ErrorKind::input, HasSubstr("no folder ''"));
  EXPECT_GRAFT_ERROR(Checkpoint::open(fs::path(GRAFT_TEST_DATA) / "models/llama/model.safetensors"),
                     ErrorKind::input, HasSubstr("is a file; give the model folder that holds it"));
}

// ---- Models by others

class GoldenModel : public testing::TestWithParam<std::string> {};

TEST_P(GoldenModel, Opens) {
  const fs::path folder = fs::path(GRAFT_TEST_DATA) / "models" / GetParam();
  const Checkpoint checkpoint = Checkpoint::open(folder);
  const std::vector<std::string> names = checkpoint.names();
  EXPECT_TRUE(std::is_sorted(names.begin(), names.end()));
  EXPECT_EQ(checkpoint.files().size(), GetParam() == "llama_sharded" ? 5U : 1U);
  for (const std::string& name : names) {
    EXPECT_EQ(checkpoint.at(name).name, name);
    EXPECT_EQ(checkpoint.file_of(name).parent_path(), folder);
  }
  const bool neox = GetParam() == "gpt_neox";
  EXPECT_NE(checkpoint.find(neox ? "gpt_neox.embed_in.weight" : "model.embed_tokens.weight"),
            nullptr);
}

INSTANTIATE_TEST_SUITE_P(Folders, GoldenModel,
                         testing::Values("llama", "llama_bf16", "llama_sharded", "qwen2", "qwen3",
                                         "gpt_neox"));

}  // namespace
}  // namespace graft
