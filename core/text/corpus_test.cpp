#include "core/text/corpus.h"

#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "core/base/file.h"
#include "core/base/hash.h"
#include "core/text/testing.h"
#include "core/text/token_block.h"

namespace graft::text {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

class CorpusTest : public testing::Test {
 protected:
  fs::path write(const std::string& name, const std::string& content) {
    const fs::path path = folder_ / name;
    fs::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }

  Corpus open(const std::vector<fs::path>& paths) {
    return Corpus::open(paths, tokenizer_, options_);
  }

  std::vector<fs::path> cached() const {
    std::vector<fs::path> files;
    for (const auto& entry : fs::directory_iterator(options_.cache_dir / "tokens")) {
      files.push_back(entry.path());
    }
    return files;
  }

  // The documents as "name=text".
  std::vector<std::string> texts(const Corpus& corpus) const {
    std::vector<std::string> out;
    for (const Document& document : corpus.documents()) {
      std::string name = document.name.substr(folder_.path().string().size() + 1);
      out.push_back(name + "=" + tokenizer_.decode(document.tokens));
    }
    return out;
  }

  TempFolder folder_;
  Tokenizer tokenizer_ = tokenizer_of(byte_level_json());
  CorpusOptions options_{"text", {}, folder_ / "cache"};
};

TEST_F(CorpusTest, ATextFileIsOneDocument) {
  const Corpus corpus = open({write("a.txt", "Hello\r\n日本\n"), write("b.txt", "x")});
  EXPECT_THAT(texts(corpus), ElementsAre("a.txt=Hello\r\n日本\n", "b.txt=x"));
  EXPECT_EQ(corpus.total_tokens(), 15);
  ASSERT_EQ(corpus.sources().size(), 2U);
  EXPECT_EQ(corpus.sources()[0].sha256, sha256_hex("Hello\r\n日本\n"));
  EXPECT_EQ(corpus.sources()[0].tokens, 14);
  EXPECT_EQ(corpus.sources()[0].documents, 1);
}

TEST_F(CorpusTest, EachLineOfJsonlIsADocument) {
  const fs::path file = write("a.jsonl",
                              "{\"text\": \"one\", \"id\": 1}\n\n{\"text\": \"\"}\r\n"
                              "{\"id\": [2], \"text\": \"tw\\u00e9\\n\"}");
  EXPECT_THAT(texts(open({file})), ElementsAre("a.jsonl:1=one", "a.jsonl:3=", "a.jsonl:4=twé\n"));
  options_.jsonl_field = "body";
  const fs::path other = write("b.jsonl", "{\"body\": \"x\", \"text\": 3}\n");
  EXPECT_THAT(texts(open({other})), ElementsAre("b.jsonl:1=x"));
}

TEST_F(CorpusTest, FoldersAreSearchedInSortedOrder) {
  write("in/b.txt", "b");
  write("in/a/z.txt", "z");
  write("in/a/y.jsonl", "{\"text\": \"y\"}");
  write("in/c.md", "not a text for us");
  write("in/.hidden/h.txt", "h");
  EXPECT_THAT(texts(open({folder_ / "in"})),
              ElementsAre("in/.hidden/h.txt=h", "in/a/y.jsonl:1=y", "in/a/z.txt=z", "in/b.txt=b"));
}

TEST_F(CorpusTest, AByteOrderMarkIsNotText) {
  const Corpus corpus =
      open({write("a.txt", "\uFEFFa\uFEFF"), write("b.jsonl", "\uFEFF{\"text\": \"b\"}")});
  EXPECT_THAT(texts(corpus), ElementsAre("a.txt=a\uFEFF", "b.jsonl:1=b"));
}

TEST_F(CorpusTest, IsTokenisedOnce) {
  const fs::path file = write("a.txt", "once");
  EXPECT_FALSE(open({file}).sources()[0].from_cache);
  EXPECT_TRUE(open({file}).sources()[0].from_cache);
  // The content counts, not the name.
  const Corpus moved = open({write("b.txt", "once")});
  EXPECT_TRUE(moved.sources()[0].from_cache);
  EXPECT_THAT(texts(moved), ElementsAre("b.txt=once"));
  EXPECT_EQ(cached().size(), 1U);
}

TEST_F(CorpusTest, TheCacheKnowsTextTokenizerAndField) {
  const fs::path file = write("a.jsonl", "{\"text\": \"ab\", \"other\": \"cd\"}");
  const std::string hash = open({file}).content_hash();
  EXPECT_EQ(open({file}).content_hash(), hash);

  options_.jsonl_field = "other";
  const Corpus other = open({file});
  EXPECT_FALSE(other.sources()[0].from_cache);
  EXPECT_THAT(texts(other), ElementsAre("a.jsonl:1=cd"));
  EXPECT_NE(other.content_hash(), hash);
  options_.jsonl_field = "text";

  tokenizer_ = tokenizer_of(byte_level_json({"a b"}));
  const Corpus merged = open({file});
  EXPECT_FALSE(merged.sources()[0].from_cache);
  EXPECT_EQ(merged.total_tokens(), 1);
  EXPECT_NE(merged.content_hash(), hash);

  write("a.jsonl", "{\"text\": \"ab!\"}");
  EXPECT_FALSE(open({file}).sources()[0].from_cache);
}

TEST_F(CorpusTest, TheOrderOfFilesIsPartOfTheHash) {
  const fs::path a = write("a.txt", "a");
  const fs::path b = write("b.txt", "b");
  EXPECT_NE(open({a, b}).content_hash(), open({b, a}).content_hash());
}

// Every part of the cached file counts: whatever is damaged, the block is made again.
TEST_F(CorpusTest, ADamagedCacheIsRebuilt) {
  const fs::path file = write("a.jsonl", "{\"text\": \"one\"}\n{\"text\": \"two\"}\n");
  open({file});
  const fs::path block = cached().front();
  const std::string good = read_text(block);
  const auto expect_rebuilt = [&](const std::string& bytes, const std::string& what) {
    fs::remove(block);
    std::ofstream(block, std::ios::binary) << bytes;
    const Corpus corpus = open({file});
    EXPECT_FALSE(corpus.sources()[0].from_cache) << what;
    EXPECT_THAT(texts(corpus), ElementsAre("a.jsonl:1=one", "a.jsonl:2=two")) << what;
    EXPECT_EQ(read_text(block), good) << what;
  };
  for (std::size_t at = 0; at < good.size(); at += 3) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x10);
    expect_rebuilt(bad, "byte " + std::to_string(at));
  }
  for (std::size_t length = 0; length < good.size(); length += 5) {
    expect_rebuilt(good.substr(0, length), "length " + std::to_string(length));
  }
  expect_rebuilt(good + "x", "longer");
  EXPECT_TRUE(open({file}).sources()[0].from_cache);
}

TEST_F(CorpusTest, ACorpusOutlivesItsFiles) {
  const Corpus corpus = open({write("a.txt", "abc")});
  const Corpus copy = corpus;
  fs::remove_all(options_.cache_dir);
  fs::remove(folder_ / "a.txt");
  EXPECT_THAT(copy.documents().at(0).tokens, ElementsAre('a', 'b', 'c'));
}

TEST_F(CorpusTest, TellsItsProgress) {
  std::vector<std::uint64_t> seen;
  options_.progress = [&](std::uint64_t done, std::uint64_t total) {
    EXPECT_EQ(total, 32U);
    seen.push_back(done);
  };
  open({write("a.jsonl", "{\"text\": \"a\"}\n{\"text\": \"b\"}\n"), write("b.txt", "1234")});
  EXPECT_THAT(seen, ElementsAre(14, 28, 28, 32));
}

TEST_F(CorpusTest, RefusesFilesThatAreNoText) {
  const auto refused = [&](const fs::path& path, const std::string& cause) {
    EXPECT_GRAFT_ERROR(open({path}), ErrorKind::input,
                       AllOf(HasSubstr(path.filename().string()), HasSubstr(cause)));
  };
  refused(folder_ / "none.txt", "no such file or folder");
  refused(write("empty.txt", ""), "the file is empty");
  refused(write("bom.txt", "\uFEFF"), "the file is empty");
  refused(write("nul.txt", std::string("ab\n\0c", 5)),
          "not a text file: a NUL byte at byte 3 (line 2)");
  refused(write("latin.txt", "one\ntwo \xE9\n"),
          "not UTF-8 text: an invalid sequence at byte 8 (line 2)");
  refused(write("page.html", "<p>"), "not a .txt or .jsonl file, nor a folder of them");
  fs::create_directories(folder_ / "void");
  refused(folder_ / "void", "the folder holds no .txt or .jsonl file");
  fs::create_directories(folder_ / "links");
  fs::create_symlink(folder_ / "nowhere", folder_ / "links" / "gone.txt");
  EXPECT_GRAFT_ERROR(open({folder_ / "links"}), ErrorKind::input, HasSubstr("gone.txt"));
  fs::create_symlink(folder_ / "loop.txt", folder_ / "loop.txt");
  refused(folder_ / "loop.txt", "cannot be read: ");
  ASSERT_EQ(::mkfifo((folder_ / "pipe.txt").c_str(), 0600), 0);
  EXPECT_GRAFT_ERROR(open({folder_ / "pipe.txt"}), ErrorKind::input, HasSubstr("pipe.txt"));
  EXPECT_GRAFT_ERROR(open({}), ErrorKind::usage, HasSubstr("no text was named"));
  EXPECT_TRUE(cached().empty());
}

TEST_F(CorpusTest, RefusesMalformedLines) {
  const auto refused = [&](const std::string& line, const std::string& cause) {
    const fs::path path = write("bad.jsonl", "{\"text\": \"ok\"}\n\n" + line + "\n");
    EXPECT_GRAFT_ERROR(open({path}), ErrorKind::input,
                       AllOf(HasSubstr("bad.jsonl':3: "), HasSubstr(cause)));
  };
  refused("{\"text\": \"cut", "not valid JSON");
  refused("text", "not valid JSON");
  refused("{\"text\": \"\\ud800\"}", "not valid JSON");
  refused("[\"text\"]", "each line must be an object");
  refused("{\"txt\": \"x\"}", "no key 'text' (did you mean 'txt'?)");
  refused("{\"text\": 5}", "expected a string under 'text', got 5");
  refused("{\"text\": null}", "expected a string under 'text', got null");
  refused(std::string(100'000, '['), "nested deeper than 100 levels");
  refused("{\"text\": \"abc\", \"n\": 1e999}", "not valid JSON: number overflow");
  refused("{\"text\": \"a\", \"text\": \"b\"}", "the key 'text' stands twice in one object");
  EXPECT_GRAFT_ERROR(open({write("blank.jsonl", " \n\n")}), ErrorKind::input,
                     HasSubstr("the file holds no text"));
  EXPECT_GRAFT_ERROR(open({write("hollow.jsonl", "{\"text\": \"\"}\n")}), ErrorKind::input,
                     HasSubstr("the file holds no text"));
}

TEST_F(CorpusTest, RefusesTheSameFileTwice) {
  const fs::path file = write("in/a.txt", "a");
  EXPECT_GRAFT_ERROR(open({folder_ / "in", file}), ErrorKind::input,
                     AllOf(HasSubstr("a.txt"), HasSubstr("named more than once")));
  EXPECT_GRAFT_ERROR(open({file, folder_ / "in" / ".." / "in" / "a.txt"}), ErrorKind::input,
                     HasSubstr("named more than once"));
}

TEST_F(CorpusTest, RefusesACacheFolderThatCannotBe) {
  options_.cache_dir = write("file.txt", "x") / "cache";
  EXPECT_GRAFT_ERROR(open({write("a.txt", "a")}), ErrorKind::usage,
                     AllOf(HasSubstr("the cache folder"), HasSubstr("file.txt/cache"),
                           HasSubstr("GRAFT_CACHE_DIR")));
}

TEST(CacheDir, FollowsTheEnvironment) {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? std::string() : std::string(value);
  };
  const std::vector<const char*> names = {"GRAFT_CACHE_DIR", "XDG_CACHE_HOME", "HOME"};
  std::vector<std::string> before;
  for (const char* name : names) before.push_back(variable(name));
  ::setenv("GRAFT_CACHE_DIR", "/one", 1);
  ::setenv("XDG_CACHE_HOME", "/two", 1);
  ::setenv("HOME", "/three", 1);
  EXPECT_EQ(default_cache_dir(), "/one");
  ::setenv("GRAFT_CACHE_DIR", "", 1);
  EXPECT_EQ(default_cache_dir(), "/two/graft");
  ::unsetenv("XDG_CACHE_HOME");
  EXPECT_EQ(default_cache_dir(), "/three/.cache/graft");
  ::unsetenv("HOME");
  EXPECT_EQ(default_cache_dir(), fs::temp_directory_path() / "graft-cache");
  for (std::size_t i = 0; i < names.size(); ++i) ::setenv(names[i], before[i].c_str(), 1);
}

TEST(RequireTokens, SaysHowManyAndWhatFor) {
  const Ids ids(12);
  const Document document{"short.txt", ids};
  require_tokens(document, 12, "one window");
  EXPECT_GRAFT_ERROR(
      require_tokens(document, 13, "one window of evaluation"), ErrorKind::input,
      testing::StrEq("'short.txt': the text has 12 tokens, but 13 are needed for one "
                     "window of evaluation"));
}

TEST(TokenBlockTest, KeepsDocumentsOfAnyLength) {
  const TempFolder folder;
  const std::string key(64, 'k');
  for (const std::vector<std::size_t>& lengths :
       {std::vector<std::size_t>{}, {0}, {1}, {2}, {0, 3, 0}, {5, 1, 100'000}}) {
    const fs::path path = folder / "block";
    std::vector<std::int32_t> all;
    write_file_atomically(path, [&](FileWriter& file) {
      TokenBlock::Writer writer(file, key);
      for (std::size_t i = 0; i < lengths.size(); ++i) {
        Ids ids(lengths[i]);
        for (std::size_t j = 0; j < ids.size(); ++j) ids[j] = static_cast<std::int32_t>(j * 3 + i);
        all.insert(all.end(), ids.begin(), ids.end());
        writer.add(ids, i + 1);
      }
      writer.finish();
    });
    const auto block = TokenBlock::open(path, key);
    ASSERT_NE(block, nullptr);
    EXPECT_THAT(block->tokens(), testing::ElementsAreArray(all));
    ASSERT_EQ(block->entries().size(), lengths.size());
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      EXPECT_EQ(block->entries()[i].tokens, lengths[i]);
      EXPECT_EQ(block->entries()[i].line, i + 1);
    }
    EXPECT_EQ(TokenBlock::open(path, std::string(64, 'x')), nullptr);
  }
  EXPECT_EQ(TokenBlock::open(folder / "none", key), nullptr);
  EXPECT_EQ(TokenBlock::open(folder.path(), key), nullptr);
}

}  // namespace
}  // namespace graft::text
